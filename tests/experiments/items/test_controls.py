"""Runs of several conditions over one setting's answers: comparisons, verdicts, what is kept
apart."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis import adds_information, distinct_signal
from lm_polygraph_asmi.experiments.analysis import condition_comparisons, double_dissociation
from lm_polygraph_asmi.experiments.conditions import conditions
from lm_polygraph_asmi.experiments.items.claims import head_claims
from lm_polygraph_asmi.experiments.items.controls import (
    comparable,
    control_verdicts,
    controls,
    controls_added,
    dissociation,
    prr_of_heads,
    verdicts_on,
)
from lm_polygraph_asmi.report import MissingItem, load_run_groups
from lm_polygraph_asmi.report.items import findings
from lm_polygraph_asmi.results.run_groups import Unavailable
from tests.report.runs import condition, content, manifest, matched, save, simple_signals

pytestmark = pytest.mark.usefixtures("few_resamples", "no_pictures")
N = 80
SEM = "Sem-ASMI (60%, K=64)"


@pytest.fixture(autouse=True, scope="module")
def simply():
    with simple_signals():
        yield


def save_conditions(folder, saved, about, noise):
    """A run of heads and, beside it, one of every condition; returns their folders."""
    save(folder / "heads", saved, about)
    for name, error in noise.items():
        save(folder / name, condition(saved, name, error), matched(about))
    return [folder / "heads", *(folder / name for name in noise)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Heads are special here but for one condition, which reads the same; and a sweep, and a
    seed."""
    root = tmp_path_factory.mktemp("conditions")
    saved, about = content(N), manifest(N)
    noise = {"pseudo_heads": None, "foreign": None, "mlp": 0.001}
    folders = save_conditions(root, saved, about, noise)
    save(
        root / "half",
        condition(saved, "mlp", 0.5, perturbation_scale=0.4),
        matched(about, times=0.5),
    )
    save(root / "norm", condition(saved, "isotropic", None, perturbation_scale=None), about)
    save(root / "seed 1", content(N, mask_seed=1), about)
    save(root / "mlp again", condition(saved, "mlp", 0.3, seed=1), matched(about))
    return [*folders, *(root / name for name in ("half", "norm", "seed 1", "mlp again"))]


@pytest.fixture(scope="module")
def group(runs):
    (found,) = load_run_groups(runs)
    return found


def test_conditions_are_kept_out_of_a_cells_methods(group):
    assert len(group.runs) == 2  # heads, with two seeds
    assert [one.condition for one in conditions(group)] == [
        "pseudo_heads", "foreign", "mlp", "mlp", "isotropic", "mlp",
    ]  # fmt: skip
    assert not any(config.is_control for config in group.methods.values())
    assert group.variants["Sem-ASMI"] == SEM
    mlp = conditions(group)[2]
    assert (mlp.perturbation_scale, mlp.matching, mlp.times) == (0.8, "effect", 1.0)
    assert (conditions(group)[3].perturbation_scale, conditions(group)[3].times) == (0.4, 0.5)
    assert (conditions(group)[4].perturbation_scale, conditions(group)[4].matching) == (None, None)
    assert mlp.counterpart(group, "Sem-ASMI") == SEM
    assert conditions(group)[5].counterpart(group, "Sem-ASMI") == "Sem-ASMI (60%, K=64, seed=1)"
    own = mlp.run.scores["Sem-ASMI (60%, K=64, mlp, scale=0.8)"]
    np.testing.assert_array_equal(mlp.score(group, "Sem-ASMI"), own)
    with pytest.raises(Unavailable, match="has no Other"):
        mlp.score(group, "Other")


def test_their_order_does_not_matter(runs, group):
    (other,) = load_run_groups(runs[::-1])
    assert set(other.scores) == set(group.scores)
    assert len(conditions(other)) == len(conditions(group))


def test_baselines_of_an_conditions_run_are_the_cells(tmp_path):
    saved = content(20)
    other = condition(saved, "mlp", None)
    other["estimations"]["sequence", "RAUQ"] = saved["estimations"].pop(("sequence", "RAUQ"))
    save(tmp_path / "mlp", other, manifest(20))
    save(tmp_path / "heads", saved)
    (group,) = load_run_groups([tmp_path / "mlp", tmp_path / "heads"])
    assert "RAUQ" in group.scores


def test_a_scale_of_heads_is_an_condition(tmp_path):
    saved, about = content(20), manifest(20)
    save(tmp_path / "heads", saved)
    save(tmp_path / "half", condition(saved, "heads", 0.1, perturbation_scale=0.5), about)
    (group,) = load_run_groups([tmp_path / "heads", tmp_path / "half"])
    (half,) = conditions(group)
    assert (half.condition, half.perturbation_scale) == ("heads", 0.5)
    assert set(group.variants) == {"ASMI", "Sem-ASMI", "Adapt-ASMI"}


