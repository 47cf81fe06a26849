"""Report items on heads: concentration, coupling, errors, the probe, and the paper's claims."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

from lm_polygraph_asmi.analysis import (
    Interval,
    Labelled,
    adds_information,
    auroc_interval,
    distinct_signal,
)
from lm_polygraph_asmi.experiments.analysis import (
    criticality_coupling,
    head_criticality,
    high_stratum,
    permutation_null,
    resampled_masks,
    resampled_null,
    split_half,
)
from lm_polygraph_asmi.experiments.conditions import (
    conditions,
    dissected,
    dissected_depths,
    places,
    runs_of_heads,
)
from lm_polygraph_asmi.experiments.items import figures
from lm_polygraph_asmi.experiments.items.claims import head_claims
from lm_polygraph_asmi.experiments.items.heads import (
    head_concentration,
    head_coupling,
    head_errors,
    profiles,
    sharpened,
)
from lm_polygraph_asmi.experiments.items.probe import causal_differences, causal_probe
from lm_polygraph_asmi.experiments.probe_file import probe_path, read_probe, write_probe
from lm_polygraph_asmi.report import MissingItem, load_run_groups
from lm_polygraph_asmi.report.items import every_report_item, findings
from tests.report.runs import (
    OTHER_SEEDS,
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
    own = saved["stats"]
    for depth in ("d60", "d90"):
        own[f"asmi_masks_{depth}"][3][:, 5] = True  # a head that no mask ablates
        own[f"asmi_kl_{depth}"][4][:, 0] = 0  # a token that no mask moves
        for kl in own[f"asmi_kl_{depth}"][6:20]:
            kl[:, 0] *= 1e-5  # and some that hardly move
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
        kl, masks = (own[f"asmi_{name}_d60"][row] for name in ("kl", "masks"))
        kl, seed = np.asarray(kl, dtype=float), own["asmi_mask_seed_d60"][row]
        null, (half, of_half) = (
            find(kl, masks, SHUFFLES, seed) for find in (permutation_null, split_half)
        )
        criticality, length = head_criticality(kl, masks), kl.shape[1]
        columns.append(
            {
                "row": row, "position": np.arange(length), "mi": kl.mean(0),
                "early": kl[:40].mean(0), "half": half, "half_z": of_half.z,
                "h": own["asmi_entropy"][row], "z": null.z, "p": null.p,
                "heads": null.effective_heads, "noise": null.null_effective_heads,
                "limit": (1 - null.null_mean) / null.null_sd,
                "mass": np.where(criticality > 0, criticality, 0).sum(1),
                "positive": (criticality > 0).sum(1), "closing": np.arange(length) == length - 1,
                "cluster": f"passage {row // 2}",
            }
        )  # fmt: skip
    return pd.concat(map(pd.DataFrame, columns), ignore_index=True)


@pytest.fixture(scope="module")
def defined(tokens):
    return tokens[tokens["z"].notna()]


def test_concentration_stands_beside_that_of_noise(group, run, tokens, defined):
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
    # Masks drawn anew, of the answers in which such tokens stand.
    own, resampled = run[1]["stats"], []
    others = resampled_masks(OTHER_SEEDS, 100, 8, 0.15, "bernoulli")
    for answer, group in high.groupby("row"):
        kl = np.asarray(own["asmi_kl_d60"][answer], dtype=float)
        found = resampled_null(kl, own["asmi_masks_d60"][answer], others)
        resampled += found.null_effective_heads[group["position"]].tolist()
    assert row["n_eff of other masks†"] == pytest.approx(np.mean(resampled))
    assert row["n_eff of other masks†"] != row["n_eff of noise†"]
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


def test_coupling_is_that_of_the_tokens(group, tokens, defined):
    (item,) = head_coupling([group])
    table = item.table[item.table["depth"] == "60%"].set_index("read")
    row = table.loc["as in the paper"]
    assert row["ρ(MI, z)"].value == pytest.approx(spearmanr(defined["mi"], defined["z"]).statistic)
    assert row["ρ(MI, z)"].low > 0  # planted
    means = defined.groupby("row").mean(numeric_only=True).reset_index()
    readings = {
        "as in the paper": ("mi", "z", defined),
        "halves of the masks†": ("half", "half_z", tokens[tokens["half_z"].notna()]),
        "first 40 masks' MI": ("early", "z", defined),
        "without closing tokens†": ("mi", "z", defined[~defined["closing"]]),
        "MI above 1e-5†": ("mi", "z", defined[defined["mi"] > 1e-5]),
        "means of answers†": ("mi", "z", means.assign(cluster=lambda own: own["row"] // 2)),
    }
    assert list(table.index) == list(readings)
    for name, (information, z, own) in readings.items():
        position = None if name == "means of answers†" else own[["position"]]
        rows = own[information], own["h"], own[z]
        clusters = own["cluster"].astype(str).tolist()
        by_example = criticality_coupling(*rows, own["row"].astype(str).tolist(), position)
        by_cluster = criticality_coupling(*rows, clusters, position)
        found = table.loc[name]
        assert found["tokens"] == len(own), name
        for column, twin in {
            "ρ(MI, z)": by_example.information, "ρ(H, z)": by_example.entropy,
            "ρ(MI, z), clusters†": by_cluster.information,
            "ρ(H, z), clusters†": by_cluster.entropy, "difference†": by_example.difference,
            "difference, clusters†": by_cluster.difference,
            "ρ(MI, z) given H and position†": by_example.partial,
        }.items():  # fmt: skip
            assert found[column] == pytest.approx(twin), (name, column)
    # The test could not fail if readings were alike.
    assert len({found.value for found in table["ρ(MI, z)"]}) == len(readings)
    deep = item.table[item.table["depth"] == "90%"].set_index("read").loc["as in the paper"]
    assert deep["ρ(MI, z)"].value > 0
    apart = [profiles(group, depth) for depth in (0.6, 0.9)]
    shared = np.logical_and(*(found.defined for found in apart))
    ends = [spearmanr(found.mi[shared], found.z[shared]).statistic for found in apart]
    assert sharpened(group).value == pytest.approx(ends[1] - ends[0])


def test_the_figure_of_the_coupling_shows_its_table():
    def row(group, depth, of_mi, of_entropy):
        ends = [Interval(value, value - 0.1, value + 0.1) for value in (of_mi, of_entropy)]
        read = {"read": "as in the paper", "ρ(MI, z)": ends[0], "ρ(H, z)": ends[1]}
        return {"setting": group, "depth": depth} | read

    rows = [row("a", "60%", 0.3, 0.05), row("a", "90%", 0.4, 0.0), row("b", "60%", -0.2, 0.2)]
    other = rows[0] | {"read": "another", "ρ(MI, z)": Interval(0.9, 0.8, 1.0)}
    left, right = figures.coupling(pd.DataFrame([*rows, other])).axes
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
    (ax,) = item.figure.axes
    table = item.table.set_index("tokens and heads")
    curves = {line.get_label(): line for line in ax.lines if line.get_label() in table.index}
    assert list(curves) == [
        "high MI, critical heads", "high MI, random heads†", "high MI, least critical heads†",
        "low MI, critical heads",
    ]  # fmt: skip
    for name, line in curves.items():
        assert list(line.get_xdata()) == [1, 2, 4, 8]
        assert list(line.get_ydata()) == pytest.approx(values(table.loc[name]))
    assert (ax.get_xscale(), ax.get_title()) == ("log", "tiny model,\nsquad")
    bands = [np.asarray(band.get_paths()[0].vertices)[:, 1] for band in ax.collections]
    highest = table.loc["high MI, critical heads"]
    assert max(bands[0]) == pytest.approx(max(highest[f"k = {k}"].high for k in (1, 2, 4, 8)))


def test_errors_are_found_by_answers(group, defined):
    (item,) = head_errors([group])
    rows = item.table[item.table["depth"] == "60%"].set_index("signal")
    means = defined.groupby("row").mean(numeric_only=True)
    wrong, clusters = group.wrong[means.index], [group.clusters[i] for i in means.index]
    signals = {"mean z": "z", "mass of criticality": "mass", "MI": "mi"}
    for name, column in signals.items():
        found = auroc_interval(means[column], Labelled(wrong, clusters))
        assert rows.loc[name, "AUROC"] == pytest.approx(found), name
    assert set(rows.index) == set(signals)
    assert rows.loc["mean z", "AUROC"].value > 0.5
    controls = np.column_stack([group.msp, group.entropy])[means.index]
    left = distinct_signal(means["mass"], controls, Labelled(wrong, clusters))
    row = rows.loc["mass of criticality"]
    assert row["residual AUROC"] == pytest.approx(left.residual_auroc)
    beyond = np.column_stack([controls, group.lengths[means.index]])
    added = adds_information(means["mass"], beyond, Labelled(wrong, clusters))
    assert [row["z of the test"], row["p"]] == pytest.approx([added.statistic, added.p_value])
    assert "compare nothing here with its numbers" in item.notes[0]


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
    for kl in saved["stats"]["asmi_kl_d60"]:
        kl[:] = 0
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
    assert dissected(group, 0.6).path.parent.name == "more"
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
        own = np.asarray(saved["stats"]["asmi_kl_d60"][answer], dtype=float).mean(0)
        np.testing.assert_allclose(found.mi[found.answer == answer], own)
    (item,) = causal_probe([group])
    assert item.table["tokens"].iloc[0] == 20
    (alone,) = load_run_groups([tmp_path / "part"])
    assert len(alone) == 20


def test_an_condition_over_the_first_answers_is_no_part_of_heads(tmp_path):
    """Not even if it kept more masks than heads did; its probe is that of a condition."""
    saved = content(N)
    save(tmp_path / "whole", saved)
    about = manifest(20) | {"rows": {name: own[:20] for name, own in manifest(N)["rows"].items()}}
    for name, masks in (("heads", 100), ("mlp", 150)):
        own = content(N)
        dissect(own, masks=masks)
        own |= {
            part: {key: values[:20] for key, values in own[part].items()}
            for part in ("estimations", "gen_metrics", "stats")
        }
        if name == "mlp":
            settings = own["stats"]["asmi_settings_d60"]
            own["stats"]["asmi_settings_d60"] = [used | {"perturbation": name} for used in settings]
            own = exchanged(own, perturbation=name)
        write_probe(probe(20), save(tmp_path / name, own, about))
    (group,) = load_run_groups([tmp_path / name for name in ("mlp", "heads", "whole")])
    assert [run.path.parent.name for run in group.separate_runs] == ["heads", "mlp"]
    assert [run.path.parent.name for run in runs_of_heads(group)] == ["whole", "heads"]
    assert conditions(group) == []
    assert profiles(group, 0.6).settings["num_masks"] == 100
    (item,) = causal_probe([group])
    assert set(item.table["setting"]) == {group.label, f"{group.label} (mlp)"}


def test_what_a_single_head_cannot_say_is_not_claimed(tmp_path):
    write_probe(probe(20, heads=1), save(tmp_path / "run", content(20)))
    (item,) = head_claims(load_run_groups([tmp_path / "run"]))
    said = item.table.set_index("claim")["here"]
    for start in ("The gap between", "Fragility is borne", "Where the model is confident"):
        assert said[said.index.str.startswith(start)].item() == "not measured here"


def test_claims_of_two_tokens_are_not_made(tmp_path):
    saved = content(20)
    dissect(saved)
    for row, kl in enumerate(saved["stats"]["asmi_kl_d60"]):
        kl[:, 0 if row else 2 :] = 0
    save(tmp_path / "run", saved)
    (item,) = head_claims(load_run_groups([tmp_path / "run"]))
    said = item.table.set_index("claim")["here"]
    assert said[said.index.str.startswith("With a context, MI couples")].item() == (
        "not measured here"
    )


RATES = {
    "high MI, critical heads": (N, {"high": "critical"}),
    "low MI, critical heads": (N, {"low": "critical"}),
    "high MI, random heads†": (N, {"high": "random"}),
    "low MI, random heads†": (N, {"low": "random"}),
    "high MI, least critical heads†": (N, {"high": "least"}),
    "high MI, heads of other masks†": (
        N * 7 // 6, {"high_first": "held_second", "high_second": "held_first"}
    ),
    "low MI, heads of other masks†": (
        N * 7 // 6, {"low_first": "held_second", "low_second": "held_first"}
    ),
    "high MI, matched by entropy†": (N // 3, {"high_matched": "critical"}),
    "low MI, matched by entropy†": (N // 3, {"low_matched": "critical"}),
    "high MI, top token at .9 or more†": (N // 3 - 2, {"high_confident": "critical"}),
    "low MI, top token at .9 or more†": (N // 3 - 2, {"low_confident": "critical"}),
    "high MI, random heads of another layer†": (N, {"high": "control_random"}),
}  # fmt: skip
"""Of the probe's table: tokens, and what is counted of the planted probe."""
GAPS = {
    "high MI": ("random heads", {"high": "random"}),
    "low MI": ("random heads", {"low": "random"}),
    "high MI, least critical": ("the least critical heads", {"high": "least"}),
    "high MI, heads of other masks": (
        "random heads", {"high_first": "random", "high_second": "random"}
    ),
    "high MI, matched by entropy": ("random heads", {"high_matched": "random"}),
    "high MI, top token at .9 or more": ("random heads", {"high_confident": "random"}),
    "high MI, another layer": ("random heads of another layer", {"high": "control_random"}),
}  # fmt: skip
"""The same of its differences: what critical heads are held against, those of other masks too."""


