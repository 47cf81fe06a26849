"""Configs found from anywhere, in both kinds of install, and whole runs of polygraph_eval."""

import os
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from hatchling.build import build_wheel
from hydra import compose, initialize, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from lm_polygraph.utils.factory_estimator import FactoryEstimator
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.results.names import MASKED_HEADS, SAVED
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.runs.compose import compose_run
from tests import tiny_lm
from tests.composing import composed
from tests.pages import PAGES, blocks
from tests.polygraph import polygraph_eval, polygraph_eval_here, run_forked
from tests.runs.test_squad import QUESTION, write

BASELINES = 17
YAML = {
    f"{page.name}:{block.line}": str(block.parsed)
    for page in PAGES
    for block in blocks("yaml", page)
}
"""The entries that pages tell users to write."""


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


@pytest.mark.usefixtures("elsewhere")
def test_one_knob_sets_calculator_estimators_and_saved_statistics():
    config = composed("asmi_coqa", "asmi.depth=0.9", "asmi.top_k=256")
    assert config.stat_calculators[1].cfg.depths == [0.9]
    assert set(MASKED_HEADS) == set(config.stat_calculators[1].stats) <= set(config.save_stats)
    assert config.estimators[-1].cfg.depth == 0.9
    assert config.estimators[-1].cfg.top_k == 256
    values = ("asmi.tau=0.5", "asmi.num_samples=4", "asmi.closing_token=false")
    gated = composed("asmi_coqa", *values)
    assert not any(e.cfg.closing_token for e in gated.estimators[-3:])
    assert gated.estimators[-1].cfg.tau == 0.5
    assert calculator(gated, "SamplingGenerationCalculator").cfg.samples_n == 4


def test_the_groups_stand_alone_in_a_users_config(elsewhere):
    """Without a node `asmi` they give the defaults, as the documentation says."""
    (code,) = [code for code in YAML.values() if "defaults:" in code]
    (elsewhere / "mine.yaml").write_text(code)
    with initialize_config_dir(version_base=None, config_dir=str(elsewhere)):
        config = compose("mine")
    OmegaConf.resolve(config)  # what `--cfg job --resolve` does
    names = [str(FactoryEstimator()(e.name, e.cfg)) for e in config.estimators]
    assert names == ["ASMI (60%, K=64)", "Sem-ASMI (60%, K=64)", "Adapt-ASMI (60%, K=64)"]
    assert config.stat_calculators[1].cfg == {}
    assert config.stat_calculators[1].stats == list(MASKED_HEADS)
    assert calculator(config, "SamplingGenerationCalculator").cfg.samples_n == 10
    assert calculator(config, "GreedyProbsCalculator").cfg.answers is None


COMPOSE = """
import sys
from hydra import compose, initialize
from omegaconf import OmegaConf
with initialize(version_base=None, config_path=None):
    config = compose(sys.argv[1], overrides=sys.argv[2:])
print(OmegaConf.to_yaml(config, resolve=True))
"""