def test_conditions_without_heads_are_refused(tmp_path):
    save(tmp_path / "mlp", condition(content(20), "mlp", 0.1), manifest(20))
    with pytest.raises(
        ValueError, match="is a run of a perturbation control: add the run of heads"
    ):
        load_run_groups([tmp_path / "mlp"])


def test_comparisons_are_those_of_the_statistics(group):
    (item,) = controls([group])
    table = item.table.set_index(["score", "condition"])
    one = next(one for one in comparable(group) if one.symbol == "Sem-ASMI")
    assert one.heads == SEM
    names = [
        "pseudo_heads, by effect", "foreign, by effect", "mlp, by effect",
        "mlp, by effect, 0.5 times", "isotropic",
    ]  # fmt: skip
    assert list(one.conditions) == names
    scores = {
        name: condition.score(group, "Sem-ASMI") for name, condition in one.conditions.items()
    }
    found = condition_comparisons(group.score(SEM), scores, group.answers)
    for name in names:
        row = table.loc[("Sem-ASMI", name)]
        assert row["heads minus condition"] == pytest.approx(found[name].difference)
        assert row["questions to be equal"] == found[name].to_equal
    assert set(table.index.get_level_values(0)) == {"ASMI", "Sem-ASMI"}


def test_an_condition_that_reads_the_same_is_named_first(group):
    said = {one.symbol: found for one, found in verdicts_on([group])}
    assert said["Sem-ASMI"].outcome == "reproduced"
    assert said["Sem-ASMI"].condition == "mlp"
    lines = findings([group])
    assert lines[0].startswith("**Not special to heads: tiny model, squad.** mlp at matched effect")
    small = any(line.startswith("**Too small") for line in lines)
    assert ("by its own criterion (few answers, so weak evidence)." in lines[0]) == small
    assert "Rank errors" in lines[2]
    (item,) = control_verdicts([group])
    row = item.table.set_index("score").loc["Sem-ASMI"]
    assert (row["verdict"], row["by"], row["context"]) == ("reproduced", "mlp", "given")
    assert row["conditions"] == "pseudo_heads, foreign, mlp"
    assert row["questions"] == N
    (claims,) = head_claims([group])
    row = claims.table.set_index("claim").iloc[-1]
    assert row["here"] == "does not"
    assert "reproduced by mlp" in row["where"]
    unranked = [one for one in comparable(group) if prr_of_heads(one).low <= 0]
    assert row["where"].count("not known to rank errors") == len(unranked)


def test_heads_alone_are_special_and_few_questions_inconclusive(tmp_path):
    saved = content(N)
    noise = {"pseudo_heads": None, "foreign": None}
    paths = save_conditions(tmp_path / "special", saved, manifest(N), noise)
    (group,) = load_run_groups(paths)
    (one, found), *_ = verdicts_on([group])
    assert (one.symbol, found.outcome) == ("Sem-ASMI", "special")
    assert not any("Not special" in line for line in findings([group]))
    few = save_conditions(tmp_path / "few", content(20), manifest(20), {**noise, "mlp": 0.8})
    (item,) = control_verdicts(load_run_groups(few))
    row = item.table.set_index("score").loc["Sem-ASMI"]
    assert row["verdict"] == "inconclusive"
    assert row["questions to decide"] > 20


def test_planted_cells_get_the_verdicts_they_were_planted_with(tmp_path):
    """Judged together: heads alone read the errors; noise in the MLP reads them as heads do; all
    read them, each with noise of its own, and the questions are few."""
    alone = dict.fromkeys(("pseudo_heads", "foreign", "isotropic", "mlp", "mlp_noise"))
    planted = {
        "squad": (N, alone, "special"),
        "coqa": (N, alone | {"mlp_noise": 0.001}, "reproduced"),
        "babiqa": (16, dict.fromkeys(alone, 0.8), "inconclusive"),
    }
    paths = []
    for name, (n, noise, _) in planted.items():
        paths += save_conditions(tmp_path / name, content(n), manifest(n, f"asmi_{name}"), noise)
    groups = load_run_groups(paths)
    (item,) = control_verdicts(groups)
    table = item.table[item.table["score"] == "Sem-ASMI"].set_index("setting")
    for name, (n, _, verdict) in planted.items():
        row = table.loc[f"tiny model, {name}"]
        assert (row["verdict"], row["questions"]) == (verdict, n), name
        assert row["conditions"] == ", ".join(alone)
        assert pd.isna(row["not run"])
    assert table.loc["tiny model, coqa", "by"] == "mlp_noise"
    assert table.loc["tiny model, babiqa", "questions to decide"] > 16
    named = [line for line in findings(groups) if "Not special" in line and "Sem-ASMI" in line]
    assert len(named) == 1
    assert "tiny model, coqa.** mlp_noise at matched effect" in named[0]