def flips(rules):
    """(tokens, K) of the planted probe, where another token than 0 is a flip."""
    planted, found = probe(N), []
    for group, rule in rules.items():
        said = np.array(planted["predicted"][rule])[planted["groups"][group]] != 0
        found.append(said.mean(-1) if said.ndim == 3 else said)
    return np.concatenate(found).astype(float)


def values(row):
    return [row[f"k = {k}"].value for k in (1, 2, 4, 8)]


def test_every_row_of_the_probe_counts_its_own_flips(group):
    (item,) = causal_probe([group])
    table = item.table.set_index("tokens and heads")
    assert list(table.index) == list(RATES)
    seen = set()
    for name, (tokens, rules) in RATES.items():
        wanted = 100 * flips(rules).mean(0)
        assert table.loc[name, "tokens"] == tokens
        assert values(table.loc[name]) == pytest.approx(wanted.tolist()), name
        seen.add((tokens, *wanted))
    assert len(seen) == len(RATES)  # the test could not fail if rows were alike


def test_every_difference_is_that_of_its_rules(group):
    (item,) = causal_differences([group])
    table = item.table.set_index("tokens")
    own = np.array(probe(N)["tokens"]["own_flips"])[:N, None]
    for name, (against, rules) in GAPS.items():
        parts = {group: f"held_{'second' if 'first' in group else 'first'}" for group in rules}
        first = parts if "other masks" in name else dict.fromkeys(rules, "critical")
        wanted = 100 * (flips(first) - flips(rules)).mean(0)
        assert table.loc[name, "against"] == against
        assert values(table.loc[name]) == pytest.approx(wanted.tolist()), name
    row = table.loc["high MI, run's own masks"]
    assert row["against"] == "the run's own masks"
    wanted = 100 * (flips({"high": "critical"}) - own).mean(0)
    assert values(row) == pytest.approx(wanted.tolist())
    assert len(table) == len(GAPS) + 1


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


