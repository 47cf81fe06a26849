"""Runs over the same answers as one setting; what is left out of it, and what is no run."""

import numpy as np
import pytest

from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.results.manifest import data_of
from lm_polygraph_asmi.results.run_groups import load_run_groups
from tests.report.runs import METHODS, content, exchanged, loaded, manifest, save

SEM = "Sem-ASMI (60%, K=64)"
NO_RUN, DAMAGED = "is not a run", r"asmi_manifest_seed1\.json is damaged"
SHORT = content()["estimations"] | {("sequence", "RAUQ"): [0.5] * 59}


def test_another_k_is_not_read_in_place_of_the_default_one(tmp_path):
    """Whichever run is named first."""
    k256, plain = save(tmp_path / "k256", content(top_k=256)), save(tmp_path / "open")
    for files in ((k256, plain), (plain, k256)):
        (group,) = load_run_groups(files)
        assert (group.variants["Sem-ASMI"], group.settings()["top_k"]) == (SEM, 64)
        np.testing.assert_array_equal(group.u_sem, group.score(SEM))
    (alone,), of_larger = load_run_groups([tmp_path / "k256", k256]), "Sem-ASMI (60%, K=256)"
    # Named twice, read once.
    assert (alone.variants["Sem-ASMI"], len(alone.runs)) == (of_larger, 1)
    np.testing.assert_equal(*(of.mi_of(of_larger) for of in (group, alone)))


def test_one_finite_mask_for_all_methods_and_one_without_any_score_is_left_out_alone(tmp_path):
    saved = content()
    saved["estimations"]["sequence", "RAUQ"][3] = float("nan")
    saved["estimations"]["sequence", "None"] = [None] * 60
    saved["estimations"]["sequence", "NaN"] = [float("nan")] * 60
    saved["gen_metrics"]["sequence", "AlignScore"][8] = float("nan")
    (group,) = loaded(tmp_path / "all", saved)
    assert [len(of) for of in (group, group.ids, group.clusters, group.quality)] == [58] * 4
    np.testing.assert_allclose(group.u_sem, [tokens.mean() for tokens in group.u_tokens])
    empty, rows = group.notes
    assert (empty.endswith(": None, NaN"), rows.startswith("2 of 60 rows")) == (True, True)
    assert "RAUQ" in rows
    assert np.isfinite(group.scores.to_numpy()).all()
    # LM-Polygraph saves a statistic in those batches alone where it was made.
    saved["stats"]["asmi"].pop()
    (group,) = loaded(tmp_path / "fewer", saved)
    assert (group.mi_tokens, group.u_sem is None) == (None, False)  # the estimator's
    assert len(load_run_groups(tmp_path / f"{name}/run" for name in ("all", "fewer"))) == 1


def test_token_statistics_come_from_the_run_whose_masks_made_the_score(tmp_path):
    first = content()
    for own in at_depth(first["stats"], 0.6):
        del own["mi"]
    (group,) = load_run_groups([
        save(tmp_path / "first", first), save(tmp_path / "seed 1", content(mask_seed=1))
    ])  # fmt: skip
    assert (group.variants["Sem-ASMI"], group.settings()["seed"]) == (SEM, 0)
    assert group.mi_tokens is None  # those of seed 1 belong to another score
    assert group.agreement_tokens is not None


def test_a_depth_of_statistics_alone_can_be_read(tmp_path):
    saved = content(depths=(60, 90))
    for kind, name in [key for key in saved["estimations"] if "90%" in key[1]]:
        del saved["estimations"][kind, name], saved[METHODS][name]
    (group,) = load_run_groups([save(tmp_path / "run", saved)], depth=0.9)
    assert (group.depth, group.notes) == (0.9, ())


@pytest.mark.parametrize("depth", [0.333, 0.625])
def test_depths_that_percent_rounds(tmp_path, depth):
    saved = content()
    for row in saved["stats"]["asmi"]:
        row[depth] = row.pop(0.6)
    file = save(tmp_path / "run", exchanged(saved, depth=depth))
    (group,), (other,) = (load_run_groups([file], depth=asked) for asked in (depth, 0.9))
    assert set(group.variants) == {"ASMI", "Sem-ASMI", "Adapt-ASMI"}
    assert (group.mi_tokens is None, group.notes) == (False, ())
    assert "lacks 90.0%" in other.notes[0]


