"""Scales at which a condition changes, or does, as much as masked heads."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from omegaconf import OmegaConf

from lm_polygraph_asmi._hydra.resolvers import register_resolvers
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.estimators import ASMI
from lm_polygraph_asmi.experiments import scale as room
from lm_polygraph_asmi.experiments.answers import answers_of
from lm_polygraph_asmi.experiments.perturbations import NAMES, load_perturbation
from lm_polygraph_asmi.experiments.scale import ScaleSearch, scales_for
from lm_polygraph_asmi.experiments.scales import matched_scale
from lm_polygraph_asmi.maths import example_masks
from lm_polygraph_asmi.model import (
    perturbed_layer,
    run_unmasked,
    scoring_session,
    subnetwork_log_probs,
)
from lm_polygraph_asmi.scoring.engine import Engine
from tests.report import runs as saved_runs
from tests.scoring.saved import QUESTIONS, scored_run
from tests.tiny_lm import tokenizer, whitebox

BUILDER = "lm_polygraph_asmi.experiments.perturbations"
SCORED = {"num_masks": 5, "mask_rate": 0.4, "scope": "response"}


@pytest.fixture(scope="module")
def tiny():
    return whitebox().model


@pytest.fixture(scope="module")
def run(tiny):
    return scored_run(tiny, QUESTIONS[:1], **SCORED)


@pytest.fixture(scope="module")
def search(tiny, run):
    return ScaleSearch(tiny, answers_of(run, tokenizer()), run.stats["asmi_settings_d60"][0])


@pytest.fixture(scope="module")
def matched(search):
    return search.matched()


def test_scales_match_the_effect_of_heads_to_a_thousandth(search, matched):
    assert tuple(matched) == NAMES
    wanted = search.effect("heads")
    for condition, found in matched.items():
        assert found["effect"] > 0
        assert search.effect(condition, found["effect"]) == pytest.approx(wanted, rel=1e-3), (
            condition
        )
        if condition != "heads":
            assert found["kl_at_effect"] == pytest.approx(wanted, rel=1e-3)
            assert found["kl"] == pytest.approx(search.effect(condition), rel=1e-3)
    # The test could not fail if all conditions did as much as they are.
    assert max(abs(found["kl"] / wanted - 1) for found in matched.values()) > 0.1


def test_a_search_asks_once_for_a_scale_and_seldom(search, monkeypatch):
    asked = []

    def effect(own, condition, perturbation_scale=None):
        asked.append((condition, perturbation_scale))
        return room.ScaleSearch.measured(own, condition, perturbation_scale)

    monkeypatch.setattr(ScaleSearch, "measured", ScaleSearch.effect, raising=False)
    monkeypatch.setattr(ScaleSearch, "effect", effect)
    search.matched(["mlp", "isotropic"])
    assert asked.count(("heads", None)) == 1
    assert len(set(asked)) == len(asked) <= 1 + 2 * 6


def test_the_order_of_the_answers_does_not_matter(tiny):
    """The longest goes first, since what was checked of it holds for the others."""
    run = scored_run(tiny, QUESTIONS[2:], **SCORED)
    used, answers = run.stats["asmi_settings_d60"][0], answers_of(run, tokenizer())
    one, other = (ScaleSearch(tiny, order, used) for order in (answers, answers[::-1]))
    for search in (one, other):
        lengths = [len(example.unmasked.input_ids) for example in search.examples]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] > lengths[-1]
    assert one.effect("mlp", 0.7) == pytest.approx(other.effect("mlp", 0.7), rel=1e-6)


def each(run):
    """Masks and tokens of every answer, drawn again."""
    used = run.stats["asmi_settings_d60"][0]
    for answer in answers_of(run, tokenizer()):
        how = (used["num_masks"], 4, used["mask_rate"], "bernoulli", 0, used["layer"])
        yield answer, example_masks(*how, answer.input_ids.tolist())[1], used["layer"]


def test_scales_match_the_size_of_the_change(matched, run, tiny):
    """Loops over masks and tokens, in double precision."""
    for condition in NAMES:
        sizes = []
        for answer, masks, layer in each(run):
            with scoring_session(tiny, "sdpa"):
                unmasked = run_unmasked(
                    tiny, answer.input_ids, answer.prompt_length, [layer], "response"
                )
                change = load_perturbation(condition, matched[condition]["norm"])
                at = unmasked.predicting
                plain = perturbed_layer(tiny, unmasked, layer, torch.ones(1, 4), at)[0].double()
                found = perturbed_layer(tiny, unmasked, layer, masks, at, change).double()
            for t in range(len(plain)):
                squares = [float((row[t] - plain[t]).norm() ** 2) for row in found]
                sizes.append(np.sqrt(np.mean(squares)) / float(plain[t].norm()))
        assert np.median(sizes) == pytest.approx(matched["heads"]["relative_change"], rel=1e-3)
    for condition in ("foreign", "isotropic"):  # by construction
        assert matched[condition]["norm"] == pytest.approx(1, rel=1e-3)


def test_the_effect_is_the_mean_divergence_from_the_unmasked_model(search, run, tiny):
    found = []
    for answer, masks, layer in each(run):
        rows = torch.cat([masks, torch.ones(1, 4)])
        *perturbed, plain = subnetwork_log_probs(
            tiny, answer.input_ids, answer.prompt_length, layer, rows, scope="response",
            change=load_perturbation("mlp"), attention="sdpa",
        ).double()  # fmt: skip
        for row in perturbed:
            found += [float((p.exp() * (p - q)).sum()) for p, q in zip(plain, row, strict=True)]
    assert search.effect("mlp") == pytest.approx(np.mean(found), rel=1e-5)


def test_rows_that_are_evaluated_are_refused(run, monkeypatch):
    monkeypatch.setattr(room, "load_run", lambda _: run)
    with pytest.raises(ValueError, match="1 prompts of held are also in run"):
        scales_for("run", "held", "tiny")


def test_a_file_of_scales_is_what_a_setting_takes(tiny, run, monkeypatch, tmp_path):
    held = scored_run(tiny, QUESTIONS[2:], **SCORED)
    monkeypatch.setattr(room, "load_run", lambda path: run if "run" in str(path) else held)
    monkeypatch.setattr(room, "load_named", lambda *_, **__: (tiny, tokenizer()))
    monkeypatch.setattr(room, "NAMES", ("heads", "mlp"))
    monkeypatch.setattr(ScaleSearch.matched, "__defaults__", (("heads", "mlp"),))
    for name in ("run", "held"):
        (tmp_path / name).mkdir()
    out = tmp_path / "scales.json"
    done = CliRunner().invoke(
        main,
        ["experiments", "scale", str(tmp_path / "run"), "--held-out", str(tmp_path / "held"),
         "--model", "tiny", "--rows", "1", "--out", str(out)],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "mlp: by effect" in done.output
    found = json.loads(out.read_text())
    assert (found["rows"], found["tokens"]) == (1, 4)
    own = found["conditions"]["mlp"]
    assert matched_scale(str(out), "mlp") == own["effect"]
    assert matched_scale(out, "mlp", "norm", times=2) == 2 * own["norm"]
    assert matched_scale(str(out), "heads") is None
    assert matched_scale(out, "heads", times=0.5) == 0.5
    with pytest.raises(ValueError, match="no scale of 'foreign' matched by effect"):
        matched_scale(str(out), "foreign")


def test_rows_are_taken_evenly_from_all_that_are_held_out(tiny, run, monkeypatch):
    held, taken = scored_run(tiny, QUESTIONS[1:2], **SCORED), []
    (answer,) = answers_of(held, tokenizer())

    class Search:
        def __init__(self, model, answers, *_):
            taken.extend(answer.row for answer in answers)

        def matched(self):
            return {}

    monkeypatch.setattr(room, "load_run", {"run": run, "held": held}.get)
    monkeypatch.setattr(room, "load_named", lambda *_, **__: (tiny, tokenizer()))
    monkeypatch.setattr(room, "answers_of", lambda *_: [answer._replace(row=i) for i in range(7)])
    monkeypatch.setattr(room, "ScaleSearch", Search)
    found = scales_for("run", "held", "tiny", rows=3)
    assert taken == [0, 2, 4]
    assert (found["rows"], found["tokens"]) == (3, 12)


def test_scales_for_a_run_of_an_condition_are_refused(tiny, monkeypatch):
    condition = scored_run(tiny, QUESTIONS[:1], change=load_perturbation("mlp"), **SCORED)
    held = scored_run(tiny, QUESTIONS[1:2], **SCORED)
    monkeypatch.setattr(room, "load_run", {"condition": condition, "held": held}.get)
    with pytest.raises(ValueError, match="a run of a control condition: name the run of heads"):
        scales_for("condition", "held", "tiny")


def test_what_is_no_file_of_scales(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file of perturbation scales"):
        matched_scale(str(tmp_path / "none.json"), "mlp")
    other = tmp_path / "other.json"
    other.write_text("[]")
    with pytest.raises(ValueError, match="is not a file of"):
        matched_scale(str(other), "mlp")
    refused = {"format": 1, "conditions": {"mlp": {"unsupported": "a mixture of experts"}}}
    other.write_text(json.dumps(refused))
    with pytest.raises(ValueError, match="a mixture of experts"):
        matched_scale(str(other), "mlp")
    with pytest.raises(ValueError, match="'effect', 'norm', got 'size'"):
        matched_scale(other, "mlp", "size")


def test_scales_are_for_the_settings_they_were_matched_at(tmp_path):
    file = tmp_path / "scales.json"
    there = {"depth": 0.6, "scope": "response", "mask_rate": 0.15, "num_masks": 40}
    conditions = {"mlp": {"effect": 0.8, "norm": 0.5}}
    file.write_text(json.dumps({"format": 1, "settings": there, "conditions": conditions}))
    own = {"scope": "response", "depth": 0.6, "num_masks": 300}  # more masks, the same effect
    assert matched_scale(file, "mlp", "effect", 1.0, own, own | {"mask_rate": 0.15}) == 0.8
    for wrong, said in (
        ({"scope": "all"}, "matched at scope response, here it is all"),
        ({"depth": 0.9}, r"at depth 0\.6, here it is 0\.9"),
        ({"mask_rate": 0.3}, r"at mask_rate 0\.15, here it is 0\.3"),
    ):
        with pytest.raises(ValueError, match=said):
            matched_scale(file, "mlp", "effect", 1.0, own, own | wrong)
    config = OmegaConf.create(
        {"asmi": {"scope": "all", "depths": [0.6], "perturbation_builder": BUILDER},
         "perturbation_scale": f"${{asmi_scale:{file},mlp,effect,1}}"}
    )  # fmt: skip
    register_resolvers()
    with pytest.raises(Exception, match="matched at scope response, here it is all"):
        _ = config.perturbation_scale
    config.asmi.scope = "response"
    assert config.perturbation_scale == 0.8
    del config.asmi.perturbation_builder
    with pytest.raises(Exception, match=r"asmi\.perturbation_builder must name "):
        _ = config.perturbation_scale


@pytest.mark.parametrize("build", [ASMI, Engine, ASMIConfig])
def test_a_file_in_the_place_of_a_scale_is_refused_with_what_to_do(build):
    said = r"perturbation_scale must be a number, got 'scales\.json': .* as controls\.scales"
    with pytest.raises(ValueError, match=said):
        build(perturbation_scale="scales.json")


def test_scales_are_for_the_model_and_data_set_they_were_matched_on(tmp_path):
    file, data = tmp_path / "scales.json", {"source": "a/dev.json", "closed_book": False}
    own = {"path": "models/tiny", "revision": "sha256:1"}
    content = {"format": 1, "model": own, "dataset": data, "conditions": {"mlp": {"effect": 0.8}}}
    file.write_text(json.dumps(content))
    moved = {"path": "elsewhere/tiny", "revision": "sha256:1"}
    elsewhere = {
        "source": "b/dev.json",
        "prompt_style": "demo",
    }  # what is not known of both counts not
    for model, dataset in ((own, data), (moved, elsewhere), (None, None), ({"path": "tiny"}, {})):
        assert matched_scale(file, "mlp", model=model, dataset=dataset) == 0.8
    for model, dataset, said in (
        (moved | {"revision": "sha256:2"}, data, r"are for model models/tiny \(sha256:1\), here"),
        ({"path": "models/large", "revision": "unknown"}, data, "here it is models/large"),
        (own, {"source": "other.json"}, r"data\.source a/dev\.json, here it is other\.json"),
        (own, {"closed_book": True}, r"data\.closed_book False, here it is True"),
    ):
        with pytest.raises(ValueError, match=said):
            matched_scale(file, "mlp", model=model, dataset=dataset)
    config = OmegaConf.create(
        {"model": {"path": str(tmp_path)}, "data": {"source": "dev.json"},
         "asmi": {"perturbation_builder": BUILDER},
         "perturbation_scale": f"${{asmi_scale:{file},mlp,effect,1}}"}
    )  # fmt: skip
    register_resolvers()
    with pytest.raises(Exception, match=f"here it is {tmp_path}"):
        _ = config.perturbation_scale
    file.write_text(json.dumps(content | {"model": {"path": "x", "revision": "unknown"}}))
    config.model.path = "folder/x"
    assert config.perturbation_scale == 0.8
    config.data.source = "other.json"
    with pytest.raises(Exception, match=r"here it is other\.json"):
        _ = config.perturbation_scale


def test_rows_are_held_out_of_the_same_model_and_data_set(run, monkeypatch):
    about = {"run": {"dataset": {"closed_book": False}}, "held": {"dataset": {"closed_book": True}}}
    monkeypatch.setattr(room, "load_run", lambda path: replace(run, manifest=about[path]))
    with pytest.raises(
        ValueError, match=r"run has data\.closed_book False, here it is True in held"
    ):
        scales_for("run", "held", "tiny")


@pytest.fixture
def found_scales(monkeypatch):
    """What the command finds of a model whose layers are no plain chain."""
    own = {"norm": None, "effect": 0.7, "relative_change": None, "kl": 0.1}
    content = {"format": 1, "conditions": {"heads": own | {"norm": 1.0}, "mlp": own}}
    monkeypatch.setattr(room, "scales_for", lambda *_, **__: content)


def invoke(tmp_path, out):
    words = [
        "experiments",
        "scale",
        str(tmp_path),
        "--held-out",
        str(tmp_path),
        "--model",
        "tiny",
        "--out",
    ]
    return CliRunner().invoke(main, [*words, str(out)], env={"COLUMNS": "200"})


@pytest.mark.usefixtures("found_scales")
def test_a_size_that_is_not_known_is_said(tmp_path):
    done = invoke(tmp_path, tmp_path / "scales.json")
    assert done.exit_code == 0, done.exception
    assert "mlp: by effect 0.7, by norm none found" in done.output


@pytest.mark.usefixtures("found_scales")
def test_a_folder_that_is_not_there_is_told_before_the_search(tmp_path):
    for done in (
        invoke(tmp_path, tmp_path / "none" / "scales.json"),
        CliRunner().invoke(
            main,
            ["experiments", "probe", str(saved_runs.save(tmp_path / "run")), "--model",
             "no such model", "--out", str(tmp_path / "none" / "probe.json")],
        ),
    ):  # fmt: skip
        assert done.exit_code == 1
        assert "its folder does not exist" in done.output
        assert isinstance(done.exception, SystemExit)
