"""Configs found from anywhere, in both kinds of install, and whole runs of polygraph_eval."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import yaml
from hatchling.build import build_wheel
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from lm_polygraph.utils.factory_estimator import FactoryEstimator
from omegaconf import OmegaConf

from lm_polygraph_asmi.host.configs import configs_path
from lm_polygraph_asmi.results.names import MASKED_HEADS, SAVED
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.runs.compose import compose_run
from tests.benchmarks import hub_dataset
from tests.composing import composed
from tests.pages import PAGES, blocks
from tests.polygraph import SCRIPT, polygraph_eval_here, run_forked

BASELINES = 17
YAML = [str(block.parsed) for page in PAGES for block in blocks("yaml", page)]
WHOLE, PLAIN = (
    next(yaml.safe_load(code) for code in YAML if part in code)
    for part in ("- asmi_base", "stat_calculators: [auto]")
)
"""The config that a page tells users to write, and one of LM-Polygraph."""
COMPOSE = """
from hydra import compose, initialize
from omegaconf import OmegaConf
with initialize(version_base=None, config_path=None):
    config = compose("asmi_coqa", overrides=["dataset=anywhere"])
print(OmegaConf.to_yaml(config, resolve=True))
"""
"""Hydra alone, as it is in every program: the whole of polygraph_eval takes ten times as long."""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """A working directory that knows nothing of this repository, and no environment variable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HYDRA_CONFIG", raising=False)
    return tmp_path


def calculator(config, name: str):
    (entry,) = [entry for entry in config.stat_calculators[1:] if entry.name == name]
    return entry


def test_the_groups_stand_alone_in_a_users_config(elsewhere):
    """Without `asmi_base` they give the defaults, as the documentation says."""
    groups = "defaults: [estimators: asmi, stat_calculators: asmi, _self_]"
    (elsewhere / "mine.yaml").write_text(groups)
    with initialize_config_dir(version_base=None, config_dir=str(elsewhere)):
        config = compose("mine")
    OmegaConf.resolve(config)  # what `--cfg job --resolve` does
    names = [str(FactoryEstimator()(e.name, e.cfg)) for e in config.estimators]
    assert names == ["ASMI (60%, K=64)", "Sem-ASMI (60%, K=64)", "Adapt-ASMI (60%, K=64)"]
    masks = config.stat_calculators[1]
    assert (masks.cfg, masks.stats) == ({}, list(MASKED_HEADS))
    assert calculator(config, "SamplingGenerationCalculator").cfg.samples_n == 10
    assert calculator(config, "GreedyProbsCalculator").cfg.answers is None


def test_configs_are_found_where_they_were_installed_from_a_wheel(elsewhere, monkeypatch):
    """A plain install, from the wheel this checkout builds."""
    monkeypatch.chdir(Path(__file__).parents[1])
    site = elsewhere / "site"
    with ZipFile(elsewhere / build_wheel(str(elsewhere))) as wheel:
        wheel.extractall(site)
    assert not list(site.glob("*.data"))  # so that pip, too, only unpacks it
    shown = subprocess.run(
        [sys.executable, "-c", COMPOSE], env=os.environ | {"PYTHONPATH": str(site)}, cwd=elsewhere,
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    config = yaml.safe_load(shown.stdout)
    script = Path(config["model"]["path_to_load_script"])
    assert (script.is_relative_to(site), script.is_file()) == (True, True)
    assert len(config["estimators"]) == BASELINES + 3


def test_a_sweep_has_a_folder_before_its_first_job(monkeypatch):
    """Hydra makes it when its own resolver knows nothing yet."""
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)
    for name in ("asmi_coqa", "asmi_grid", "asmi_stability"):
        hydra = composed(name).hydra
        assert f"output/{name}/" in hydra.sweep.dir
        assert (hydra.mode is None) == (name == "asmi_coqa")  # the others sweep by themselves


