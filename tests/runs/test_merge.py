"""Joined shards against LM-Polygraph's own manager on all rows; every run here is made up."""

import runpy
import sys
from collections import defaultdict
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from lm_polygraph.utils.manager import UEManager
from omegaconf import OmegaConf

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.results.manifest import manifest_path, read_manifest, write_manifest
from lm_polygraph_asmi.results.runs import load_run
from lm_polygraph_asmi.runs.merge import merge_runs, ue_metrics
from lm_polygraph_asmi.runs.rows import shard_of
from tests.polygraph import few_random_orders
from tests.report import runs as planted

ROWS = 23
PARTS = ("gen_metrics", "estimations", "stats")


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory):
    """LM-Polygraph's manager at the end of a run: finite, NaN and infinite scores and qualities."""
    saved, random = planted.content(ROWS), np.random.default_rng(5)
    scores = {
        of: values for of, values in saved["estimations"].items() if of[1] in planted.BASELINES
    }
    scores["sequence", "MeanTokenEntropy"][4] = scores["sequence", "MeanTokenEntropy"][20] = np.nan
    scores["sequence", "RAUQ"] = [np.inf, *random.integers(3, size=ROWS - 2), -np.inf]  # with ties
    scores["claim", "ClaimScore"] = random.normal(size=2 * ROWS).tolist()
    saved["gen_metrics"] |= {
        ("sequence", "Rouge_rougeL"): [*random.random(ROWS - 1), np.nan],
        ("sequence", "Accuracy"): random.integers(2, size=ROWS).tolist(),
    }
    saved = {part: defaultdict(list, (saved | {"estimations": scores})[part]) for part in PARTS}
    torch.save(saved | {"metrics": {}}, file := tmp_path_factory.mktemp("all") / "manager")
    manager = UEManager.load(str(file))
    manager.ue_metrics = ue_metrics({})
    with pytest.MonkeyPatch.context() as patch:
        few_random_orders(patch)
        manager.eval_ue()
        yield manager


def part_of(manager, part, rows):
    """The values of these rows; claims have two each."""
    found = defaultdict(list)
    for key, values in getattr(manager, part).items():
        each = len(values) // ROWS
        found[key] += values[rows[0] * each : (rows[-1] + 1) * each]
    return found


def split(unsplit, folder, shards=4, seed=1, dataset="a_dataset"):
    """Write a run as so many jobs, `folder/shard0` and so on; their manager files."""
    files = [folder / f"shard{number}" / f"ue_manager_seed{seed}" for number in range(shards)]
    for number, file in enumerate(files):
        rows = shard_of(list(range(ROWS)), number, shards)
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {"state": unsplit.state, "metrics": {("sequence", "of this shard"): 0.0}}
        torch.save(content | {part: part_of(unsplit, part, rows) for part in PARTS}, file)
        data = {"source": f"hub/{dataset}", "shard": number, "num_shards": shards}
        manifest = {
            "format": 1, "status": "completed", "config_name": "asmi_grid",
            "model": {"name": "a_model", "path": "hub/model", "revision": "c" * 40},
            "dataset": {"name": dataset, **data}, "seeds": {"run": seed},
            "rows": {name: [f"{name} {i}" for i in rows] for name in ("ids", "clusters")},
            "packages": {"torch": "2.8.0", "numpy": "2.0.0"}, "device": "cpu",
            "seconds_wall": 10.0 + number, "asmi_reused": number,
            "peak_memory_bytes": {"main": 100 - number, "cuda:0": number},
            "config": {
                "data": data, "save_path": f"/machine{number}", "seed": [seed],
                "model": {"path": "hub/model", "load_model_args": {"device_map": number}},
                "stat_calculators": [
                    {"cfg": dict.fromkeys(("result_cache", "memory_budget", "compile"), number)}
                ],
            },
        }  # fmt: skip
        write_manifest(manifest, file)
    return files


@pytest.fixture
def no_metrics(monkeypatch):
    """Of tests that ask for other things than the metrics, which take most of a merge."""
    monkeypatch.setattr("lm_polygraph_asmi.runs.merge.ue_metrics", lambda _: [])


def edit(manager, *names, to):
    """Change an entry of a manifest."""
    manifest = read_manifest(manager)
    reduce(dict.__getitem__, names[:-1], manifest)[names[-1]] = to
    write_manifest(manifest, manager)


def errors_of(paths, out):
    """Of shards that are not joined, in one text."""
    merged, errors = merge_runs(paths, out)
    assert (merged, out.exists()) == ([], False)
    return "\n".join(errors)