def test_configs_are_found_where_they_were_installed_from_a_wheel(elsewhere, monkeypatch):
    """A plain install, from the wheel this checkout builds."""
    monkeypatch.chdir(Path(__file__).parents[1])
    site = elsewhere / "site"
    with ZipFile(elsewhere / build_wheel(str(elsewhere))) as wheel:
        wheel.extractall(site)
    assert not list(site.glob("*.data"))  # so that pip, too, only unpacks it
    monkeypatch.chdir(elsewhere)
    # Hydra alone, as it is in every program: the whole of polygraph_eval takes ten times as long.
    shown = subprocess.run(
        [sys.executable, "-c", COMPOSE, "asmi_coqa", "dataset=anywhere"],
        env=os.environ | {"PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
    )
    config = yaml.safe_load(shown.stdout)
    load_script = Path(config["model"]["path_to_load_script"])
    assert load_script.is_relative_to(site)
    assert load_script.is_file()
    assert len(config["estimators"]) == BASELINES + 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_lm.save(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    rows = [QUESTION._replace(id=str(i), answer=a) for i, a in enumerate(["red", "None", "007"])]
    return write(tmp_path_factory.mktemp("data") / "questions.json", rows)


@pytest.mark.parametrize(
    "start", [run_forked, pytest.param(subprocess.run, marks=pytest.mark.slow)]
)
def test_a_whole_run_by_config_name_from_any_directory(elsewhere, tiny, questions, start):
    done = polygraph_eval(
        "--config-name", "asmi_demo", f"model.path={tiny}", "model.load_model_args.gguf_file=null",
        "model.load_tokenizer_args.gguf_file=null", f"data.source={questions}",
        "data.prompt_style=paper", "max_new_tokens=4", run=start,
    )  # fmt: skip
    (folder,) = elsewhere.glob("workdir/output/asmi_demo/*/*")
    run = load_run(folder)
    assert run.scores.shape == (3, 9)
    assert np.isfinite(run.scores.to_numpy()).all()
    assert sorted(run.stats["target_texts"]) == ["007", "None", "red"]
    # Nothing asked for NLI or cross-encoder.
    assert set(SAVED) - set(run.stats) == {"seconds_nli", "seconds_cross_encoder"}
    assert run.settings()[0]["attention"] == "sdpa"
    # A quiet console with a progress bar, and the whole log in the run folder.
    assert "3/3" in done.stderr
    assert "NEW BATCH" not in done.stdout + done.stderr
    assert "NEW BATCH" in (folder / "polygraph_eval.log").read_text()
    shown = CliRunner().invoke(main, ["results", str(folder)])
    assert shown.exit_code == 0
    assert "RAUQ" in shown.output


USERS_LOAD_SCRIPT = """
from transformers import AutoModelForCausalLM, AutoTokenizer


def load_model(model_path: str, device_map: str):
    return AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager").eval()


def load_tokenizer(model_path: str):
    return AutoTokenizer.from_pretrained(model_path, padding_side="left")
"""

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


def added(config: dict, entries: dict) -> dict:
    """A user's config with the documentation's entries: lists go on, nodes are joined."""
    joined = dict(config)
    for key, value in entries.items():
        if isinstance(value, list):
            own = config.get(key, [])
            joined[key] = [*own, *(entry for entry in value if entry not in own)]
        else:
            joined[key] = added(config.get(key, {}), value) if isinstance(value, dict) else value
    return joined


def write_users_config(folder: Path, tiny: Path, config: dict) -> Path:
    """A folder of configs as LM-Polygraph's examples have it, and two rows beside it."""
    rows = "Who built it?,Edda\nWhere?,Brask\n"
    (folder / "questions.csv").write_text(f"input,output\n{rows}")
    configs = folder / "conf"
    (configs / "model").mkdir(parents=True)
    (configs / "estimators").mkdir()
    (configs / "load.py").write_text(USERS_LOAD_SCRIPT)
    model = {
        "path": str(tiny), "type": "CausalLM", "path_to_load_script": "load.py",
        "load_model_args": {"device_map": "cpu"}, "load_tokenizer_args": {},
    }  # fmt: skip
    (configs / "model" / "mine.yaml").write_text(yaml.safe_dump(model))
    of_group = [{"name": "Perplexity"}, {"name": "LexicalSimilarity", "cfg": {"metric": "rougeL"}}]
    (configs / "estimators" / "default_estimators.yaml").write_text(yaml.safe_dump(of_group))
    (configs / "estimators" / "other.yaml").write_text(yaml.safe_dump(of_group[:1]))
    (configs / "mine_eval.yaml").write_text(yaml.safe_dump(config))
    return configs


@pytest.mark.parametrize("page", [page for page, code in YAML.items() if "MaskedHeads" in code])
def test_the_entries_for_a_users_own_config(elsewhere, tiny, page):
    config = added(USERS_CONFIG, yaml.safe_load(YAML[page]))
    configs = write_users_config(elsewhere, tiny, config)
    polygraph_eval_here("--config-dir", str(configs), "--config-name", "mine_eval")
    run = load_run(elsewhere / "workdir" / "run")
    depths = config.get("asmi", {}).get("depths", [0.6])
    own = [f"Sem-ASMI ({depth:.0%}, K=64)" for depth in depths]
    assert list(run.scores) == ["Perplexity", *own]
    assert (run.scores[own] > 0).all(axis=None)
    # What is saved besides, and the manifest: all that the report and a reference read.
    assert set(MASKED_HEADS) <= set(run.stats)
    assert run.manifest["status"] == "completed"
    assert run.manifest["seeds"]["masks"] == 0
    assert [settings["depth"] for settings in run.settings()] == depths


BY_GROUP = {key: value for key, value in USERS_CONFIG.items() if key != "estimators"} | {
    "defaults": [{"model": "mine"}, {"estimators": "default_estimators"}, "_self_"]
}
"""As in LM-Polygraph's examples, where the list of estimators is a file of a group."""
GROUPED = ["Perplexity", "LexicalSimilarity"]
PREFIX = "lm_polygraph_asmi.estimators."


@pytest.mark.parametrize(
    ("config", "overrides", "kept"),
    [
        (BY_GROUP, ["+add=asmi"], GROUPED),
        (BY_GROUP, ["+add=asmi_only"], GROUPED),
        (BY_GROUP, ["+add=asmi", "estimators=other"], GROUPED[:1]),
        (USERS_CONFIG, ["+add=asmi"], GROUPED[:1]),  # a list in the config itself
        (USERS_CONFIG | {"estimators": []}, ["+add=asmi"], []),
        # in the config's own list of defaults, where the override would be typed each time
        (BY_GROUP | {"defaults": [*BY_GROUP["defaults"], {"add": "asmi"}]}, [], GROUPED),
    ],
)
def test_asmi_is_added_to_a_users_lists(elsewhere, tiny, config, overrides, kept):
    config = config | {"save_stats": ["greedy_texts", "sample_texts"]}
    configs = write_users_config(elsewhere, tiny, config)
    values = ["asmi.depth=0.9", "asmi.num_masks=7"]
    composed_run = compose_run("mine_eval", str(configs), [*overrides, *values])
    once, again = (
        {key: list(composed_run[key]) for key in ("estimators", "stat_calculators", "save_stats")}
        for _ in range(2)  # a config is resolved several times
    )
    assert once == again
    resolved = OmegaConf.create(once)
    variants = ["asmi", "sem_asmi", "adapt_asmi"][: 2 if "+add=asmi_only" in overrides else 3]
    names = [entry.name for entry in resolved.estimators]
    assert names == [*kept, *(f"{PREFIX}{variant}" for variant in variants)]
    assert {e.cfg.depth for e in resolved.estimators[len(kept) :]} == {0.9}
    assert resolved.stat_calculators[0] == "auto"
    assert list(resolved.stat_calculators).count("auto") == 1
    masks = calculator(resolved, "MaskedHeadsCalculator")
    assert (masks.cfg.num_masks, masks.stats) == (7, list(MASKED_HEADS))
    assert resolved.save_stats[:2] == ["greedy_texts", "sample_texts"]
    assert len(set(resolved.save_stats)) == len(resolved.save_stats)
    assert set(SAVED) <= set(resolved.save_stats)
    assert list(composed_run.hydra.callbacks) == ["asmi"]


def test_a_list_cannot_be_kept_without_the_runs_config():
    HydraConfig.instance().cfg = None
    with initialize(version_base=None, config_path=None):
        config = compose("asmi_demo", ["+add=asmi"])
    with pytest.raises(InterpolationResolutionError, match="cannot tell which estimators to keep"):
        config.estimators  # noqa: B018


def test_one_override_gives_a_table_with_baselines_and_asmi(elsewhere, tiny):
    """With what report and calibration need, in a run of LM-Polygraph's own script."""
    configs = write_users_config(elsewhere, tiny, BY_GROUP)
    named = ["--config-dir", str(configs), "--config-name", "mine_eval"]
    polygraph_eval_here(*named, "+add=asmi", "asmi.num_masks=6", "asmi.mask_rate=0.2",
                        "asmi.num_samples=3")  # fmt: skip
    run = load_run(elsewhere / "workdir" / "run")
    own = [f"{name} (60%, K=64, S=6, p=0.2)" for name in ("ASMI", "Sem-ASMI", "Adapt-ASMI")]
    assert list(run.scores) == ["Perplexity", "LexicalSimilarity_rougeL", *own]
    assert np.isfinite(run.scores.to_numpy()).all()
    assert set(MASKED_HEADS) <= set(run.stats)
    assert run.manifest["status"] == "completed"
    assert run.settings()[0]["num_masks"] == 6
    assert set(run.methods) == set(own)
