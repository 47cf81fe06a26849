"""What stands beside a run's results, and what stops it early; whole runs of a tiny model."""

import gc
import json
import os
import pickle
import re
import signal
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from lm_polygraph.estimators import Perplexity
from lm_polygraph.utils.manager import UEManager
from omegaconf import OmegaConf
from transformers import GenerationConfig, LlamaForCausalLM

from lm_polygraph_asmi.analysis.clusters import cluster_key
from lm_polygraph_asmi.files import locked
from lm_polygraph_asmi.host.generation import read_shipped
from lm_polygraph_asmi.results import manifest as manifests
from lm_polygraph_asmi.results.manifest import model_of, read_manifest
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.runs import callback
from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from tests.forks import exit_code
from tests.polygraph import failing_at, polygraph_eval_here

PROMPTS = ["Who built the ferry?", "Where do the kites start?", "True or False?", "Is it blue?"]


@pytest.fixture
def run(tmp_path, tiny, monkeypatch):
    """Runs the single-pass methods over four questions; returns the manager file."""
    monkeypatch.chdir(tmp_path)
    rows = {"id": list("abcd"), "input": PROMPTS, "output": ["w", "b", "c", "d"]}
    Dataset.from_dict(rows).save_to_disk(tmp_path / "questions")

    def start(*overrides: str, folder: str = "run") -> Path:
        polygraph_eval_here(
            "--config-name", "asmi_offline", "benchmark=asmi_babiqa", "data.source=questions",
            "model=asmi_local", f"model.path={tiny}", "generation_params.stop_strings=never said",
            "asmi.num_masks=5", "asmi.mask_rate=0.2", f"hydra.run.dir={folder}", *overrides,
        )  # fmt: skip
        return tmp_path / folder / "ue_manager_seed1"

    return start


