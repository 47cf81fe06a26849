"""What would end a run after its model is loaded, and is found before."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from lm_polygraph.estimators import RAUQ, ClaimConditionedProbability, Perplexity
from omegaconf import OmegaConf

from lm_polygraph_asmi import ASMI
from lm_polygraph_asmi.runs import misfits
from lm_polygraph_asmi.runs.checks import CHECKS, Plan, read_plan
from lm_polygraph_asmi.runs.rows import DataRow, RunRows
from tests.composing import composed
from tests.tiny_lm import unmaskable


def found(check: str, plan: Plan) -> list[str]:
    findings = list(CHECKS[check](plan))
    assert all(finding.fatal for finding in findings)
    return [finding.text for finding in findings]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Perplexit", "there is no estimator of this name (did you mean Perplexity?)"),
        ("lm_polygraph_asmi.estimators.semasmi", "(did you mean lm_polygraph_asmi.estimators.sem_"),
        ("zz.nothing", "there is no estimator of this name"),
        ("LexicalSimilarity", None),
    ],
)
def test_an_estimator_that_is_not_there(name, message):
    config = composed("asmi_demo")
    config.estimators = [{"name": name, "cfg": {} if message else {"metric": "rougeL"}}]
    assert [
        (f"cannot build {name}: " in fault, message in fault)
        for fault in read_plan(config, rows=False).faults.get("config", [])
    ] == ([(True, True)] * bool(message))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (
            {"name": "RugeMetric"},
            "generation_metrics: RugeMetric is no metric (did you mean RougeM",
        ),
        ({"name": "RougeMetric", "args": ["rougeX"]}, "Invalid rouge type: rougeX"),
        ({"name": "TokenF1", "kwargs": {"squat": True}}, "unexpected keyword argument 'squat'"),
        ({"name": "RougeMetric", "args": ["rouge1"]}, None),
        ({"name": "BLEUMetric"}, None),
        ({"name": "AccuracyMetric"}, None),
        ({"name": "TokenRecall", "kwargs": {"squad": True}}, None),
        ({"name": "BertScoreMetric", "args": ["rh"]}, None),
    ],
)
def test_metrics(metric, message):
    plan = Plan(OmegaConf.create({"generation_metrics": [metric]}))
    assert [message in text for text in found("metrics", plan)] == [True] * bool(message)
    assert not found("metrics", Plan(OmegaConf.create({})))


def test_answers_of_other_prompts(monkeypatch, tmp_path):
    plan = Plan(
        OmegaConf.create({"asmi": {"answers": f"{tmp_path}/nope"}}),
        rows=RunRows([DataRow(f"test:{i}", "c", f"{i}?", "x") for i in range(3)]),
    )
    (text,) = found("answers", plan)
    assert text.startswith(f"asmi.answers: {tmp_path}/nope is neither")
    for known, said in ((["0?"], ["no answers to 2 of 3 prompts (test:1, test:2)"]),
                        (["2?", "1?", "0?"], [])):  # fmt: skip
        run = Mock(return_value=SimpleNamespace(stats={"input_texts": known}))
        monkeypatch.setattr(misfits, "load_run", run)
        for text, part in zip(found("answers", plan), said, strict=True):
            assert part in text
    plan = replace(plan, estimators=[Perplexity(), RAUQ(), ClaimConditionedProbability()])
    maps, others = found("answers", plan)
    assert [("RAUQ" in text, "CCP" in text, "Perplexity" in text) for text in (maps, others)] == [
        (True, False, False), (False, True, False)
    ]  # fmt: skip


def test_a_class_without_attention(tmp_path, tiny):
    unmaskable("heads").model.config.save_pretrained(tmp_path)
    for folder, starts in (
        (
            tmp_path,
            ["MambaForCausalLM has no attention heads: ", "MambaForCausalLM has no attenti"],
        ),
        (tiny, []),
    ):
        config = composed("asmi_demo", "model=asmi_local", f"model.path={folder}")
        config.model.path_to_load_script = composed("asmi_demo").model.path_to_load_script
        plan = Plan(config, [ASMI(), RAUQ(), Perplexity()])
        vars(plan)["without_model"] = []  # weights are not asked for
        for text, start in zip(found("model", plan), starts, strict=True):
            assert (text.startswith(start), "Perplexity" in text) == (True, False)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_device_that_is_not_there(monkeypatch, count):
    """A device map and the number of GPUs that it takes."""
    monkeypatch.setattr(misfits.torch.cuda, "device_count", lambda: count)
    for device_map, needed in (
        ("cuda:0", 1), ("cuda:1", 2), ("cuda", 1), ("auto", 0), (None, 0), ({"a": 0, "b": 2}, 3),
        ({"a": "cpu"}, 0),
    ):  # fmt: skip
        model = {"load_model_args": {"device_map": device_map}, "path_to_load_script": __file__}
        texts = found("model", Plan(OmegaConf.create({"model": model})))
        assert bool(texts) == (count < needed)
        assert all(f"PyTorch sees {count} CUDA devices" in text for text in texts)


@pytest.mark.parametrize(
    ("named", "variable"),
    [({"main": "pkg", "command-line": "{}"}, ""), ({"main": "{}"}, ""),
     ({"command-line": "pkg"}, "{}/x.yaml")],
)  # fmt: skip
def test_a_load_script_that_is_not_there(tmp_path, monkeypatch, named, variable):
    """A relative path begins at the folder of the config, as in LM-Polygraph; `doctor` has main."""
    sources = [{"provider": name, "path": path.format(tmp_path)} for name, path in named.items()]
    monkeypatch.setenv("HYDRA_CONFIG", variable.format(tmp_path))

    def texts(script):
        content = {"hydra": {"runtime": {"config_sources": sources}}}
        content["model"] = {"path_to_load_script": script}
        return found("model", Plan(OmegaConf.create(content)))

    (text,) = texts("own.py")
    assert str(tmp_path / "own.py") in text
    (tmp_path / "own.py").touch()
    assert texts("own.py") == texts(None) == []
