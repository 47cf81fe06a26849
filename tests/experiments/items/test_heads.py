"""Report items on heads: concentration, coupling, the probe."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis import Interval
from lm_polygraph_asmi.experiments.analysis import (
    criticality_coupling,
    head_criticality,
    high_stratum,
    permutation_null,
)
from lm_polygraph_asmi.experiments.dissected import dissected, dissected_depths, places
from lm_polygraph_asmi.experiments.items import figures
from lm_polygraph_asmi.experiments.items.heads import (
    head_concentration,
    head_coupling,
    profiles,
    sharpened,
)
from lm_polygraph_asmi.experiments.items.probe import causal_probe
from lm_polygraph_asmi.experiments.probe_file import probe_path, read_probe, write_probe
from lm_polygraph_asmi.report import MissingItem, load_run_groups
from lm_polygraph_asmi.report.items import every_report_item
from lm_polygraph_asmi.results.names import at_depth
from tests.report.runs import (
    SHUFFLES,
    content,
    dissect,
    exchanged,
    few_permutations,
    manifest,
    probe,
    save,
    simple_signals,
)

pytestmark = pytest.mark.usefixtures("few_resamples", "no_pictures")
N = 60


@pytest.fixture(autouse=True, scope="module")
def fewer():
    with few_permutations(), simple_signals():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that kept masks and divergences at two depths, with a probe beside it."""
    folder = tmp_path_factory.mktemp("heads") / "run"
    saved = content(N, depths=(60, 90))
    dissect(saved)
    for depth in (0.6, 0.9):
        own = at_depth(saved["stats"], depth)
        own[3]["masks"][:, 5] = True  # a head that no mask ablates
        own[4]["kl"][:, 0] = 0  # a token that no mask moves
        for each in own[6:20]:
            each["kl"][:, 0] *= 1e-5  # and some that hardly move
    file = save(folder, saved)
    write_probe(probe(N), file)
    return folder, saved


@pytest.fixture(scope="module")
def group(run):
    (found,) = load_run_groups([run[0]])
    return found


@pytest.fixture(scope="module")
def tokens(run):
    """What is known of every token at 60 % of depth, from what was saved; one row each."""
    own, columns = run[1]["stats"], []
    for row in range(N):
        masked = own["asmi"][row][0.6]
        kl, masks, seed = (masked[name] for name in ("kl", "masks", "mask_seed"))
        kl = np.asarray(kl, dtype=float)
        null = permutation_null(kl, masks, SHUFFLES, seed)
        criticality, length = head_criticality(kl, masks), kl.shape[1]
        columns.append(
            {
                "row": row, "mi": kl.mean(0), "h": own["asmi_entropy"][row], "z": null.z,
                "p": null.p, "heads": null.effective_heads, "noise": null.null_effective_heads,
                "limit": (1 - null.null_mean) / null.null_sd,
                "positive": (criticality > 0).sum(1), "closing": np.arange(length) == length - 1,
                "cluster": f"passage {row // 2}",
            }
        )  # fmt: skip
    return pd.concat(map(pd.DataFrame, columns), ignore_index=True)


@pytest.fixture(scope="module")
def defined(tokens):
    return tokens[tokens["z"].notna()]