ONE, TWO = ["tiny model, squad"], ["tiny model, squad (a)", "tiny model, squad (b)"]


@pytest.mark.parametrize(
    ("lacking", "settings", "model", "labels"),
    [
        ("", {}, {}, ONE),
        ("greedy_texts", {}, {}, TWO), ("input_texts", {}, {}, TWO),
        ("", {"scope": "response"}, {}, ONE), ("", {"stop": ["x"]}, {}, TWO),
        ("", {}, {"name": "asmi_other"}, [*ONE, "other, squad"]),
        ("", {}, {"name": "local", "path": "some/folder"}, [*ONE, "folder, squad"]),
    ],
)  # fmt: skip
def test_what_makes_two_runs_one_setting(tmp_path, lacking, settings, model, labels):
    """Answers that both saved, one model, and no score of one name with two settings."""
    saved, about = content(), manifest(60)
    saved["stats"].pop(lacking, None)
    about |= {"model": about["model"] | model}
    groups = load_run_groups([
        save(tmp_path / "a", saved), save(tmp_path / "b", exchanged(saved, **settings), about)
    ])  # fmt: skip
    assert [group.label for group in groups] == labels


FILE = "/home/x/my.questions.csv"
# What an earlier run recorded of a config's own `dataset`, beside the config.
OWN = {"config_name": "ours", "dataset": {"name": None, "revision": None}}


@pytest.mark.parametrize(
    ("other", "gold", "labels"),
    [
        ({"config_name": "ours_too"}, "gold 3", ["tiny model, my.questions"]),
        ({"dataset": {"name": "asmi_squad"}}, "gold 3", ["tiny model, my.questions"]),
        ({}, "other", ["tiny model, my.questions (a)", "tiny model, my.questions (b)"]),
    ],
)
def test_data_are_what_was_asked_and_no_name_of_a_config(tmp_path, other, gold, labels):
    first, second = content(), content(mask_seed=1)
    second["stats"]["target_texts"][3] = gold
    about = manifest(60) | OWN | {"config": {"dataset": FILE}}
    groups = load_run_groups([
        save(tmp_path / "a", first, about), save(tmp_path / "b", second, about | other)
    ])  # fmt: skip
    assert [group.label for group in groups] == labels
    assert {group.run.recorded("dataset")["source"] for group in groups} == {FILE}


@pytest.mark.parametrize(
    ("data", "dataset", "name"),
    [
        ({"name": "asmi_squad", "source": FILE}, None, "asmi_squad"),
        ({"source": None}, None, "asmi_demo"),
        ({"source": "some/data-1.1"}, None, "data-1.1"),
        ({"source": ["some/data@1f2e", "part"]}, None, "data part"),
        (None, ["some/data", "part"], "data part"),
        (None, "DATA.PARQUET", "DATA"),
        ({}, None, None),
    ],
)
def test_names_of_data(data, dataset, name):
    """`data` as of the node of that name, or `dataset` as LM-Polygraph reads it itself."""
    found = data_of({"dataset": data, "config": {"dataset": dataset} if dataset else {}})
    assert (found["name"], found["source"]) == (name, (data or {}).get("source", dataset))


@pytest.mark.parametrize(
    ("estimations", "manifest_text", "message"),
    [
        ([1, 2], None, NO_RUN),
        ({("sequence", "a"): ["x"] * 60}, None, NO_RUN),
        (SHORT, None, r"got columns of \[59, 60\] rows"),
        ({}, b"[1]", DAMAGED),
        ({}, b"\xff\xfe", DAMAGED),
    ],
)
def test_damaged_runs_are_refused(tmp_path, estimations, manifest_text, message):
    saved = content()
    save(tmp_path / "run", saved | {"estimations": estimations or saved["estimations"]})
    if manifest_text:
        (tmp_path / "run/asmi_manifest_seed1.json").write_bytes(manifest_text)
    with pytest.raises(ValueError, match=message):
        load_run_groups([tmp_path / "run"])