def test_critical_heads_are_held_against_random_ones(group):
    (item,) = causal_differences([group])
    row = item.table.set_index("tokens").loc["high MI"]
    critical, random = (
        np.array(probe(N)["predicted"][rule])[:N].astype(float) for rule in ("critical", "random")
    )
    gap = 100 * (critical - random.mean(-1)).mean(0)
    assert [row[f"k = {k}"].value for k in (1, 2, 4, 8)] == pytest.approx(gap.tolist())
    assert row["k = 1"].low > 0
    assert row["k = 8"].value == 0  # all heads are the critical ones, too


def test_claims_have_a_line_each(group):
    (item,) = head_claims([group])
    said = item.table.set_index("claim")
    assert len(said) == 17
    assert set(said["here"]) <= {"holds", "does not", "inconclusive", "not measured here"}

    def line(start):
        (row,) = said[said.index.str.startswith(start)].itertuples()
        return row

    assert line("With a context, MI couples").here == "holds"
    assert "tiny model, squad: holds (+0." in line("With a context, MI couples").where
    assert line("Criticality is spread").here == "does not"  # one head was planted
    assert line("One critical head").here == "holds"
    assert line("The lowest-MI tokens").here == "inconclusive"  # none of 60 is not never
    assert "at most 0.0 % [0.0, " in line("The lowest-MI tokens").where
    assert line("The gap between").here == "inconclusive"  # the first head decides all
    assert line("Fragility is borne").here == "holds"
    assert "k = 8" not in line("Fragility is borne").where  # there are no other heads
    assert line("Where the model is confident").here == "holds"
    assert line("With a context, fragility couples").here != "not measured here"
    for start in (
        "On recall ρ",
        "On recall it does not",
        "On BabiQA",
        "From k = 2",
        "The signal does not",
        "Matched perturbations",
    ):
        assert line(start).here == "not measured here"