def test_concentration_stands_beside_that_of_noise(group, tokens, defined):
    (item,) = head_concentration([group])
    row = item.table.iloc[0]
    high = defined[high_stratum(defined["mi"])]
    means = {
        "n_eff (high MI)": "heads", "n_eff of noise†": "noise", "mean z (high MI)†": "z",
        "z at most†": "limit", "positive heads": "positive",
    }  # fmt: skip
    for name, column in means.items():
        assert row[name] == pytest.approx(high[column].mean()), name
    assert row["median n_eff"] == pytest.approx(high["heads"].median())
    assert row["1 / mean HHI"] == pytest.approx(1 / (1 / high["heads"]).mean())
    assert row["p < .05 (high MI)†"] == pytest.approx((high["p"] < 0.05).mean())
    assert row["p < .05 (all)†"] == pytest.approx((defined["p"] < 0.05).mean())
    excess = (high["heads"] - high["noise"]).mean()
    assert row["n_eff minus noise†"].value == pytest.approx(excess)
    assert row["n_eff minus noise†"].high < 0  # one strong head was planted
    assert (row["H"], row["S"]) == (8, 100)
    assert row["tokens an answer"] == len(tokens) / N
    assert row["without closing tokens"] == (~tokens["closing"]).sum() / N
    assert row["without z"] == len(tokens) - len(defined) > 0
    assert row["unknown pairs"] == (tokens["row"] == 3).sum()
    assert item.table["depth"].tolist() == ["60%", "90%"]
    assert "Compare n_eff with that of noise" in item.notes[0]
    assert "about ten for 32 heads" in item.notes[0]


def test_coupling_is_that_of_the_tokens(group, defined):
    (item,) = head_coupling([group])
    row = item.table.set_index("depth").loc["60%"]
    assert row["ρ(MI, z)"].value == pytest.approx(spearmanr(defined["mi"], defined["z"]).statistic)
    assert row["ρ(MI, z)"].low > 0  # planted
    columns = defined["mi"], defined["h"], defined["z"]
    by_example, by_cluster = (
        criticality_coupling(*columns, defined[unit].astype(str).tolist())
        for unit in ("row", "cluster")
    )
    assert row["tokens"] == len(defined)
    for column, twin in {
        "ρ(MI, z)": by_example.information, "ρ(H, z)": by_example.entropy,
        "ρ(MI, z), clusters†": by_cluster.information,
        "ρ(H, z), clusters†": by_cluster.entropy, "difference†": by_example.difference,
        "difference, clusters†": by_cluster.difference,
    }.items():  # fmt: skip
        assert row[column] == pytest.approx(twin), column
    assert by_example != by_cluster
    assert item.table.set_index("depth").loc["90%", "ρ(MI, z)"].value > 0
    apart = [profiles(group, depth) for depth in (0.6, 0.9)]
    shared = np.logical_and(*(found.defined for found in apart))
    ends = [spearmanr(found.mi[shared], found.z[shared]).statistic for found in apart]
    assert sharpened(group).value == pytest.approx(ends[1] - ends[0])
    assert f"minus shallowest: {group.label}: {sharpened(group)}." in item.notes[1]


def test_the_figure_of_the_coupling_shows_its_table():
    def row(group, depth, of_mi, of_entropy):
        ends = [Interval(value, value - 0.1, value + 0.1) for value in (of_mi, of_entropy)]
        return {"setting": group, "depth": depth, "ρ(MI, z)": ends[0], "ρ(H, z)": ends[1]}

    rows = [row("a", "60%", 0.3, 0.05), row("a", "90%", 0.4, 0.0), row("b", "60%", -0.2, 0.2)]
    left, right = figures.coupling(pd.DataFrame(rows)).axes
    points = [line for line in left.lines if line.get_marker() in "os"]
    assert [(line.get_xdata()[0], line.get_marker()) for line in points] == [
        (0.3, "o"), (-0.2, "o"), (0.05, "s"), (0.2, "s"),
    ]  # fmt: skip
    filled = [line.get_markerfacecolor() != "white" for line in points]
    assert filled == [True, True, False, True]  # where the interval excludes zero
    assert [label.get_text() for label in left.get_yticklabels()] == ["a", "b"]
    assert left.get_xlabel() == "ρ at 60% of depth"
    over_depth = {line.get_label(): list(line.get_ydata()) for line in right.lines}
    assert (over_depth["a"], over_depth["b"]) == ([0.3, 0.4], [-0.2])
    assert [label.get_text() for label in right.get_xticklabels()] == ["60%", "90%"]
    # Settings of other depths say theirs.
    left, _ = figures.coupling(pd.DataFrame([*rows[:2], rows[2] | {"depth": "50%"}])).axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["a, 60%", "b, 50%"]
    assert left.get_xlabel() == "ρ at the depth named"