@pytest.mark.parametrize(
    "start", [run_forked, pytest.param(subprocess.run, marks=pytest.mark.slow)]
)
def test_a_whole_run_by_config_name_from_any_directory(elsewhere, tiny, start):
    source = hub_dataset("asmi_squad", elsewhere)
    command = [
        sys.executable, str(SCRIPT), "--config-name", "asmi_demo", f"model.path={tiny}",
        "model.load_model_args.gguf_file=null", "model.load_tokenizer_args.gguf_file=null",
        f"data.source={source}", "data.prompt_style=paper", "max_new_tokens=4",
    ]  # fmt: skip
    done = start(command, env={**os.environ}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3000:]}"
    (folder,) = elsewhere.glob("workdir/output/asmi_demo/*/*")
    run = load_run(folder)
    assert (run.scores.shape, run.settings()[0]["attention"]) == ((3, 9), "sdpa")
    assert np.isfinite(run.scores.to_numpy()).all()
    assert sorted(run.stats["target_texts"]) == ["007", "None", "red"]
    # Nothing asked for NLI or cross-encoder.
    assert set(SAVED) - set(run.stats) == {"seconds_nli", "seconds_cross_encoder"}
    # A quiet console with a line now and then, and the whole log in the run folder.
    assert "3 of 3 rows" in done.stderr
    logged = (folder / "polygraph_eval.log").read_text()
    assert ["NEW BATCH" in text for text in (done.stdout, done.stderr, logged)] == [0, 0, 1]


USERS_CONFIG = yaml.safe_load(r"""
hydra: {run: {dir: "${cache_path}/run"}}
defaults: [model: mine, _self_]
cache_path: ./workdir
save_path: ${hydra:run.dir}
task: qa
instruct: false
dataset: questions.csv
text_column: input
label_column: output
train_split: train
eval_split: test
max_new_tokens: 4
load_from_disk: false
generation_params: {stop_strings: ["\n"]}
subsample_eval_dataset: -1
generation_metrics: [{name: RougeMetric, args: [rougeL]}]
ignore_exceptions: false
batch_size: 1
seed: [1]
output_attentions: false
stat_calculators: [auto]
estimators: [name: Perplexity]
""")


@pytest.fixture
def users_config(elsewhere, tiny) -> Callable[[dict], list[str]]:
    """Writes configs as LM-Polygraph's examples have them, and two rows beside them."""
    model = {
        "path": str(tiny), "type": "CausalLM", "load_tokenizer_args": {},
        "path_to_load_script": str(configs_path() / "model" / "asmi_causal.py"),
        "load_model_args": {"device_map": "cpu", "dtype": "float32"},
    }  # fmt: skip
    of_group = [{"name": "Perplexity"}, {"name": GROUPED[1], "cfg": {"metric": "rougeL"}}]
    groups = {
        "model/mine": model, "estimators/default_estimators": of_group,
        "estimators/other": of_group[:1],
    }  # fmt: skip

    def write(config: dict) -> list[str]:
        (elsewhere / "questions.csv").write_text("input,output\nWho built it?,Edda\nWhere?,Brask\n")
        for name, content in (groups | {"mine_eval": config}).items():
            file = elsewhere / "conf" / f"{name}.yaml"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(yaml.safe_dump(content))
        return ["--config-dir", str(elsewhere / "conf"), "--config-name", "mine_eval"]

    return write


BY_GROUP = {key: value for key, value in USERS_CONFIG.items() if key != "estimators"} | {
    "defaults": [{"model": "mine"}, {"estimators": "default_estimators"}, "_self_"]
}
"""As in LM-Polygraph's examples, where the list of estimators is a file of a group."""
GROUPED = ["Perplexity", "LexicalSimilarity"]
PREFIX = "lm_polygraph_asmi.estimators."
LISTS = "estimators", "stat_calculators", "save_stats"