def test_a_joined_file_is_that_of_an_unsplit_run(unsplit, tmp_path):
    files = split(unsplit, tmp_path, 5)
    edit(files[2], "device", to="a GPU")
    edit(files[2], "packages", "torch", to="2.9.0")
    late = files[0].parent.rename(tmp_path / "shard9")  # run again, in a later folder
    file = tmp_path / "out/ue_manager_seed1"
    assert merge_runs([late, *files[:0:-1], *files[1:2]], tmp_path / "out") == (
        [("a_model/a_dataset, seed 1", 5, ROWS, file, [])], []
    )  # fmt: skip
    unsplit.save(tmp_path / "unsplit")
    expected, joined = (torch.load(f, weights_only=False) for f in (tmp_path / "unsplit", file))
    assert repr(joined) == repr(expected)  # which tells types, order and every digit, NaN or not
    assert len(joined["metrics"]) == 4 * 3 * (4 + 2)  # two of the four metrics normalised too
    assert set(file.parent.iterdir()) == {file, manifest_path(file)}
    manifest, saved = read_manifest(file), unsplit.stats
    data = {"source": "hub/a_dataset", "shard": 0, "num_shards": 1}
    assert manifest == manifest | {
        "status": "completed",
        "merged_from": [str(tmp_path / f"shard{i}") for i in (9, 1, 2, 3, 4)],
        "dataset": {"name": "a_dataset", **data},
        "config": manifest["config"] | {"data": data},
        "rows": {name: [f"{name} {i}" for i in range(ROWS)] for name in ("ids", "clusters")},
        "seconds": manifest["seconds"]
        | {
            phase: {"median": np.median(saved[name]), "total": np.sum(saved[name])}
            for phase, name in (("greedy", "seconds_greedy"), ("asmi", "asmi_seconds"))
        },
        "seconds_wall": 60.0,
        "peak_memory_bytes": {"main": 100, "cuda:0": 4},
        "asmi_reused": 10,
        "device": "cpu, a GPU",
        "packages": {"torch": "2.8.0, 2.9.0", "numpy": "2.0.0"},
    }


def test_metrics_are_those_of_polygraph_eval():
    script = runpy.run_path(str(Path(sys.executable).with_name("polygraph_eval")))
    for config in ({}, {"use_claim_ue": True}):
        ours, theirs = ue_metrics(config), script["get_ue_metrics"](OmegaConf.create(config))
        assert [(type(m), vars(m)) for m in ours] == [(type(m), vars(m)) for m in theirs]


@pytest.mark.usefixtures("no_metrics")
def test_shards_that_are_missing_failed_killed_or_finished_twice(unsplit, tmp_path):
    first, out = split(unsplit, tmp_path / "first"), tmp_path / "out"
    edit(first[1], "status", to="failed")
    edit(first[1], "error", to="OutOfMemoryError: too large")
    first[3].unlink()
    edit(first[3], "status", to="running")
    text = errors_of([first[0], first[1], first[3].parent], out)
    for part in (
        f"failed in {first[1].parent} (OutOfMemoryError: too large): run it",
        "expected one finished job of data.num_shards=4 data.shard=2, got none",
        f"data.shard=3, got running in {first[3].parent}",
    ):
        assert part in text
    again = split(unsplit, tmp_path / "again")
    text = errors_of([tmp_path / "first", *again], out)
    assert f"data.shard=0, got completed in {again[0].parent} (no error) and completed in" in text
    (merged,), errors = merge_runs([tmp_path / "first", again[1], again[3]], out)
    assert (merged.rows, errors) == (ROWS, [])


def of_content(change):
    """Changes what LM-Polygraph saved."""

    def edited(manager):
        change(content := torch.load(manager, weights_only=False))
        torch.save(content, manager)

    return edited


def first_three(file):
    """Of six rows, as of another split."""
    of_content(lambda content: content.update({
        part: {key: values[: len(values) // 2] for key, values in content[part].items()}
        for part in PARTS
    }))(file)  # fmt: skip
    edit(file, "rows", to={name: of[:3] for name, of in read_manifest(file)["rows"].items()})


def cut_off(file):
    file.write_bytes(file.read_bytes()[:-900])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: manifest_path(file).write_text("{"), "asmi_manifest_seed1.json is damaged: "),
        (
            lambda file: manifest_path(file).write_text('{"format": 2}'),
            "asmi_manifest_seed1.json. The rows of {2} are unknown: ",
        ),
        (cut_off, "{2} is not a run saved"),
        (
            first_three,
            "shards of [5, 6, 3, 6] rows are not from the same data: run all shards again",
        ),
        (of_content(lambda c: c["stats"]["input_texts"].pop()), "{2} is incomplete: "),
        (
            of_content(lambda c: c["gen_metrics"].pop(("sequence", "Accuracy"))),
            "different quality metrics: ",
        ),
        (
            of_content(lambda c: c["estimations"].pop(("sequence", "RAUQ"))),
            "different estimators: ",
        ),
        (
            of_content(lambda c: c["stats"]["asmi"][0][0.6]["settings"].update(layer=9)),
            "different ASMI settings: ",
        ),
        (lambda file: edit(file, "model", "revision", to="d" * 40), "different model revisions: "),
        (
            lambda file: edit(file, "rows", "ids", to=[f"ids {i}" for i in range(5, 11)]),
            "rows, with row 'ids 5' in 2 of them",
        ),
        (
            lambda file: edit(file, "dataset", "revision", to="sha256:0"),
            "different rows of the source: None in ",
        ),
    ],
)
def test_shards_that_do_not_fit(unsplit, tmp_path, change, message):
    files = split(unsplit, tmp_path)
    change(files[2])
    text = errors_of([tmp_path], tmp_path / "out")
    assert message.format(*files) in text
    for place in (files[0].parent, files[2].parent) if message.startswith("different") else ():
        assert f"in {place}" in text


