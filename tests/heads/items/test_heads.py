"""Report items on heads: the coupling and the probe."""

import re

import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi.analysis import Clustered
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.heads.analysis import (
    criticality_coupling,
    flip_rates,
    high_stratum,
    permutation_null,
    sharpening,
)
from lm_polygraph_asmi.heads.items.heads import dissected, dissected_depths, head_coupling
from lm_polygraph_asmi.heads.items.probe import causal_probe
from lm_polygraph_asmi.heads.probe_file import probe_path, read_probe, write_probe
from lm_polygraph_asmi.report import load_run_groups
from tests.report import runs

pytestmark = pytest.mark.usefixtures("few_resamples", "no_pictures")
N = 60


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that kept masks and divergences at two depths, with a probe beside it."""
    folder = tmp_path_factory.mktemp("heads") / "run"
    saved = runs.content(N, depths=(60, 90))
    runs.dissect(saved)
    for depth, still in ((0.6, 4), (0.9, 5)):
        own = at_depth(saved["stats"], depth)
        own[3]["masks"][:, 5] = True  # a head that no mask ablates
        for each in own[still::3]:  # tokens that no mask moves, which have no z
            each["kl"][:, 0] = 0
        for each in own[6:20]:
            each["kl"][:, 0] *= 1e-5  # and some that hardly move
    write_probe(runs.probe(N), probe_path(runs.save(folder, saved)))
    with runs.few_permutations():
        yield folder, saved


@pytest.fixture(scope="module")
def group(run):
    (found,) = load_run_groups([run[0]])
    return found


@pytest.fixture(scope="module")
def coupling(group):
    (item,) = head_coupling([group])
    return item.table


def tokens_of(saved, depth):
    """All tokens of a run, from their masks and divergences."""
    parts = []
    for row, masked in enumerate(at_depth(saved["stats"], depth)):
        kl = np.asarray(masked["kl"], dtype=float)
        null = permutation_null(kl, masked["masks"], masked["mask_seed"])
        own = {"mi": kl.mean(0), "h": saved["stats"]["asmi_entropy"][row], **null._asdict()}
        parts.append(pd.DataFrame(own).assign(row=f"{row}", cluster=f"{row // 2}"))
    return pd.concat(parts, ignore_index=True)


def test_the_table_is_that_of_the_tokens(coupling, run):
    tokens = tokens_of(run[1], 0.6)
    defined = tokens.dropna(subset="z")
    columns = defined["mi"], defined["h"], defined["z"]
    by_example, by_cluster = (
        criticality_coupling(*columns, Clustered(defined[unit])) for unit in ("row", "cluster")
    )
    high = defined[high_stratum(defined["mi"])]
    row = coupling.iloc[0]
    twin = {
        "tokens": len(defined), "without z": len(tokens) - len(defined), "S": 100,
        "examples": defined["row"].nunique(),
        "ρ(MI, z)": pytest.approx(by_example.information),
        "ρ(H, z)": pytest.approx(by_example.entropy),
        "difference†": pytest.approx(by_example.difference),
        "ρ(MI, z), clusters†": pytest.approx(by_cluster.information),
        "n_eff of noise†": pytest.approx(high["null_effective_heads"].mean()),
    }  # fmt: skip
    assert twin == row[[*twin]].to_dict()
    assert row["n_eff (high MI)"].value == pytest.approx(high["effective_heads"].mean())
    # What was planted: tokens without z, more coupling than none, one strong head.
    assert twin["without z"] > 0
    assert row["ρ(MI, z)"].low > 0
    assert row["n_eff (high MI)"].high < row["n_eff of noise†"]


def test_the_coupling_at_a_deeper_layer_is_compared_on_the_same_tokens(coupling, run):
    """Each depth has tokens of its own without z."""
    first, deeper = (tokens_of(run[1], depth) for depth in (0.6, 0.9))
    both = first["z"].notna() & deeper["z"].notna()
    ends = [(found["mi"][both], found["z"][both]) for found in (first, deeper)]
    assert coupling["depth"].tolist() == ["60%", "90%"]
    assert coupling["minus shallowest†"].tolist() == [
        None, pytest.approx(sharpening(*ends, Clustered(first["row"][both])))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("masks", "moved", "lacks", "reason"),
    [
        (99, 20, None, "100 masks or more: needs asmi_heads"),
        (100, 2, None, "too few tokens with z_t"),
        (100, 0, None, "criticality is undefined everywhere"),
        (100, 20, "asmi_entropy", "asmi_entropy not saved"),
    ],
)
@pytest.mark.usefixtures("run")  # with few permutations
def test_a_run_that_does_not_tell_of_heads_is_a_gap(tmp_path, masks, moved, lacks, reason):
    """Masks move a token of so many answers."""
    saved = runs.content(20)
    runs.dissect(saved, masks)
    for row, own in enumerate(at_depth(saved["stats"], 0.6)):
        own["kl"][:, int(row < moved) :] = 0
    saved["stats"].pop(lacks, None)
    (gap,) = head_coupling(runs.loaded(tmp_path, saved))
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
    first = runs.save(tmp_path / "part", runs.some_rows(saved, range(20)), runs.manifest(20))
    write_probe(runs.probe(20), probe_path(first))
    whole, part = load_run_groups([tmp_path / "whole", tmp_path / "part"])
    assert part.label == f"{part.model}, {part.dataset} (part)"
    (item,) = causal_probe([whole, part])
    assert (item.groups, item.table["tokens"].iloc[0], len(whole)) == ([part], 20, N)


def test_every_row_of_the_probe_counts_its_own_flips(group):
    (item,) = causal_probe([group])
    planted, seen = runs.probe(N), []
    lines = {line.get_label(): line.get_ydata() for line in item.draw().axes[0].lines}
    for name, row in item.table.set_index("tokens and heads").iterrows():
        level, rule = re.match(r"(\w+) MI, (\w+) heads", name).groups()
        probed = planted["groups"][level]
        flips = np.array(planted["predicted"][rule])[probed].reshape(N, 4, -1) != 0
        answers = np.array(planted["tokens"]["row"])[probed]
        rates = flip_rates(flips.mean(-1), Clustered(np.array(group.clusters)[answers]))
        found = [row[f"k = {k}"] for k in (1, 2, 4, 8)]
        assert [pytest.approx(100 * np.array(rate)) for rate in rates] == found, name
        assert [rate.value for rate in found] == list(lines[name])
        assert (row["tokens"], "†" in name) == (N, rule == "random")
        seen.append(tuple(found))
    assert len(set(seen)) == 4  # else the test could not fail
    assert "by construction" in item.notes[0]
    # Token 5 is not the answer's, and rounding changes the first one.
    assert "For 2 of the tokens, the unmasked model's" in item.notes[2]
    assert "For 1, the passes without an ablation" in item.notes[2]


def test_a_probe_is_read_as_it_was_written_and_a_damaged_one_named(tmp_path):
    manager = runs.save(tmp_path / "run", runs.content(20))
    written = probe_path(manager)
    assert (read_probe(manager), written) == (None, manager.parent / "asmi_probe_seed1.json")
    write_probe(runs.probe(5), written)
    assert read_probe(manager).flipped("random", "high").shape == (5, 4)
    for damaged in ("{}", written.read_text().replace('"format": 1', '"format": 2')):
        written.write_text(damaged)
        (gap,) = causal_probe(load_run_groups([tmp_path / "run"]))
        assert "asmi_probe_seed1.json is damaged" in gap.reason
