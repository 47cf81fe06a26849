"""Report items on heads: the coupling and the probe."""

import re

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis import Clustered
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.heads.analysis import criticality_coupling, high_stratum, permutation_null
from lm_polygraph_asmi.heads.analysis.coupling import sharpening
from lm_polygraph_asmi.heads.items.heads import dissected, dissected_depths, head_coupling, profiles
from lm_polygraph_asmi.heads.items.probe import causal_probe
from lm_polygraph_asmi.heads.probe_file import probe_path, read_probe, write_probe
from lm_polygraph_asmi.report import load_run_groups
from tests.report import runs

pytestmark = pytest.mark.usefixtures("few_resamples", "no_pictures")
N = 60


@pytest.fixture(autouse=True, scope="module")
def fewer():
    with runs.few_permutations():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that kept masks and divergences at two depths, with a probe beside it."""
    folder = tmp_path_factory.mktemp("heads") / "run"
    saved = runs.content(N, depths=(60, 90))
    runs.dissect(saved)
    for depth in (0.6, 0.9):
        own = at_depth(saved["stats"], depth)
        own[3]["masks"][:, 5] = True  # a head that no mask ablates
        own[4]["kl"][:, 0] = 0  # a token that no mask moves
        for each in own[6:20]:
            each["kl"][:, 0] *= 1e-5  # and some that hardly move
    file = runs.save(folder, saved)
    write_probe(runs.probe(N), probe_path(file))
    return folder, saved


@pytest.fixture(scope="module")
def group(run):
    (found,) = load_run_groups([run[0]])
    return found


def test_the_table_is_that_of_the_tokens(group, run):
    own, parts = run[1]["stats"], []
    for row, masked in enumerate(at_depth(own, 0.6)):
        kl = np.asarray(masked["kl"], dtype=float)
        null = permutation_null(kl, masked["masks"], masked["mask_seed"])
        columns = {"mi": kl.mean(0), "h": own["asmi_entropy"][row], **null._asdict()}
        parts.append(pd.DataFrame(columns).assign(row=row, cluster=row // 2))
    tokens = pd.concat(parts, ignore_index=True)
    (item,) = head_coupling([group])
    row, defined = item.table.iloc[0], tokens[tokens["z"].notna()]
    columns = defined["mi"], defined["h"], defined["z"]
    units = (Clustered(defined[unit].astype(str)) for unit in ("row", "cluster"))
    by_example, by_cluster = (criticality_coupling(*columns, unit) for unit in units)
    for column, twin in {
        "ρ(MI, z)": by_example.information, "ρ(H, z)": by_example.entropy,
        "ρ(MI, z), clusters†": by_cluster.information, "difference†": by_example.difference,
    }.items():  # fmt: skip
        assert row[column] == pytest.approx(twin), column
    assert by_example != by_cluster
    assert row["ρ(MI, z)"].low > 0  # planted
    assert (row["tokens"], row["examples"]) == (len(defined), defined["row"].nunique())
    assert row["without z"] == len(tokens) - len(defined) > 0
    high = defined[high_stratum(defined["mi"])]
    assert row["n_eff (high MI)"].value == pytest.approx(high["effective_heads"].mean())
    assert row["n_eff of noise†"] == pytest.approx(high["null_effective_heads"].mean())
    assert row["n_eff (high MI)"].high < row["n_eff of noise†"]  # one strong head was planted


def test_the_coupling_at_a_deeper_layer_is_compared_on_the_same_tokens(group):
    (item,) = head_coupling([group])
    assert item.table["depth"].tolist() == ["60%", "90%"]
    apart = [profiles(group, depth) for depth in (0.6, 0.9)]
    shared = np.logical_and(*(found["z"].notna() for found in apart))
    ends = [(found["mi"][shared], found["z"][shared]) for found in apart]
    first, second = item.table["minus shallowest†"]
    assert first is None
    assert second.value == pytest.approx(np.diff([spearmanr(*end).statistic for end in ends])[0])
    examples = Clustered(apart[0]["answer"][shared].astype(str))
    assert second == pytest.approx(sharpening(*ends, examples))


def test_a_run_that_does_not_tell_of_heads_is_a_gap(tmp_path):
    saved = runs.content(20)

    def moved(tokens):
        runs.dissect(saved)
        for row, own in enumerate(at_depth(saved["stats"], 0.6)):
            own["kl"][:, int(row < tokens) :] = 0

    for change, reason in {
        lambda: runs.dissect(saved, masks=99): "100 masks or more: needs asmi_heads",
        lambda: moved(2): "too few tokens with z_t",
        lambda: moved(0): "criticality is undefined everywhere",
        lambda: saved["stats"].pop("asmi_entropy"): "asmi_entropy not saved",
    }.items():
        change()
        runs.save(tmp_path / reason[:9], saved)
        (gap,) = head_coupling(load_run_groups([tmp_path / reason[:9]]))
        assert reason in gap.reason


def test_of_several_runs_that_with_the_most_masks_is_dissected(tmp_path):
    for name, number in {"a": 100, "b": 120, "c": 110}.items():
        saved = runs.content(20)
        runs.dissect(saved, masks=number)
        runs.save(tmp_path / name, runs.exchanged(saved, num_masks=number))
    (group,) = load_run_groups([tmp_path / name for name in "abc"])
    assert dissected(group, 0.6)[0].path.parent.name == "b"
    assert (dissected(group, 0.9), dissected_depths(group)) == (None, [0.6])


def test_a_run_over_the_first_answers_is_a_setting_of_its_own(tmp_path):
    saved = runs.content(N)
    runs.save(tmp_path / "whole", saved, runs.manifest(N))
    runs.dissect(saved)
    first = runs.save(tmp_path / "part", runs.some_rows(saved, range(20)), runs.manifest(20))
    write_probe(runs.probe(20), probe_path(first))
    whole, part = load_run_groups([tmp_path / "whole", tmp_path / "part"])
    assert (len(whole), len(part)) == (N, 20)
    assert part.label == f"{part.model}, {part.dataset} (part)"
    (item,) = causal_probe([whole, part])
    assert item.groups == [part]
    assert item.table["tokens"].iloc[0] == 20


def test_every_row_of_the_probe_counts_its_own_flips(group):
    (item,) = causal_probe([group])
    planted, seen = runs.probe(N), set()
    lines = {line.get_label(): line.get_ydata() for line in item.draw().axes[0].lines}
    for name, row in item.table.set_index("tokens and heads").iterrows():
        level, rule = re.match(r"(\w+) MI, (\w+) heads", name).groups()
        ids = np.array(planted["predicted"][rule])[planted["groups"][level]].reshape(N, 4, -1)
        rates = 100 * (ids != 0).mean((0, 2))  # another token than 0 is a flip
        values = [row[f"k = {k}"].value for k in (1, 2, 4, 8)]
        assert row["tokens"] == N
        assert values == pytest.approx(rates.tolist())
        assert values == list(lines[name])
        assert ("†" in name) == (rule == "random")
        seen.add(tuple(rates))
    assert len(seen) == 4  # else the test could not fail
    assert item.table["k = 8"][1].value == 0 < item.table["k = 8"][1].high  # none is not never
    assert "by construction" in item.notes[0]
    assert "For 2 of the tokens, the unmasked model's most likely token is not" in item.notes[2]
    assert "For 1, the passes without an ablation, against which flips are counted" in item.notes[2]


def test_a_probe_is_read_as_it_was_written_and_a_damaged_one_named(tmp_path):
    manager = runs.save(tmp_path / "run", runs.content(20))
    assert read_probe(manager) is None
    written = probe_path(manager)
    write_probe(runs.probe(5), written)
    assert written == manager.parent / "asmi_probe_seed1.json"
    assert read_probe(manager).flipped("random", "high").shape == (5, 4)
    written.write_text("{}")
    (gap,) = causal_probe(load_run_groups([tmp_path / "run"]))
    assert "asmi_probe_seed1.json is damaged, or is not a file of" in gap.reason