def test_conditions_at_no_matched_effect_have_no_verdict(tmp_path):
    saved, about = content(20), manifest(20)
    save(tmp_path / "heads", saved, about)
    save(tmp_path / "mlp", condition(saved, "mlp", 0.1), about)
    groups = load_run_groups([tmp_path / "heads", tmp_path / "mlp"])
    (gap,) = control_verdicts(groups)
    assert isinstance(gap, MissingItem)
    assert "needs perturbation scales" in gap.reason
    (item,) = controls(groups)
    assert item.table["condition"].tolist() == ["mlp, scale 0.8"] * 2
    (gap,) = controls(load_run_groups([tmp_path / "heads"]))
    assert "needs asmi_controls" in gap.reason


def test_what_either_adds_to_the_other(group):
    few = tuple(conditions(group)[i].run for i in (0, 2, 5))
    (item,) = controls_added([replace(group, separate_runs=few)])
    table = item.table.set_index(["score", "condition"])
    row = table.loc[("Sem-ASMI", "pseudo_heads, by effect")]
    other = conditions(group)[0].score(group, "Sem-ASMI")
    controls = np.column_stack([group.msp, group.entropy, other, group.lengths])
    added = adds_information(group.score(SEM), controls, group.answers)
    assert [row["z of heads"], row["p of heads"]] == pytest.approx([added.statistic, added.p_value])
    assert (row["heads add"], row["condition add"]) == ("yes", "no")
    # The paper's column: what MSP, H and the other of the two leave.
    for side, signal, given in (
        ("heads", group.score(SEM), other),
        ("condition", other, group.score(SEM)),
    ):
        known = np.column_stack([group.msp, group.entropy, given])
        left = distinct_signal(signal, known, group.answers)
        assert row[f"residual AUROC of {side}"] == pytest.approx(left.residual_auroc)
    assert row["ρ"].value == pytest.approx(spearmanr(group.score(SEM), other).statistic)
    assert row["ρ, corrected"] is None
    # The one that was resampled, with heads of the same other seed.
    mlp, again = (conditions(group)[i].score(group, "Sem-ASMI") for i in (2, 5))
    heads = group.score(SEM), group.score("Sem-ASMI (60%, K=64, seed=1)")
    found = table.loc[("Sem-ASMI", "mlp, by effect")]["ρ, corrected"]
    reliability = spearmanr(*heads).statistic * spearmanr(mlp, again).statistic
    plain = spearmanr(heads[0], mlp).statistic
    assert found.value == pytest.approx(plain / np.sqrt(reliability))


def test_a_double_dissociation_pairs_questions(runs, tmp_path):
    closed = content(N, shift=0.5)
    about = manifest(N, "asmi_squad_closed_book", closed=True)
    paths = save_conditions(tmp_path, closed, about, {"mlp": None})
    groups = load_run_groups([*runs, *paths])
    opened, without = groups
    assert without.closed_book
    (item,) = dissociation(groups)
    row = item.table.set_index(["score", "condition"]).loc[("Sem-ASMI", "mlp, by effect")]
    sides = [
        (side.score(SEM), mlp.score(side, "Sem-ASMI"), side.quality)
        for side, mlp in ((opened, conditions(opened)[2]), (without, conditions(without)[0]))
    ]
    found = double_dissociation(*sides, opened.clusters)
    assert row["heads minus condition, open minus closed"] == pytest.approx(found)
    assert row["questions"] == N
    # On recall nothing is named in the first lines, whatever comes out.
    assert not any("closed book" in line for line in findings(groups) if "Not special" in line)
    (gap,) = dissociation([opened])
    assert "without context" in gap.reason


def test_a_file_as_the_calculator_s_scale_is_matched_by_effect(tmp_path):
    """As the configs of heads take it, without the node of the perturbation controls."""
    saved, about = content(N), manifest(N)
    save(tmp_path / "heads", saved, about)
    config = {"asmi": {"perturbation_scale": "scales.json"}}
    save(tmp_path / "mlp", condition(saved, "mlp", None), about | {"config": config})
    (group,) = load_run_groups([tmp_path / "heads", tmp_path / "mlp"])
    assert [(one.matching, one.times) for one in conditions(group)] == [("effect", 1.0)]


def test_captions_count_the_resamples_that_were_drawn(group):
    for item in (*controls([group]), *control_verdicts([group])):
        assert "10,000 resamples" in item.caption[-1]