def test_the_figure_of_the_flips_shows_its_rates(group):
    (item,) = causal_probe([group])
    (ax,) = item.draw().axes
    table = item.table.set_index("tokens and heads")
    curves = {line.get_label(): line for line in ax.lines if line.get_label() in table.index}
    assert list(curves) == [
        "high MI, critical heads", "high MI, random heads†", "low MI, critical heads",
    ]  # fmt: skip
    for name, line in curves.items():
        assert list(line.get_xdata()) == [1, 2, 4, 8]
        assert list(line.get_ydata()) == pytest.approx(values(table.loc[name]))
    assert (ax.get_xscale(), ax.get_title()) == ("log", "tiny model,\nsquad")
    bands = [np.asarray(band.get_paths()[0].vertices)[:, 1] for band in ax.collections]
    highest = table.loc["high MI, critical heads"]
    assert max(bands[0]) == pytest.approx(max(highest[f"k = {k}"].high for k in (1, 2, 4, 8)))


def test_a_run_without_enough_masks_is_a_gap(tmp_path):
    saved = content(20)
    save(tmp_path / "without", saved)
    (gap,) = head_coupling(load_run_groups([tmp_path / "without"]))
    assert isinstance(gap, MissingItem)
    assert "needs asmi_heads" in gap.reason
    dissect(saved, masks=60)
    save(tmp_path / "few", saved)
    (gap,) = head_concentration(load_run_groups([tmp_path / "few"]))
    assert "100 masks or more: needs asmi_heads" in gap.reason


def test_masks_that_move_nothing_are_a_gap(tmp_path):
    saved = content(20)
    dissect(saved)
    for own in at_depth(saved["stats"], 0.6):
        own["kl"][:] = 0
    save(tmp_path / "run", saved)
    (gap,) = head_coupling(load_run_groups([tmp_path / "run"]))
    assert "criticality is undefined everywhere" in gap.reason


def test_of_several_runs_that_with_the_most_masks_is_dissected(tmp_path):
    """And the score of fewer masks stays the operating one, in whichever order they come; that of
    a run which is there for its masks is no method of the setting."""
    plain, fewer, more = content(20), content(20), content(20)
    dissect(fewer, masks=100)
    dissect(more, masks=120)
    more = exchanged(more, num_masks=120)
    for name, saved in (("more", more), ("fewer", fewer), ("plain", plain)):
        save(tmp_path / name, saved)
    (group,) = load_run_groups([tmp_path / name for name in ("more", "fewer", "plain")])
    assert dissected(group, 0.6)[0].path.parent.name == "more"
    assert group.variants["Sem-ASMI"] == "Sem-ASMI (60%, K=64)"
    assert not any("S=120" in method for method in group.scores)
    assert [run.path.parent.name for run in group.separate_runs] == ["more"]
    assert places(group, group.separate_runs[0]) == [(i, i) for i in range(20)]
    assert dissected(group, 0.9) is None
    assert dissected_depths(group) == [0.6]


def test_a_run_over_the_first_answers_is_a_part_of_their_cell(tmp_path):
    """Its own scores are in no table: verdicts over settings would count these answers twice."""
    saved = content(N)
    about = manifest(N)
    save(tmp_path / "whole", saved, about)
    dissect(saved)
    rows = np.arange(N)[::-1][:20]  # in another order, too
    some = {
        part: {name: [values[i] for i in rows] for name, values in saved[part].items()}
        for part in ("estimations", "gen_metrics", "stats")
    }
    shorter = {"ids": [f"q{i}" for i in rows], "clusters": [f"passage {i // 2}" for i in rows]}
    file = save(tmp_path / "part", {**saved, **some}, about | {"rows": shorter})
    write_probe(probe(20), file)
    (group,) = load_run_groups([tmp_path / "part", tmp_path / "whole"])
    assert len(group) == N
    assert len(group.runs) == len(group.separate_runs) == 1
    found = profiles(group, 0.6)
    assert sorted(set(found.answer)) == sorted(rows)
    for answer in rows:
        own = np.asarray(saved["stats"]["asmi"][answer][0.6]["kl"], dtype=float).mean(0)
        np.testing.assert_allclose(found.mi[found.answer == answer], own)
    (item,) = causal_probe([group])
    assert item.table["tokens"].iloc[0] == 20
    (alone,) = load_run_groups([tmp_path / "part"])
    assert len(alone) == 20