@pytest.mark.parametrize(
    ("config", "overrides", "kept"),
    [
        (BY_GROUP, ["+add=asmi_only"], GROUPED),
        (BY_GROUP, ["+add=asmi", "estimators=other"], GROUPED[:1]),
        (USERS_CONFIG | {"estimators": []}, ["+add=asmi"], []),  # a list in the config itself
        (BY_GROUP | {"defaults": [*BY_GROUP["defaults"], {"add": "asmi"}]}, [], GROUPED),
    ],
)
def test_asmi_is_added_to_a_users_lists(users_config, config, overrides, kept):
    _, configs, _, name = users_config(config | {"save_stats": ["greedy_texts", "sample_texts"]})
    values = {"depth": 0.9, "num_masks": 7, "tau": 0.5, "num_samples": 4, "closing_token": "false"}
    values = [f"asmi.{key}={value}" for key, value in values.items()]
    composed_run = compose_run(name, configs, [*overrides, *values])
    with initialize_config_dir(configs, version_base=None):
        for _ in range(2):  # a config is resolved several times
            resolved = OmegaConf.create({key: list(composed_run[key]) for key in LISTS})
        assert GlobalHydra.instance().is_initialized()  # as it was found
    only = "+add=asmi_only" in overrides
    names = ["asmi", "sem_asmi", "adapt_asmi"][: 3 - only]
    assert [entry.name for entry in resolved.estimators] == [*kept, *(PREFIX + n for n in names)]
    added = [entry.cfg for entry in resolved.estimators[len(kept) :]]
    assert {(cfg.depth, cfg.closing_token) for cfg in added} == {(0.9, False)}
    masks = calculator(resolved, "MaskedHeadsCalculator")
    assert (masks.cfg.num_masks, masks.stats) == (7, list(MASKED_HEADS))
    assert composed_run.asmi.keys() == composed("asmi_demo").asmi.keys()
    assert masks.cfg.result_cache.endswith("workdir/result_cache")  # so that it resumes
    if not only:
        samples = calculator(resolved, "SamplingGenerationCalculator").cfg.samples_n
        assert (added[-1].tau, samples) == (0.5, 4)
    assert [at for at, c in enumerate(resolved.stat_calculators) if c == "auto"] == [0]
    saved = resolved.save_stats
    assert saved[:2] == ["greedy_texts", "sample_texts"]
    assert (len(set(saved)), set(SAVED) <= set(saved)) == (len(saved), True)
    assert list(composed_run.hydra.callbacks) == ["asmi"]


@pytest.mark.parametrize(
    ("name", "own", "word"),
    [
        ("mine_eval", {"asmi": {"scope": "response"}}, r"a node asmi, .* as in asmi\.depth=0\.9"),
        (
            "mine_eval",
            {"estimators": [{"name": f"{PREFIX}asmi"}]},
            "ASMI already: leave out add=asmi",
        ),
        ("asmi_coqa", {}, "ASMI already: leave out add=asmi"),
    ],
)
def test_asmi_is_not_added_twice(users_config, name, own, word):
    _, configs, *_ = users_config(USERS_CONFIG | own)
    with pytest.raises(SystemExit, match=f"^the config {name} has {word}$"):
        list(compose_run(name, None if "coqa" in name else configs, ["+add=asmi"]).estimators)


FEW = ["+add=asmi", "asmi.num_masks=6", "asmi.mask_rate=0.2", "asmi.num_samples=3"]
ADDED = [f"{name} (60%, K=64, S=6, p=0.2)" for name in ("ASMI", "Sem-ASMI", "Adapt-ASMI")]
SEM = [f"Sem-ASMI ({depth}%, K=64, scope=response)" for depth in (60, 90)]
OF_PAGE = ["MaximumSequenceProbability", "Perplexity"]
SHORT = ["hydra.run.dir=workdir/run", "max_new_tokens=4"]


@pytest.mark.parametrize(
    ("config", "overrides", "names", "settings", "ids"),
    [
        # Of a file that LM-Polygraph reads in its own way, no rows are named.
        pytest.param(PLAIN, FEW, [*OF_PAGE, *ADDED],
                     [{"depth": 0.6, "num_masks": 6}], [], id="+add"),
        pytest.param(WHOLE, ["data.source=questions.csv"], [GROUPED[0], *SEM],
                     [{"depth": 0.6}, {"depth": 0.9}], ["test:0", "test:1"], id="page"),
    ],
)  # fmt: skip
def test_a_users_own_config_in_a_run(
    elsewhere, tiny, users_config, config, overrides, names, settings, ids
):
    """With all that report and calibration read, by one override or as a page writes it."""
    polygraph_eval_here(*users_config(config), *overrides, *SHORT, f"model.path={tiny}")
    run = load_run(elsewhere / "workdir" / "run")
    assert list(run.scores) == names
    assert np.isfinite(run.scores.to_numpy()).all()
    asmi = [name for name in names if "ASMI" in name]
    assert set(run.methods) == set(asmi)
    assert (run.scores[asmi] > 0).all(axis=None)
    assert set(MASKED_HEADS) <= set(run.stats)
    status, seeds, rows = (run.manifest[part] for part in ("status", "seeds", "rows"))
    assert (status, seeds["masks"], rows["ids"]) == ("completed", 0, ids)
    for used, expected in zip(run.settings(), settings, strict=True):
        assert used.items() >= expected.items()


def test_a_plain_config_of_the_page_runs_without_asmi(elsewhere, tiny, users_config):
    polygraph_eval_here(*users_config(PLAIN), *SHORT, f"model.path={tiny}")
    assert list(load_run(elsewhere / "workdir" / "run").scores) == OF_PAGE
