"""A grid of settings on the joblib launcher, every setting in shards, joined again."""

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.results.manifest import read_manifest
from lm_polygraph_asmi.results.runs import load_run
from tests import tiny_lm
from tests.polygraph import polygraph_eval_here
from tests.runs.test_squad import QUESTION, write

MODELS = {"asmi_llama2_7b": "llama", "asmi_mistral_7b": "mistral-window"}


@pytest.mark.slow
def test_a_grid_in_shards_gives_what_unsplit_runs_give(tmp_path, monkeypatch):
    """Two models on two benchmarks in two shards, a job each, two jobs at a time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, family in MODELS.items():
        tiny_lm.save(tmp_path / name, family, max_position_embeddings=1024)
    questions = [
        QUESTION._replace(id=str(i), question=f"Whose mill is number {i}?", answer=answer)
        for i, answer in enumerate(["red", "blue kites", "True", "the passage", "Brask"])
    ]
    overrides = [
        f"data.source={write(tmp_path / 'questions.json', questions)}",
        "estimators=asmi_no_side_models", "max_new_tokens=4", "asmi.num_samples=2",
        "generation_metrics=[{name: RougeMetric, args: [rougeL]}]", f"cache_path={tmp_path}",
        "model.path=${hydra:runtime.choices.model}", "model.load_model_args.dtype=float32",
        "~generation_params.stop_strings",
    ]  # fmt: skip
    polygraph_eval_here(
        "--config-name", "asmi_grid", "--multirun", *overrides,
        f"model={','.join(MODELS)}", "benchmark=asmi_squad,asmi_squad_closed_book",
        "data.num_shards=2", "data.shard=0,1",
        "hydra.sweep.dir=grid", "hydra.launcher.n_jobs=2",
    )  # fmt: skip
    assert len(list(Path("grid").rglob("ue_manager_seed1"))) == 8
    merged = CliRunner().invoke(main, ["merge", "grid", "--out", "merged"])
    assert merged.exit_code == 0, merged.output
    files = sorted(Path("merged").rglob("ue_manager_seed1"))
    assert len(files) == 4

    for model in MODELS:
        polygraph_eval_here(
            "--config-name", "asmi_benchmark", *overrides, f"model={model}", "benchmark=asmi_squad",
            "asmi.result_cache=null", f"hydra.run.dir={model}-whole",
        )  # fmt: skip
        whole = load_run(f"{model}-whole")
        joined = load_run(next(f for f in files if f.parts[1:3] == (model, "asmi_squad")))
        assert joined.stats["input_texts"] == whole.stats["input_texts"]
        assert joined.stats["sample_texts"] == whole.stats["sample_texts"]
        assert list(joined.scores) == list(whole.scores)
        np.testing.assert_allclose(joined.scores, whole.scores, rtol=1e-4, atol=1e-6)
        manifest = read_manifest(joined.path)
        assert manifest["rows"] == read_manifest(whole.path)["rows"]
        assert len(manifest["merged_from"]) == 2
