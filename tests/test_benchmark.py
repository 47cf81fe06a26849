"""Every shipped config, run on a tiny model and tiny data in its benchmark's own format."""

import json
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from hydra.core.hydra_config import HydraConfig
from lm_polygraph.utils.factory_estimator import FactoryEstimator
from lm_polygraph.utils.generation_parameters import GenerationParameters
from omegaconf import OmegaConf, read_write

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.host.configs import configs_path
from lm_polygraph_asmi.results.names import SAVED
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.runs.rows import read_data
from tests import tiny_lm
from tests.benchmarks import COLUMNS, hub_dataset
from tests.composing import composed
from tests.polygraph import polygraph_eval_here
from tests.runs.test_squad import QUESTION, write


def shipped(group: str) -> list[str]:
    return sorted(path.stem for path in (configs_path() / group).glob("*.yaml"))


RUNS = sorted(set(shipped(".")) - {"asmi_base"})
BASELINES = 17
ROUGE = "generation_metrics=[{name: RougeMetric, args: [rougeL]}]"  # needs no model
NEEDED = {"asmi_stability": ["answers=somewhere"], "asmi_heads": ["asmi.answers=somewhere"]}
"""What a user must give besides data and model."""
TRIVIA = "asmi_triviaqa", "benchmark=asmi_triviaqa"
"""The benchmark of which each question has several right answers."""


@pytest.fixture
def start(at_stand_ins, tiny, tmp_path) -> Callable[..., Path]:
    """Runs a shipped config in seconds, everything else as shipped; returns the run's folder."""

    def run(
        name: str, benchmark: str, *own: str, home: Path = tmp_path, model: Path = tiny
    ) -> Path:
        polygraph_eval_here(
            "--config-name", name, "model=asmi_local", f"model.path={model}",
            f"data.source={hub_dataset(benchmark, home)}", f"cache_path={home}",
            *at_stand_ins.overrides[: -1 if name == "asmi_demo" else None],  # without AlignScore
            f"hydra.run.dir={home}/run", "max_new_tokens=3", "asmi.num_samples=3",
            "~generation_params.stop_strings",  # a random model would have to hit a newline
            *own,
        )  # fmt: skip
        return home / "run"

    return run


@pytest.fixture
def answers(start, tmp_path_factory) -> Path:
    """A run of all methods over TriviaQA that others take their answers from; made once."""
    home = tmp_path_factory.getbasetemp() / "answers"
    if not home.exists():
        start("asmi_depth_sweep", *TRIVIA, "asmi.top_k=8", home=home)
    return home / "run"


def names_of(config) -> list[str]:
    """Names of its methods, each once, whose statistics its calculators return."""
    estimators = [FactoryEstimator()(e.name, e.get("cfg", {})) for e in config.estimators]
    names = [str(estimator) for estimator in estimators]
    assert len(set(names)) == len(names)
    needed = {stat for each in estimators for stat in each.stats_dependencies if "asmi" in stat}
    assert needed <= {stat for entry in config.stat_calculators[1:] for stat in entry.stats}
    return names


GROUPS = [f"asmi_demo estimators={of}" for of in ("asmi", "asmi_greedy", "asmi_no_side_models")]
"""Those of no config."""


@pytest.mark.parametrize("words", [*RUNS, *GROUPS])
def test_every_config_composes_and_names_what_exists(words):
    name, *overrides = words.split()
    overrides += NEEDED.get(name, [])
    config = composed(name, "dataset=anywhere", "model.path=anywhere", *overrides)
    job = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    OmegaConf.resolve(job)
    assert names_of(job)
    assert Path(job.model.path_to_load_script).is_file()
    for function in filter(None, (job.process_output_fn, job.process_target_fn)):
        assert f"def {function.fn_name}(" in Path(function.path).read_text()
    for entry in job.stat_calculators[1:]:
        assert import_module(entry.builder).load_stat_calculator
    assert (job.save_stats, job.batch_size) == (SAVED, 1)
    # Every generation parameter is pinned; max_new_tokens there serves estimate_uncertainty alone.
    pinned = job.generation_params
    assert pinned.keys() == set(GenerationParameters.__dataclass_fields__) - {"max_new_tokens"}
    assert (pinned.do_sample, pinned.temperature) == (False, 0.5)
    assert (job.model.load_model_args.attn_implementation == "eager") or not job.output_attentions
    # No two jobs of a sweep share a folder, whatever is swept: their number is a part of it.
    for number in (0, 1):
        with read_write(config.hydra):
            config.hydra.job.num = number
        HydraConfig.instance().set_config(config)
        assert str(config.hydra.sweep.subdir).endswith(str(number))


@pytest.mark.parametrize("name", shipped("model"))
def test_every_model(name):
    here = name in ("asmi_local", "asmi_smollm2")
    file = OmegaConf.load(configs_path() / f"model/{name}.yaml")
    model = OmegaConf.create({"model": file}).model
    own = {} if here else {"dtype": "bfloat16", "device_map": "auto", "revision": "main"}
    own["attn_implementation"] = "eager"  # RAUQ
    assert model.load_model_args == OmegaConf.merge(model.load_model_args, own)
    assert here or model.load_tokenizer_args.revision == "main"