@pytest.mark.usefixtures("no_metrics")
@pytest.mark.parametrize("texts", [True, False])
def test_rows_that_no_manifest_names(unsplit, tmp_path, texts):
    """Of a user's own data set, of which each job asks all, whatever the node `data` says."""

    def own(manager):
        edit(manager, "rows", to={"ids": [], "clusters": []})
        of_content(lambda c: texts or c["stats"].pop("input_texts"))(manager)
        return manager

    (whole,) = split(unsplit, tmp_path / "whole", 1)
    of_content(lambda c: c["stats"]["input_texts"].__setitem__(slice(2), ["question 0"] * 2))(whole)
    (merged,), errors = merge_runs([own(whole)], tmp_path / "merged")
    assert (merged.shards, merged.rows, errors) == (1, ROWS, [])
    assert read_manifest(merged.file)["rows"] == {"ids": [], "clusters": []}
    jobs = [own(*split(unsplit, tmp_path / f"job{i}", 1)) for i in range(2)]
    for number, manager in enumerate(jobs):
        for node in (("dataset",), ("config", "data")):
            edit(manager, *node, "num_shards", to=2)
            edit(manager, *node, "shard", to=number)
    row = repr(unsplit.stats["input_texts"][0]) if texts else "0"
    assert f"[{ROWS}, {ROWS}] rows, with row {row} in 2 of them" in errors_of(
        jobs, tmp_path / "out"
    )


@pytest.mark.usefixtures("no_metrics")
def test_statistics_with_missing_entries_are_left_out(unsplit, tmp_path):
    files = split(unsplit, tmp_path)
    of_content(lambda content: content["stats"].pop("asmi_seconds"))(files[1])
    of_content(lambda content: content["stats"]["greedy_tokens"].pop())(files[2])
    (merged,), errors = merge_runs([tmp_path], tmp_path / "out")
    lost = ["greedy_tokens", "asmi_seconds"]
    assert (merged.warnings, errors) == (
        [f"statistic {name} left out, since some rows lack it" for name in lost], []
    )  # fmt: skip
    assert set(load_run(merged.file).stats) == set(unsplit.stats) - {*lost}


@pytest.mark.usefixtures("no_metrics")
def test_nothing_is_written_over(unsplit, tmp_path):
    files, out = split(unsplit, tmp_path, 1), tmp_path / "out"
    assert len(merge_runs(files, out)[0]) == 1
    before = [(path, path.read_bytes()) for path in sorted(out.iterdir())]
    (text,) = merge_runs([tmp_path], out)[1]  # with the joined file among what is searched
    assert f"{out}/ue_manager_seed1 exists" in text
    assert [(path, path.read_bytes()) for path in sorted(out.iterdir())] == before
    assert "nothing to merge" in errors_of([out], tmp_path / "other")
    (out / "ue_manager_seed1").unlink()  # a manifest alone is what an interrupted merge leaves
    assert merge_runs(files, out)[1] == []


def run(*arguments):
    result = CliRunner().invoke(main, ["merge", *map(str, arguments)], env={"COLUMNS": "300"})
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.usefixtures("no_metrics")
def test_command(unsplit, tmp_path):
    """Two settings, of which one is incomplete; names of a sweep over data.source."""
    runs, out = tmp_path / "runs", tmp_path / "out"
    for name, seed in (("complete", 1), ("complete", 2), ("incomplete", 1)):
        *_, last = split(unsplit, runs / name, 2, seed=seed, dataset=name)
    for file in (last, manifest_path(last)):
        file.unlink()
    for file in runs.rglob("ue_manager*"):
        edit(file, "dataset", "source", to=[f"hub/{file.parts[-3]}", "part"])
        edit(file, "dataset", "name", to=None)
    code, text = run(runs, "--out", out)
    assert f"a_model/complete part, seed 1: {ROWS} rows of 2 shards in {out}/a_model/comp" in text
    assert "Error: a_model/incomplete part, seed 1: expected one finished job of " in text
    assert (code, (out / "a_model/incomplete part").exists()) == (1, False)
    assert len(load_run(out / "a_model/complete part/ue_manager_seed2").scores) == ROWS
    assert run(runs / "complete", "--out", tmp_path / "one")[0] == 0
    assert len(list((tmp_path / "one").glob("ue_manager_seed[12]"))) == 2  # of one setting
    (tmp_path / "empty").mkdir()
    code, text = run(tmp_path / "empty", "--out", tmp_path / "none")
    assert (code, "has no run" in text) == (1, True)