RATES = {
    "high MI, critical heads": ("high", "critical"),
    "low MI, critical heads": ("low", "critical"),
    "high MI, random heads†": ("high", "random"),
    "low MI, random heads†": ("low", "random"),
}
"""Of the probe's table: what is counted of the planted probe."""


def flips(group, rule):
    """(tokens, K) of the planted probe, where another token than 0 is a flip."""
    planted = probe(N)
    said = np.array(planted["predicted"][rule])[planted["groups"][group]] != 0
    return said.mean(-1) if said.ndim == 3 else said.astype(float)


def values(row):
    return [row[f"k = {k}"].value for k in (1, 2, 4, 8)]


def test_every_row_of_the_probe_counts_its_own_flips(group):
    (item,) = causal_probe([group])
    table = item.table.set_index("tokens and heads")
    assert list(table.index) == list(RATES)
    seen = set()
    for name, (group_of_tokens, rule) in RATES.items():
        wanted = 100 * flips(group_of_tokens, rule).mean(0)
        assert table.loc[name, "tokens"] == N
        assert values(table.loc[name]) == pytest.approx(wanted.tolist()), name
        seen.add(tuple(wanted))
    assert len(seen) == len(RATES)  # the test could not fail if rows were alike


def test_the_probe_has_its_rates_and_their_controls(group):
    (item,) = causal_probe([group])
    table = item.table.set_index("tokens and heads")
    decided = np.array(probe(N)["predicted"]["critical"])[:N, 0].mean()
    high = table.loc["high MI, critical heads"]
    assert high["k = 1"].value == pytest.approx(100 * decided)
    assert table.loc["low MI, critical heads", "k = 8"].value == 0
    assert table.loc["low MI, critical heads", "k = 8"].high > 0  # none of 60 is not never
    random = table.loc["high MI, random heads†"]
    for k in (1, 2, 4):
        expected = 100 * decided * k / 8  # heads at random, one of 8 decisive
        assert random[f"k = {k}"].value == pytest.approx(expected, abs=6)
    assert high["run's own masks†"] == pytest.approx(10 * decided)
    assert "by construction" in item.notes[0]
    assert (
        "on 2 of them the unmasked model's most likely token is not the answer's" in item.notes[2]
    )
    assert "on 1 the passes without an ablation, which flips are counted against" in item.notes[2]


def test_a_probe_is_read_as_it_was_written(tmp_path):
    manager = tmp_path / "ue_manager_seed1"
    assert read_probe(manager) is None
    written = write_probe(probe(5), manager)
    assert written == probe_path(manager) == tmp_path / "asmi_probe_seed1.json"
    found = read_probe(manager)
    assert found.k == (1, 2, 4, 8)
    assert np.isnan(found.criticality[:, -1]).all()
    assert found.flipped("random", "high").shape == (5, 4)
    written.write_text("{}")
    with pytest.raises(ValueError, match="is not a file of"):
        read_probe(manager)
    written.write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        read_probe(manager)


def test_a_damaged_probe_leaves_the_rest_of_the_report(tmp_path):
    file = save(tmp_path / "run", content(20))
    probe_path(file).write_text("{")
    groups = load_run_groups([tmp_path / "run"])
    items = [item for make in every_report_item() for item in make(groups)]
    gaps = [item.reason for item in items if isinstance(item, MissingItem)]
    assert any("asmi_probe_seed1.json is damaged" in reason for reason in gaps)
    assert len(items) - len(gaps) > 15