def test_what_needs_no_side_model_is_all_but_five():
    """`tests/host/test_side_models.py` sees that it needs none."""
    alone = names_of(composed("asmi_demo", "estimators=asmi_no_side_models"))
    assert {*alone} < {*names_of(composed("asmi_coqa"))}
    assert len(alone) == BASELINES + 3 - 5


@pytest.mark.parametrize(
    ("like", "name", "asmi", "data"),
    [
        ("asmi_triviaqa estimators=asmi_only", "asmi_triviaqa_k256", {"top_k": 256}, {}),
        ("asmi_squad estimators=asmi_single_pass", "asmi_squad_seed1", {"seed": 1}, {}),
        ("asmi_squad", "asmi_squad_closed_book", {}, {"closed_book": True, "grounded": False}),
        ("asmi_coqa", "asmi_benchmark", {}, {}),
        # A location is one word, and compared as it stands.
        ("asmi_coqa max_new_tokens=3 process_output_fn=null process_target_fn=null",
         "asmi_babiqa", {}, {"source": "LM-Polygraph/babi_qa"}),
        (
            "asmi_benchmark estimators=asmi_stability +answers=a +run_seed=0",
            "asmi_stability answers=a",
            {"answers": "${answers}"} | dict.fromkeys(("seed", "sampling_seed"), "${run_seed}"),
            {"size": 500},
        ),
    ],
)  # fmt: skip
def test_a_config_that_differs_from_another_in_one_thing(like, name, asmi, data):
    one, two = (OmegaConf.to_container(composed(*words.split())) for words in (like, name))
    changed = {"asmi": one["asmi"] | asmi, "data": one["data"] | data, "hydra": two["hydra"]}
    assert two == one | changed


@pytest.mark.parametrize("benchmark", COLUMNS)
def test_prompts_reach_the_model_as_the_dataset_has_them(benchmark, tmp_path):
    data = composed(benchmark).data
    read = read_data(hub_dataset(benchmark, tmp_path), "test", data.text_column, data.label_column)
    assert [row.input for row in read.rows] == COLUMNS[benchmark]["input"]  # to the last newline
    assert [row.output for row in read.rows] == COLUMNS[benchmark]["output"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*RUNS} - {"asmi_grid", "asmi_depth_sweep", *NEEDED}))
def test_every_config_runs(name, start):
    """They differ from the sweep below in few values, or other tests run them every day: those of
    tests/runs CoQA, test_plugin the demo, over SQuAD's rows."""
    # Their methods are those of the sweep, of which two do for other data.
    fewer = ["estimators=asmi_only"] * (name in ("asmi_squad", "asmi_babiqa", "asmi_triviaqa"))
    config = composed(name, *fewer)
    benchmark = config.hydra.runtime.choices.get("benchmark", "asmi_squad")
    run = load_run(start(name, benchmark, "data.sample=2", *fewer))
    assert list(run.scores) == names_of(config)
    assert np.isfinite(run.scores.to_numpy()).all()
    assert run.manifest["status"] == "completed"
    assert len(run.manifest["rows"]["ids"]) == len(run.scores) >= 2
    assert run.settings()[0]["top_k"] == config.asmi.top_k


def test_all_baselines_all_depths_and_alignscore_in_one_run(answers):
    run = load_run(answers)
    variants = product((60, 70, 80, 90), ("ASMI", "Sem-ASMI", "Adapt-ASMI"))
    names = [f"{name} ({depth}%, K=8)" for depth, name in variants]
    assert [*run.scores][BASELINES:] == names
    assert {name: (str(own), own.stop) for name, own in run.methods.items()} == {
        name: (name, ()) for name in names
    }
    assert len(run.manifest["rows"]["ids"]) == len(run.scores) == 3
    assert np.isfinite(run.scores.to_numpy()).all()
    # Methods tell the answers apart, each in its own way.
    varied = run.scores.drop(columns="SemanticEntropy").nunique()
    assert (varied > 1).all(), varied
    manifest = run.manifest
    assert (list(run.quality), len({*manifest["rows"]["clusters"]})) == (["AlignScore"], 3)
    assert manifest["seconds"].keys() == {
        "greedy", "samples", "nli", "cross_encoder", "asmi", "diversity"
    }  # fmt: skip
    assert [used["depth"] for used in run.settings()] == [0.6, 0.7, 0.8, 0.9]
    assert manifest["peak_memory_bytes"]["main"] > 1e8


def test_baselines_alone_run_on_a_model_without_heads(start, tmp_path):
    model = tiny_lm.unmaskable("heads")
    for part in (model.model, model.tokenizer):
        part.save_pretrained(tmp_path / "mamba")
    own = "estimators=asmi_side_models", "data.sample=2", ROUGE
    run = start("asmi_squad", "asmi_squad", *own, model=tmp_path / "mamba")
    assert np.isfinite(load_run(run).scores.to_numpy()).sum(0).tolist() == [2] * 5


