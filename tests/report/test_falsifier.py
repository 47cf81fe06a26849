"""Runs of several arms over one cell's answers: comparisons, verdicts, what is kept apart."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis import (
    adds_information,
    arm_comparisons,
    distinct_signal,
    double_dissociation,
)
from lm_polygraph_asmi.report import Gap, load_cells
from lm_polygraph_asmi.report.exhibits import findings
from lm_polygraph_asmi.report.exhibits.claims import head_claims
from lm_polygraph_asmi.report.exhibits.falsifier import (
    comparable,
    dissociation,
    falsifier,
    falsifier_added,
    falsifier_verdicts,
    prr_of_heads,
    verdicts_on,
)
from lm_polygraph_asmi.saved.cells import Unavailable
from tests.report.runs import arm, content, manifest, matched, save

pytestmark = pytest.mark.usefixtures("few_resamples", "no_pictures")
N = 80
SEM = "Sem-ASMI (60%, K=64)"


def save_arms(folder, saved, about, noise):
    """A run of heads and, beside it, one of every arm; returns their folders."""
    save(folder / "heads", saved, about)
    for name, error in noise.items():
        save(folder / name, arm(saved, name, error), matched(about))
    return [folder / "heads", *(folder / name for name in noise)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Heads are special here but for one arm, which reads the same; and a sweep, and a redraw."""
    root = tmp_path_factory.mktemp("arms")
    saved, about = content(N), manifest(N)
    noise = {"pseudo_heads": None, "foreign": None, "mlp": 0.001}
    folders = save_arms(root, saved, about, noise)
    save(root / "half", arm(saved, "mlp", 0.5, dose=0.4), matched(about, times=0.5))
    save(root / "norm", arm(saved, "isotropic", None, dose=None), about)
    save(root / "redraw", content(N, mask_seed=1), about)
    save(root / "mlp again", arm(saved, "mlp", 0.3, seed=1), matched(about))
    return [*folders, *(root / name for name in ("half", "norm", "redraw", "mlp again"))]


@pytest.fixture(scope="module")
def cell(runs):
    (found,) = load_cells(runs)
    return found


def test_arms_are_kept_out_of_a_cells_methods(cell):
    assert len(cell.runs) == 2  # heads and their redraw
    assert [one.arm for one in cell.arms] == [
        "pseudo_heads", "foreign", "mlp", "mlp", "isotropic", "mlp",
    ]  # fmt: skip
    assert not any(config.is_control for config in cell.methods.values())
    assert cell.variants["Sem-ASMI"] == SEM
    mlp = cell.arms[2]
    assert (mlp.dose, mlp.matching, mlp.times) == (0.8, "effect", 1.0)
    assert (cell.arms[3].dose, cell.arms[3].times) == (0.4, 0.5)
    assert (cell.arms[4].dose, cell.arms[4].matching) == (None, None)
    assert cell.counterpart(mlp, "Sem-ASMI") == SEM
    assert cell.counterpart(cell.arms[5], "Sem-ASMI") == "Sem-ASMI (60%, K=64, seed=1)"
    own = mlp.run.scores["Sem-ASMI (60%, K=64, mlp, dose=0.8)"]
    np.testing.assert_array_equal(cell.arm_score(mlp, "Sem-ASMI"), own)
    with pytest.raises(Unavailable, match="has no Other"):
        cell.arm_score(mlp, "Other")


def test_their_order_does_not_matter(runs, cell):
    (other,) = load_cells(runs[::-1])
    assert set(other.scores) == set(cell.scores)
    assert len(other.arms) == len(cell.arms)


def test_baselines_of_an_arms_run_are_the_cells(tmp_path):
    saved = content(20)
    other = arm(saved, "mlp", None)
    other["estimations"]["sequence", "RAUQ"] = saved["estimations"].pop(("sequence", "RAUQ"))
    save(tmp_path / "mlp", other, manifest(20))
    save(tmp_path / "heads", saved)
    (cell,) = load_cells([tmp_path / "mlp", tmp_path / "heads"])
    assert "RAUQ" in cell.scores


def test_a_dose_of_heads_is_an_arm(tmp_path):
    saved, about = content(20), manifest(20)
    save(tmp_path / "heads", saved)
    save(tmp_path / "half", arm(saved, "heads", 0.1, dose=0.5), about)
    (cell,) = load_cells([tmp_path / "heads", tmp_path / "half"])
    (half,) = cell.arms
    assert (half.arm, half.dose) == ("heads", 0.5)
    assert set(cell.variants) == {"ASMI", "Sem-ASMI", "Adapt-ASMI"}