def test_a_run_that_failed_resumes_and_its_manifest_says_what_the_manager_file_does_not(
    run, tiny, tmp_path, monkeypatch, capsys
):
    settings = (
        "asmi.num_masks=10", "+hf_token=hf_SECRET",
        "++model.load_model_args.token=hf_SECRET", "+own=[{token: hf_SECRET}]",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(Perplexity, "__call__", failing_at("True"))
        with pytest.raises(RuntimeError, match="no more"):
            run(*settings)
    assert "stopped in the phase 'estimators': 2 of 4 rows in 0:" in capsys.readouterr().err
    manager = tmp_path / "run" / "ue_manager_seed1"
    failed = read_manifest(manager)
    assert (failed["status"], failed["error"]) == ("failed", "RuntimeError: no more")
    with pytest.raises(ValueError, match=r"columns of \[2, .*\(RuntimeError: no more\)"):
        load_run(manager)
    finished, manifest = load_run(run(*settings)), read_manifest(manager)
    assert "SECRET" not in manifests.manifest_path(manager).read_text()
    assert manifest == manifest | {
        "status": "completed",
        "config_name": "asmi_offline",
        "model": manifest["model"] | {"name": "asmi_local", **model_of({"path": str(tiny)})},
        "dataset": manifest["dataset"] | {"name": "asmi_babiqa", "source": "questions"},
        "seeds": {"run": 1, "masks": 0, "samples": 0, "subsample": 1},
        "rows": {"ids": list("abcd"), "clusters": list(map(cluster_key, PROMPTS))},
        "packages": manifest["packages"] | {n: version(n) for n in ("torch", "lm-polygraph")},
    }
    assert manifest["config"]["generation_params"]["temperature"] == 0.5
    (used,) = finished.settings()
    assert used == used | {
        "layer": 2, "mask_rate": 0.2, "num_masks": 10, "top_k": 64, "depth": 0.6, "scope": "all"
    }  # fmt: skip
    assert {own.stop for own in finished.methods.values()} == {("never said",)}
    assert finished.stats["asmi_reused_depths"] == [1, 1, 1, 0]
    assert manifest["seconds_wall"] > manifest["seconds"]["asmi"]["total"]
    assert manifest["peak_memory_bytes"]["main"] > 1e8


def test_a_stopped_run_goes_on_where_it_was(run, tmp_path):
    """Stopped at any moment, it loses nothing that was scored."""
    own = "estimators=asmi", "output_attentions=false", "asmi.num_samples=2"
    manager = tmp_path / "run" / "ue_manager_seed1"

    def stop(sent):
        scored, rows_done = MaskedHeadsCalculator.__call__, iter(range(len(PROMPTS)))

        def call(self, *arguments):
            if next(rows_done) == 2:
                # A shell's background jobs ignore Ctrl-C.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                os.kill(os.getpid(), sent)
            return scored(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MaskedHeadsCalculator, "__call__", call)
            return exit_code(run, *own, "cache_path=.")  # a fork, which has the patch

    assert stop(signal.SIGKILL) == -signal.SIGKILL
    assert read_manifest(manager)["status"] == "running"
    assert [*map(Path.exists, (manager, manager.parent / "rows"))] == [False, True]
    stop(signal.SIGINT)  # the next run, in which LM-Polygraph saves what it has
    with pytest.raises(ValueError, match=r"columns of \[2, 3, 4\] rows"):
        load_run(manager)
    resumed = load_run(run(*own, "cache_path=."))
    whole = load_run(run(*own, "cache_path=elsewhere", folder="whole"))
    assert not (manager.parent / "rows").exists()
    assert resumed.stats["asmi_reused_depths"] == [1, 1, 0, 0]
    assert [run.manifest["asmi_reused"] for run in (resumed, whole)] == [2, 0]
    np.testing.assert_array_equal(resumed.scores, whole.scores)
    assert resumed.stats["sample_texts"] == whole.stats["sample_texts"]


def test_several_runs_in_one_folder(run, capsys):
    """The second that works reuses what the first one scored; others leave what is there."""
    run = partial(run, *QUICK)
    manager = run("subsample_eval_dataset=0.5", "seed=[3,1]")
    runs = [load_run(manager.with_name(f"ue_manager_seed{seed}")) for seed in (3, 1)]
    for first in runs:  # names of rows survive LM-Polygraph's own subsampling
        kept = [PROMPTS["abcd".index(i)] for i in first.manifest["rows"]["ids"]]
        assert kept == first.stats["input_texts"]
    assert [first.manifest["seeds"]["subsample"] for first in runs] == [3, 1]
    scored = {prompt for first in runs for prompt in first.stats["input_texts"]}
    assert len(scored) == 3
    before = manifests.manifest_path(manager).read_text()
    with pytest.raises(ValueError, match="float99"):
        run("data.first=3", "model.load_model_args.dtype=float99")
    assert not Path(f"{manager}.lock").exists()
    with locked(manager), pytest.raises(SystemExit, match="ue_manager_seed1 is being written by"):
        run("data.first=3")
    with pytest.raises(SystemExit, match="stopped before loading the model"):
        run("model.path=nowhere", "data.first=1")
    assert "two rows or more" in capsys.readouterr().out
    assert manifests.manifest_path(manager).read_text() == before
    second = load_run(run())  # as after `kill -9`, which leaves the lock's file
    asked = second.stats["input_texts"]
    assert second.stats["asmi_reused_depths"] == [prompt in scored for prompt in asked]
    assert second.manifest == second.manifest | {
        "asmi_reused": 3,
        "rows": second.manifest["rows"] | {"ids": list("abcd")},
    }
    assert f"polygraph_asmi results {manager.parent}" in capsys.readouterr().err
    np.testing.assert_array_equal(first.scores, second.scores.iloc[[*map(asked.index, kept)]])


QUICK = "estimators=asmi_only", "output_attentions=false"


@pytest.fixture
def nothing_scored(monkeypatch):
    """Runs load a model, build the manager and save it, and no more."""
    monkeypatch.setattr(UEManager, "__call__", Mock())


OWN_SCRIPT = """
from lm_polygraph_asmi.host import loading
def load_model(model_path, **options): return loading.load_model({folder!r}, **options)
def load_tokenizer(model_path, **options): return loading.load_tokenizer({folder!r}, **options)
"""


@pytest.mark.usefixtures("nothing_scored")
@pytest.mark.parametrize(("without", "name"), [([], "mine"), (["~data"], "asmi_babiqa")])
def test_a_file_that_the_host_reads_is_recorded(run, tiny, tmp_path, without, name):
    """Under a config's group `benchmark`, unless that names the rows of its node `data`.

    A user's own script loads the model, of which nothing is here.
    """
    (tmp_path / "mine.csv").write_text("input,output\nWho built it?,Edda\nWhere?,Brask\n")
    (tmp_path / "own.py").write_text(OWN_SCRIPT.format(folder=str(tiny)))
    own = "model.path=a/name", f"model.path_to_load_script={tmp_path}/own.py"
    manager = run("dataset=mine.csv", "load_from_disk=false", *QUICK, *own, *without)
    assert json.loads(manifests.manifest_path(manager).read_text())["dataset"] == {
        "name": name, "source": "mine.csv", "split": "test", "revision": None
    }  # fmt: skip


def test_jobs_of_a_sweep_fail_alone_and_its_end_names_them(run, tmp_path, monkeypatch, capsys):
    """Four: a finding, a start that fails, a run that fails, and one that does not."""
    managers = [tmp_path / "sweep" / str(job) / "ue_manager_seed1" for job in range(4)]
    monkeypatch.setattr(UEManager, "__call__", Mock(side_effect=[RuntimeError("no more"), None]))
    managers[1].parent.mkdir(parents=True)
    with locked(managers[1]), pytest.raises(callback.JobFailed) as failed:
        run(*QUICK, "data.first=1,2,3,4", "hydra.sweep.dir=sweep", "--multirun")
    stopped = "polygraph_eval stopped before loading the model: "
    assert re.fullmatch(
        "3 of the sweep's jobs failed:\n"
        rf"job 0 \(.* data.first=1\): {stopped}expected two rows or more, got 1.*\n"
        rf"job 1 \(.* data.first=2\): {stopped}the callback RunRecord .*{managers[1]} is being .*\n"
        r"job 2 \(.* data.first=3\): RuntimeError: no more",
        str(failed.value),
    )
    assert [manager.is_file() for manager in managers] == [False, False, True, True]
    told = [read_manifest(manager) for manager in managers[2:]]
    assert [(of["status"], of.get("error")) for of in told] == [
        ("failed", "RuntimeError: no more"), ("completed", None)
    ]  # fmt: skip
    assert not [*tmp_path.glob("sweep/*/*.lock"), *tmp_path.glob("sweep/*/rows")]
    assert "in __call__\n" in capsys.readouterr().out  # the traceback, when it happens
    pickled = pickle.dumps(failed.value)  # as a launcher's processes send it
    callback.JobFailed.reasons.clear()
    assert str(pickle.loads(pickled)).startswith("1 of the sweep's jobs failed:\njob 0 (")


@pytest.mark.usefixtures("nothing_scored")
def test_whatever_ends_a_run_undoes_what_lasts_until_its_end(run, tmp_path, monkeypatch):
    manager = tmp_path / "run" / "ue_manager_seed1"
    full, lasting = Mock(side_effect=OSError("cannot write")), Mock(wraps=callback.mended)
    monkeypatch.setattr(callback, "mended", lasting)

    def damaged(_, file):
        Path(file).write_bytes(b"PK")

    def fail(_, file):  # what ended the run is told, not what it left
        damaged(_, file)
        raise RuntimeError("no more")

    for name, ended, error, shown, said in (
        ("__call__", lambda *_: signal.raise_signal(signal.SIGTERM), SystemExit, "143", "Interr"),
        ("__call__", full, SystemExit, "no room .*cannot write", "cannot write"),
        ("save", damaged, ValueError, "BadZip", "BadZip"),
        ("save", fail, RuntimeError, "no more", "no more"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(UEManager, name, ended)
            patch.setattr(callback, "FULL_DISK", 2**60 if ended is full else 0)
            with pytest.raises(error, match=shown):
                run(*QUICK)
        manifest = read_manifest(manager)
        assert (manifest["status"], said in manifest["error"]) == ("failed", True)
        assert not [*tmp_path.glob("run/*.lock"), *tmp_path.glob("run/rows")]
    assert read_manifest(run(*QUICK))["status"] == "completed"
    # The globals of LM-Polygraph's script are as they were.
    assert ["TokenF1" in begun.args[0] for begun in lasting.call_args_list] == [False] * 5


def test_a_folder_that_changed_is_another_model_and_a_manifest_is_plain_json(tmp_path):
    (tmp_path / "config.json").write_text("one")
    before = model_of({"path": tmp_path})
    (tmp_path / "config.json").write_text("two")  # of the same size
    assert model_of({"path": tmp_path}) != before
    with pytest.raises(ValueError, match="'seconds'"):
        manifests.write_manifest({"seconds": float("nan")}, tmp_path / "ue_manager_seed1")
    with pytest.raises(FileNotFoundError, match="RunRecord"):
        read_manifest(tmp_path / "ue_manager_seed1")


@pytest.mark.parametrize(
    ("state", "metrics", "status"),
    [
        ("Initialized", {"PRR": 0.5}, "completed"),  # another seed failed
        ("Initialized", {}, "failed"),  # interrupted
        ("failed", {"PRR": 0.5}, "failed"),
    ],
)
def test_a_seed_has_failed_if_it_has_no_results(tmp_path, state, metrics, status):
    torch.save({"state": state, "stats": {}, "metrics": metrics}, tmp_path / "ue_manager_seed7")
    ended = {"status": "failed", "error": "of a seed", "model": {}, "config": {"model": {}}}
    callback._add_results(ended, tmp_path / "ue_manager_seed7")
    assert (ended["status"], "error" in ended) == (status, status == "failed")


def test_a_models_revision_and_settings_are_those_of_its_cache(monkeypatch):
    cached = Mock(return_value="hub/snapshots/abc/config.json")
    settings = Mock(return_value=GenerationConfig())
    monkeypatch.setattr(manifests, "try_to_load_from_cache", cached)
    monkeypatch.setattr(GenerationConfig, "from_pretrained", settings)
    own = {"revision": "v2", "cache_dir": "mine"}
    for arguments, place in ((None, (None, "main")), (own, ("mine", "v2"))):
        node = {"path": "owner/name", "load_model_args": arguments}
        assert model_of(node)["revision"] == "abc"
        read_shipped(node)
        assert (cached.call_args.args[2:], settings.call_args.kwargs) == (place, arguments or {})


@pytest.mark.slow
def test_a_failed_job_does_not_keep_its_model(run, monkeypatch):
    """Hydra holds on to what it raised until the sweep ends."""
    held = []

    def models():
        return [o for o in gc.get_objects() if isinstance(o, LlamaForCausalLM)]

    def hold(_, job_return, **__):
        held.extend([job_return, models()])

    monkeypatch.setattr(Perplexity, "__call__", failing_at(""))
    monkeypatch.setattr(callback.RunRecord, "on_job_end", hold)
    gc.unfreeze()  # else models of other tests are not counted
    gc.collect()
    before = models()
    with pytest.raises(callback.JobFailed, match="no more"):
        run("hydra.sweep.dir=sweep", "--multirun")
    assert len(held[1]) == len(before)


def test_memory_is_measured_where_the_system_allows_it(monkeypatch):
    """A run begins before PyTorch has touched the GPU, where a reset would raise an error."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", Mock(side_effect=RuntimeError))
    callback.reset_peak_memory()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setitem(sys.modules, "resource", None)  # as on Windows
    assert callback.peak_memory() == {}


def test_a_main_that_is_no_function_stops_the_run():
    with pytest.raises(SystemExit, match="expected a function"):
        callback.RunRecord().on_job_start(OmegaConf.create(), task_function=partial(print))