@pytest.mark.slow
def test_stability_of_seeds_on_fixed_answers(answers, start, tmp_path):
    other_seeds = tmp_path / "other_seeds"
    start(
        "asmi_stability", *TRIVIA, f"answers={answers}", "data.first=3", "max_new_tokens=4",
        "asmi.top_k=8", f"hydra.sweep.dir={other_seeds}", "run_seed=0,1", ROUGE,
    )  # fmt: skip
    given, first, second = map(load_run, (answers, other_seeds / "0", other_seeds / "1"))
    for run in (first, second):  # which would generate longer answers
        assert run.stats["greedy_tokens"] == given.stats["greedy_tokens"]
    # Seed 0 has the masks of the given run; seed 1 has other masks and samples.
    name = "ASMI (60%, K=8)"
    np.testing.assert_array_equal(first.scores[name], given.scores[name])
    of_first, of_second = (
        run.scores.filter(regex=r"^(ASMI|Adapt-ASMI|MonteCarloSequenceEntropy)")
        for run in (first, second)
    )
    assert (of_first.shape[1], np.isclose(of_first, of_second).all(0).any()) == (3, False)
    assert first.stats["sample_texts"] != second.stats["sample_texts"]


def test_heads_are_analysed_on_the_first_answers_of_a_run(answers, tiny, start, tmp_path):
    start(
        "asmi_heads", *TRIVIA, f"asmi.answers={answers}", "data.first=2", "max_new_tokens=4",
        "asmi.num_masks=60", ROUGE,
    )  # fmt: skip
    given, run = load_run(answers), load_run(tmp_path / "run")
    assert run.stats["greedy_tokens"] == given.stats["greedy_tokens"][:2]
    assert [used["depth"] for used in run.settings()] == [0.6, 0.9]
    of_both = [*run.at(0.6, "masks", "kl"), *run.at(0.9, "masks", "kl")]
    assert {len(own[name]) for own in of_both for name in ("masks", "kl")} == {60}
    paper = composed("asmi_heads", "asmi.answers=somewhere")
    assert (paper.data.first, paper.asmi.num_masks, paper.asmi.mask_rate) == (500, 300, None)
    out = tmp_path / "probe.json"
    words = (tmp_path / "run", "--model", tiny, "--tokens", 2, "--draws", 3, "--out", out)
    found = CliRunner().invoke(main, ["heads", "probe", *map(str, words)])
    assert (found.exit_code, f"{out}: " in found.output) == (0, True), found.output
    assert json.loads(out.read_text())["draws"] == 3


def test_the_grid_has_sixteen_settings_in_shards():
    grid = composed("asmi_grid", "data.num_shards=3")
    assert grid.hydra.launcher._target_.endswith("JoblibLauncher")
    swept = dict(grid.hydra.sweeper.params)
    assert swept.pop("data.shard") == "range(3)"
    for group, node in (("model", "path"), ("benchmark", "data")):
        files = [configs_path() / group / f"{name}.yaml" for name in swept.pop(group).split(",")]
        assert len({str(OmegaConf.load(file)[node]) for file in files}) == len(files) == 4
    assert (swept, len(names_of(grid))) == ({}, BASELINES + 3)


@pytest.mark.slow
def test_a_grid_in_shards_gives_what_unsplit_runs_give(tiny, tmp_path, monkeypatch):
    """Two benchmarks in two shards, a job each, two jobs at a time."""
    monkeypatch.chdir(tmp_path)
    questions = [
        QUESTION._replace(id=str(i), question=f"Whose mill is number {i}?", answer=answer)
        for i, answer in enumerate(["red", "blue kites", "True", "the passage", "Brask"])
    ]
    overrides = [
        f"data.source={write(tmp_path / 'questions.json', questions)}", "model=asmi_local",
        "estimators=asmi_no_side_models", "max_new_tokens=4", "asmi.num_samples=2",
        ROUGE, f"cache_path={tmp_path}",
        f"model.path={tiny}", "~generation_params.stop_strings",
    ]  # fmt: skip
    benchmarks = "asmi_squad", "asmi_squad_closed_book"
    polygraph_eval_here(
        "--config-name", "asmi_grid", "--multirun", *overrides,
        f"benchmark={','.join(benchmarks)}", "data.num_shards=2", "data.shard=0,1",
        "hydra.sweep.dir=grid", "hydra.launcher.n_jobs=2",
    )  # fmt: skip
    merged = CliRunner().invoke(main, ["merge", "grid", "--out", "merged"])
    assert merged.exit_code == 0, merged.output
    for name in benchmarks:
        polygraph_eval_here(
            "--config-name", "asmi_benchmark", *overrides, f"benchmark={name}",
            "asmi.result_cache=null", f"hydra.run.dir={name}-whole",
        )  # fmt: skip
        whole = load_run(f"{name}-whole")
        joined = load_run(next(Path("merged").rglob(f"{name}/**/ue_manager_seed1")))
        for stat in ("input_texts", "sample_texts"):
            assert joined.stats[stat] == whole.stats[stat]
        pd.testing.assert_frame_equal(joined.scores, whole.scores, rtol=1e-4, atol=1e-6)
        assert joined.manifest["rows"] == whole.manifest["rows"]
        assert len(joined.manifest["merged_from"]) == 2
