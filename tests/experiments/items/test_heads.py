"""Report items on heads: the coupling and the probe."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis import Clustered
from lm_polygraph_asmi.experiments.analysis import (
    criticality_coupling,
    high_stratum,
    permutation_null,
)
from lm_polygraph_asmi.experiments.items.heads import (
    dissected,
    dissected_depths,
    head_coupling,
    places,
    profiles,
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
        columns.append(
            {
                "row": row, "mi": kl.mean(0), "h": own["asmi_entropy"][row], "z": null.z,
                "heads": null.effective_heads, "noise": null.null_effective_heads,
                "cluster": f"passage {row // 2}",
            }
        )  # fmt: skip
    return pd.concat(map(pd.DataFrame, columns), ignore_index=True)


@pytest.fixture(scope="module")
def defined(tokens):
    return tokens[tokens["z"].notna()]


def test_the_coupling_is_that_of_the_tokens(group, tokens, defined):
    (item,) = head_coupling([group])
    row = item.table.set_index("depth").loc["60%"]
    assert row["ρ(MI, z)"].value == pytest.approx(spearmanr(defined["mi"], defined["z"]).statistic)
    assert row["ρ(MI, z)"].low > 0  # planted
    columns = defined["mi"], defined["h"], defined["z"]
    by_example, by_cluster = (
        criticality_coupling(*columns, Clustered(defined[unit].astype(str)))
        for unit in ("row", "cluster")
    )
    for column, twin in {
        "ρ(MI, z)": by_example.information, "ρ(H, z)": by_example.entropy,
        "ρ(MI, z), clusters†": by_cluster.information, "difference†": by_example.difference,
    }.items():  # fmt: skip
        assert row[column] == pytest.approx(twin), column
    assert by_example != by_cluster
    assert (row["tokens"], row["examples"]) == (len(defined), defined["row"].nunique())
    assert row["without z"] == len(tokens) - len(defined) > 0


def test_effective_heads_stand_beside_those_of_noise(group, defined):
    (item,) = head_coupling([group])
    row, high = item.table.iloc[0], defined[high_stratum(defined["mi"])]
    assert row["n_eff (high MI)"].value == pytest.approx(high["heads"].mean())
    assert row["n_eff of noise†"] == pytest.approx(high["noise"].mean())
    assert row["n_eff (high MI)"].high < row["n_eff of noise†"]  # one strong head was planted
    assert "Compare n_eff with that of noise" in item.notes[0]


def test_the_coupling_at_a_deeper_layer_is_compared_on_the_same_tokens(group):
    (item,) = head_coupling([group])
    assert item.table["depth"].tolist() == ["60%", "90%"]
    apart = [profiles(group, depth) for depth in (0.6, 0.9)]
    shared = np.logical_and(*(found["z"].notna() for found in apart))
    ends = [spearmanr(found["mi"][shared], found["z"][shared]).statistic for found in apart]
    first, second = item.table["minus shallowest†"]
    assert first is None
    assert second.value == pytest.approx(ends[1] - ends[0])


def test_the_figure_of_the_coupling_shows_its_table(group):
    (item,) = head_coupling([group])
    (ax,) = item.figure.axes
    points = {line.get_ydata()[0]: line for line in ax.lines if line.get_marker() == "o"}
    shown = {ax.get_yticklabels()[y].get_text(): point for y, point in points.items()}
    assert list(shown) == ["H, 90%", "H, 60%", "MI, 90%", "MI, 60%"]
    for _, row in item.table.iterrows():
        for name in ("MI", "H"):
            (value,) = shown[f"{name}, {row['depth']}"].get_xdata()
            assert value == row[f"ρ({name}, z)"].value


def test_the_figure_of_the_flips_shows_its_rates(group):
    (item,) = causal_probe([group])
    (ax,) = item.figure.axes
    table = item.table.set_index("tokens and heads")
    curves = {line.get_label(): line for line in ax.lines if line.get_label() in table.index}
    assert list(curves) == list(table.index)
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
    (gap,) = head_coupling(load_run_groups([tmp_path / "few"]))
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
    assert sorted(set(found["answer"])) == sorted(rows)
    for answer, tokens in found.groupby("answer"):
        own = np.asarray(saved["stats"]["asmi"][answer][0.6]["kl"], dtype=float).mean(0)
        np.testing.assert_allclose(tokens["mi"], own)
    (item,) = causal_probe([group])
    assert item.table["tokens"].iloc[0] == 20
    (alone,) = load_run_groups([tmp_path / "part"])
    assert len(alone) == 20


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
    rates = {
        f"{level} MI, {rule} heads{'†' * (rule == 'random')}": 100 * flips(level, rule).mean(0)
        for rule in ("critical", "random") for level in ("high", "low")
    }  # fmt: skip
    assert list(table.index) == list(rates)
    for name, expected in rates.items():
        assert table.loc[name, "tokens"] == N
        assert values(table.loc[name]) == pytest.approx(expected.tolist()), name
    assert len({tuple(rate) for rate in rates.values()}) == 4  # else the test could not fail
    low = table.loc["low MI, critical heads", "k = 8"]
    assert low.value == 0 < low.high  # none of 60 is not never
    assert "by construction" in item.notes[0]
    assert "on 2 of the tokens the unmasked model's most likely token is not" in item.notes[2]
    assert "on 1 the passes without an ablation, which flips are counted against" in item.notes[2]


def test_a_probe_is_read_as_it_was_written(tmp_path):
    manager = tmp_path / "ue_manager_seed1"
    assert read_probe(manager) is None
    written = write_probe(probe(5), manager)
    assert written == probe_path(manager) == tmp_path / "asmi_probe_seed1.json"
    found = read_probe(manager)
    assert found.k == (1, 2, 4, 8)
    assert found.flipped("random", "high").shape == (5, 4)
    written.write_text("{}")
    with pytest.raises(ValueError, match="no file of"):
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