def test_arms_without_heads_are_refused(tmp_path):
    save(tmp_path / "mlp", arm(content(20), "mlp", 0.1), manifest(20))
    with pytest.raises(ValueError, match="an arm of the falsifier: give the run of heads"):
        load_cells([tmp_path / "mlp"])


def test_comparisons_are_those_of_the_statistics(cell):
    (item,) = falsifier([cell])
    table = item.table.set_index(["score", "arm"])
    one = next(one for one in comparable(cell) if one.symbol == "Sem-ASMI")
    assert one.heads == SEM
    names = [
        "pseudo_heads, by effect", "foreign, by effect", "mlp, by effect",
        "mlp, by effect, 0.5 times", "isotropic",
    ]  # fmt: skip
    assert list(one.arms) == names
    scores = {name: cell.arm_score(arm, "Sem-ASMI") for name, arm in one.arms.items()}
    found = arm_comparisons(cell.score(SEM), scores, cell.quality, cell.clusters)
    for name in names:
        row = table.loc[("Sem-ASMI", name)]
        assert row["heads minus arm"] == pytest.approx(found[name].difference)
        assert row["questions to be equal"] == found[name].to_equal
    assert set(table.index.get_level_values(0)) == {"ASMI", "Sem-ASMI"}


def test_an_arm_that_reads_the_same_is_named_first(cell):
    said = {one.symbol: found for one, found in verdicts_on([cell])}
    assert said["Sem-ASMI"].outcome == "reproduced"
    assert said["Sem-ASMI"].arm == "mlp"
    lines = findings([cell])
    assert lines[0].startswith("**Not special to heads: tiny model, squad.** mlp at matched effect")
    small = any(line.startswith("**Too small") for line in lines)
    assert ("by its own criterion, if so few answers may speak." in lines[0]) == small
    assert "Known to rank errors" in lines[2]
    (item,) = falsifier_verdicts([cell])
    row = item.table.set_index("score").loc["Sem-ASMI"]
    assert (row["verdict"], row["by"], row["context"]) == ("reproduced", "mlp", "given")
    assert row["arms"] == "pseudo_heads, foreign, mlp"
    assert row["questions"] == N
    (claims,) = head_claims([cell])
    row = claims.table.set_index("claim").iloc[-1]
    assert row["here"] == "does not"
    assert "reproduced by mlp" in row["where"]
    unranked = [one for one in comparable(cell) if prr_of_heads(one).low <= 0]
    assert row["where"].count("not known to rank errors") == len(unranked)


def test_heads_alone_are_special_and_few_questions_undecided(tmp_path):
    saved = content(N)
    noise = {"pseudo_heads": None, "foreign": None}
    paths = save_arms(tmp_path / "special", saved, manifest(N), noise)
    (cell,) = load_cells(paths)
    (one, found), *_ = verdicts_on([cell])
    assert (one.symbol, found.outcome) == ("Sem-ASMI", "special")
    assert not any("Not special" in line for line in findings([cell]))
    few = save_arms(tmp_path / "few", content(20), manifest(20), {**noise, "mlp": 0.8})
    (item,) = falsifier_verdicts(load_cells(few))
    row = item.table.set_index("score").loc["Sem-ASMI"]
    assert row["verdict"] == "undecided"
    assert row["questions to decide"] > 20


def test_planted_cells_get_the_verdicts_they_were_planted_with(tmp_path):
    """Judged together: heads alone read the errors; noise in the MLP reads them as heads do; all
    read them, each with noise of its own, and the questions are few."""
    alone = dict.fromkeys(("pseudo_heads", "foreign", "isotropic", "mlp", "mlp_noise"))
    planted = {
        "squad": (N, alone, "special"),
        "coqa": (N, alone | {"mlp_noise": 0.001}, "reproduced"),
        "babiqa": (16, dict.fromkeys(alone, 0.8), "undecided"),
    }
    paths = []
    for name, (n, noise, _) in planted.items():
        paths += save_arms(tmp_path / name, content(n), manifest(n, f"asmi_{name}"), noise)
    cells = load_cells(paths)
    (item,) = falsifier_verdicts(cells)
    table = item.table[item.table["score"] == "Sem-ASMI"].set_index("cell")
    for name, (n, _, verdict) in planted.items():
        row = table.loc[f"tiny model, {name}"]
        assert (row["verdict"], row["questions"]) == (verdict, n), name
        assert row["arms"] == ", ".join(alone)
        assert pd.isna(row["not run"])
    assert table.loc["tiny model, coqa", "by"] == "mlp_noise"
    assert table.loc["tiny model, babiqa", "questions to decide"] > 16
    named = [line for line in findings(cells) if "Not special" in line and "Sem-ASMI" in line]
    assert len(named) == 1
    assert "tiny model, coqa.** mlp_noise at matched effect" in named[0]