@pytest.mark.parametrize(
    ("spoilt", "outcome", "named"),
    [
        ({"random": "critical"}, "inconclusive", "high MI inconclusive"),
        ({"least": "critical"}, "inconclusive", "high MI, least critical inconclusive"),
        ({"least": "random", "critical": "least"}, "does not", "high MI, least critical does not"),
        ({"held_first": "least", "held_second": "least"}, "does not",
         "high MI, heads of other masks does not"),
        ({"control_random": None}, "inconclusive", "high MI, another layer not measured here"),
        ({"control_random": "critical"}, "inconclusive", "high MI, another layer inconclusive"),
        ({"own_flips": 0.9}, "does not", "high MI, run's own masks does not"),
        ({"high_matched": None}, "inconclusive", "matched by entropy not measured here"),
        ({"high_confident": None}, "inconclusive", "at .9 or more not measured here"),
    ],
)  # fmt: skip
def test_identifiable_heads_need_every_control(tmp_path, spoilt, outcome, named):
    """And the claim says which one it is that does not agree."""
    planted = probe(N)
    predicted = dict(planted["predicted"])
    for name, other in spoilt.items():
        if name == "own_flips":
            planted["tokens"][name] = [other] * 2 * N
        elif name in planted["groups"]:
            del planted["groups"][name]
        elif other is None:
            del planted["predicted"][name]
        else:
            planted["predicted"][name] = predicted[other]
    write_probe(planted, save(tmp_path / "run", content(N)))
    (item,) = head_claims(load_run_groups([tmp_path / "run"]))
    said = item.table.set_index("claim")
    (row,) = said[said.index.str.startswith("Fragility is borne")].itertuples()
    assert row.here == outcome
    assert named in row.where