def test_arms_at_no_matched_effect_have_no_verdict(tmp_path):
    saved, about = content(20), manifest(20)
    save(tmp_path / "heads", saved, about)
    save(tmp_path / "mlp", arm(saved, "mlp", 0.1), about)
    cells = load_cells([tmp_path / "heads", tmp_path / "mlp"])
    (gap,) = falsifier_verdicts(cells)
    assert isinstance(gap, Gap)
    assert "needs doses" in gap.reason
    (item,) = falsifier(cells)
    assert item.table["arm"].tolist() == ["mlp, dose 0.8"] * 2
    (gap,) = falsifier(load_cells([tmp_path / "heads"]))
    assert "needs asmi_falsifier" in gap.reason


def test_what_either_adds_to_the_other(cell):
    few = tuple(cell.arms[i] for i in (0, 2, 5))
    (item,) = falsifier_added([replace(cell, arms=few)])
    table = item.table.set_index(["score", "arm"])
    row = table.loc[("Sem-ASMI", "pseudo_heads, by effect")]
    other = cell.arm_score(cell.arms[0], "Sem-ASMI")
    controls = np.column_stack([cell.msp, cell.entropy, other, cell.lengths])
    added = adds_information(cell.score(SEM), controls, cell.wrong, cell.clusters)
    assert [row["z of heads"], row["p of heads"]] == pytest.approx([added.statistic, added.p_value])
    assert (row["heads add"], row["arm add"]) == ("yes", "no")
    # The paper's column: what MSP, H and the other of the two leave.
    for side, signal, given in (("heads", cell.score(SEM), other), ("arm", other, cell.score(SEM))):
        known = np.column_stack([cell.msp, cell.entropy, given])
        left = distinct_signal(signal, known, cell.wrong, cell.clusters)
        assert row[f"residual AUROC of {side}"] == pytest.approx(left.residual_auroc)
    assert row["ρ"].value == pytest.approx(spearmanr(cell.score(SEM), other).statistic)
    assert row["ρ, corrected"] is None
    # The one that was redrawn, with heads of the same other seed.
    mlp, again = (cell.arm_score(cell.arms[i], "Sem-ASMI") for i in (2, 5))
    heads = cell.score(SEM), cell.score("Sem-ASMI (60%, K=64, seed=1)")
    found = table.loc[("Sem-ASMI", "mlp, by effect")]["ρ, corrected"]
    reliability = spearmanr(*heads).statistic * spearmanr(mlp, again).statistic
    plain = spearmanr(heads[0], mlp).statistic
    assert found.value == pytest.approx(plain / np.sqrt(reliability))


def test_a_double_dissociation_pairs_questions(runs, tmp_path):
    closed = content(N, shift=0.5)
    about = manifest(N, "asmi_squad_closed_book", closed=True)
    paths = save_arms(tmp_path, closed, about, {"mlp": None})
    cells = load_cells([*runs, *paths])
    opened, without = cells
    assert without.closed_book
    (item,) = dissociation(cells)
    row = item.table.set_index(["score", "arm"]).loc[("Sem-ASMI", "mlp, by effect")]
    sides = [
        (side.score(SEM), side.arm_score(mlp, "Sem-ASMI"), side.quality)
        for side, mlp in ((opened, opened.arms[2]), (without, without.arms[0]))
    ]
    found = double_dissociation(*sides, opened.clusters)
    assert row["heads minus arm, open minus closed"] == pytest.approx(found)
    assert row["questions"] == N
    # On recall nothing is named in the first lines, whatever comes out.
    assert not any("closed book" in line for line in findings(cells) if "Not special" in line)
    (gap,) = dissociation([opened])
    assert "without context" in gap.reason


def test_a_file_as_the_calculator_s_dose_is_matched_by_effect(tmp_path):
    """As the configs of heads take it, without the node of the falsifier."""
    saved, about = content(N), manifest(N)
    save(tmp_path / "heads", saved, about)
    config = {"asmi": {"dose": "doses.json"}}
    save(tmp_path / "mlp", arm(saved, "mlp", None), about | {"config": config})
    (cell,) = load_cells([tmp_path / "heads", tmp_path / "mlp"])
    assert [(one.matching, one.times) for one in cell.arms] == [("effect", 1.0)]


def test_captions_count_the_resamples_that_were_drawn(cell):
    for item in (*falsifier([cell]), *falsifier_verdicts([cell])):
        assert "10,000 resamples" in item.caption[-1]