@pytest.mark.slow
def test_claims_on_recall_are_read_from_closed_books(run, tmp_path):
    saved = content(N, shift=0.5)
    dissect(saved, strength=0)
    file = save(tmp_path / "closed", saved, manifest(N, "asmi_squad_closed_book", closed=True))
    write_probe(probe(N), file)
    (item,) = head_claims(load_run_groups([run[0], tmp_path / "closed"]))
    said = item.table.set_index("claim")["here"]
    for start in ("On recall ρ", "On recall it does not"):
        recall = said[said.index.str.startswith(start)].item()
        assert recall in ("inconclusive", "does not")  # nothing was planted there
    assert said[said.index.str.startswith("From k = 2")].item() == "inconclusive"  # the same probe
    assert said[said.index.str.startswith("The signal does not")].item() != "not measured here"


def test_runs_without_heads_have_no_claims(tmp_path):
    save(tmp_path / "run", content(20))
    (gap,) = head_claims(load_run_groups([tmp_path / "run"]))
    assert isinstance(gap, MissingItem)


def test_a_probe_is_read_as_it_was_written(tmp_path):
    manager = tmp_path / "ue_manager_seed1"
    assert read_probe(manager) is None
    written = write_probe(probe(5), manager)
    assert written == probe_path(manager) == tmp_path / "asmi_probe_seed1.json"
    found = read_probe(manager)
    assert found.k == (1, 2, 4, 8)
    assert np.isnan(found.criticality[:, -1]).all()
    assert found.flipped("random", "high").shape == (5, 4)
    assert np.isnan(found.flipped("held_first", "high")[1]).all()
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
    assert findings(groups)
    items = [item for make in every_report_item() for item in make(groups)]
    gaps = [item.reason for item in items if isinstance(item, MissingItem)]
    assert any("asmi_probe_seed1.json is damaged" in reason for reason in gaps)
    assert len(items) - len(gaps) > 15
