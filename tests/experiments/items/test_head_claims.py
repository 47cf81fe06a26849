"""Every line of the paper's claims on heads, from planted intervals: what it reads, of which
settings, and which way round. That the intervals are right is for the tests of what they are read
from."""

from types import SimpleNamespace

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Interval
from lm_polygraph_asmi.experiments.analysis import Verdict
from lm_polygraph_asmi.experiments.analysis.coupling import Coupling
from lm_polygraph_asmi.experiments.items import claims
from lm_polygraph_asmi.experiments.items.probe import CONTROLS, ROWS

UP, WIDE, DOWN = Interval(0.3, 0.1, 0.5), Interval(0.0, -0.2, 0.2), Interval(-0.3, -0.5, -0.1)
MANY, SOME, FEW = Interval(50, 40, 60), Interval(20, 5, 45), Interval(0.2, 0, 0.8)
"""Flip rates, percent."""
CONFIDENT = "high MI, top token at .9 or more"
CRITICAL = {side: f"{side} MI, critical heads" for side in ("high", "low")}
OPEN, RECALL, BABI = "squad", "squad_closed", "babiqa"
K = (1, 2, 4, 8)


def group(dataset):
    return SimpleNamespace(
        dataset=dataset, label=dataset, model="tiny", grounded=dataset != RECALL, depth=0.6,
        separate_runs=(), answers=None,
        need=lambda *names: names,
    )  # fmt: skip


@pytest.fixture
def line(monkeypatch):
    """A line's outcome if (setting, quantity) has a planted value, all else inconclusive."""

    def said(start, planted, verdicts=()):
        groups = {name: group(name) for name in (OPEN, RECALL, BABI)}

        def value(own, what, other=WIDE):
            return planted.get((own.dataset, what), other)

        def coupled(own, depth):
            assert depth == 0.6
            parts = [value(own, what) for what in ("MI", "H", "difference")]
            other = Coupling(UP, DOWN, UP, UP, 9, 9)
            return {"as in the paper": Coupling(*parts, UP, 9, 9), "another reading": other}

        def rates(found, parts):
            (row,) = (name for name, own in ROWS.items() if own == parts)
            of_k = [value(found.group, f"{row} {k}", value(found.group, row, SOME)) for k in K]
            return 9, of_k

        def prr(scores, *_):
            assert scores == {"sem": "u_sem", "msp": "msp"}
            return {}, {("sem", "msp"): value(groups[RECALL], "Sem-ASMI minus MSP")}

        probe = SimpleNamespace(k=K, criticality=np.ones((9, 16)), settings={"mask_rate": 0.15})
        for called, found in {
            "coupled": coupled, "dissected_depths": lambda _: [0.6, 0.9],
            "sharpened": lambda own: value(own, "sharpened"),
            "excess_heads": lambda own, depth: value(own, f"excess {depth:.0%}"),
            "profiles": lambda *_: SimpleNamespace(heads=np.ones(9), high=np.ones(9, dtype=bool)),
            "error_detection": lambda own, _: {
                "mean z": Interval(*(0.5 + end for end in value(own, "errors"))),
                "MI": Interval(0.9, 0.8, 1.0), "mass": Interval(0.1, 0.0, 0.2),
            },
            "prr_intervals": prr,
            "probed": lambda own: [SimpleNamespace(group=own, condition="heads", probe=probe)],
            "rates": rates,
            "widenings": lambda found, most: [value(found.group, "widening")] * (most // 4),
            "differences": lambda found, pair: (9, [value(found.group, pair)] * len(K)),
            "verdicts_on": lambda _: [
                (SimpleNamespace(group=groups[name], symbol="ASMI"), Verdict(*how, 0.01, 0.9, None))
                for name, how in verdicts
            ],
            "prr_of_heads": lambda _: UP,
        }.items():  # fmt: skip
            monkeypatch.setattr(claims, called, found)
        (item,) = claims.head_claims(list(groups.values()))
        assert len(item.table) == 17
        table = item.table.set_index("claim")["here"]
        return table[table.index.str.startswith(start)].item()

    return said


READINGS = [
    ("With a context, MI couples", "MI", OPEN, "holds", "does not"),
    ("On recall ρ", "MI", RECALL, "does not", "holds"),
    ("With a context, MI tracks", "difference", OPEN, "holds", "does not"),
    ("The coupling sharpens", "sharpened", OPEN, "holds", "does not"),
    ("Criticality is spread", "excess 60%", OPEN, "holds", "does not"),
    ("With a context, fragility couples", "errors", OPEN, "holds", "does not"),
    ("On recall it does not", "errors", RECALL, "does not", "inconclusive"),
    ("The gap between", "widening", OPEN, "holds", "does not"),
    ("Where the model is confident", CONFIDENT, OPEN, "holds", "does not"),
    ("The signal does not", "Sem-ASMI minus MSP", RECALL, "does not", "holds"),
]
"""Line, what it reads, a setting of those that it reads, and its outcome above and below zero."""


@pytest.mark.parametrize(("start", "what", "own", "above", "below"), READINGS)
def test_a_line_reads_its_own_interval(line, start, what, own, above, below):
    context = "context" in start or start.startswith("The coupling")
    read = (OPEN, BABI) if context else (RECALL,) if own == RECALL else (OPEN, BABI, RECALL)
    assert line(start, {}) == "inconclusive"
    for value, outcome in ((UP, above), (DOWN, below)):
        assert line(start, {(name, what): value for name in read}) == outcome
        others = {(name, what): value for name in {OPEN, BABI, RECALL} - {*read}}
        assert line(start, others) == "inconclusive"
    # One setting that says the opposite is told, and one that leaves it open.
    if len(read) > 1:
        mixed = {(name, what): UP for name in read} | {(own, what): DOWN}
        assert line(start, mixed) == below
        del mixed[own, what]
        assert line(start, mixed) == "inconclusive"


def test_babi_is_underpowered_where_its_interval_holds_zero(line):
    assert line("On BabiQA", {(OPEN, "MI"): UP, (RECALL, "MI"): UP}) == "holds"
    assert line("On BabiQA", {(BABI, "MI"): UP}) == "does not"
    assert line("On BabiQA", {(BABI, "MI"): DOWN}) == "does not"


def test_concentration_is_compared_from_the_shallow_to_the_deep_layer(line):
    for ends, outcome in (
        ((UP, DOWN), "holds"),
        ((DOWN, UP), "does not"),
        ((UP, UP), "inconclusive"),
    ):
        planted = {
            (name, f"excess {depth}"): end
            for name in (OPEN, BABI) for depth, end in zip(("60%", "90%"), ends, strict=True)
        }  # fmt: skip
        assert line("Criticality concentrates", planted) == outcome


def test_one_head_is_compared_between_high_and_low_tokens(line):
    every = (OPEN, BABI, RECALL)
    for high, low, outcome in ((MANY, FEW, "holds"), (FEW, MANY, "does not")):
        planted = {(name, f"{CRITICAL['high']} 1"): high for name in every}
        planted |= {(name, f"{CRITICAL['low']} 1"): low for name in every}
        assert line("One critical head", planted) == outcome


def test_low_tokens_stay_where_none_of_their_rates_is_above_a_percent(line):
    planted = {(name, CRITICAL["low"]): FEW for name in (OPEN, BABI, RECALL)}
    assert line("The lowest-MI tokens", planted) == "holds"
    assert line("The lowest-MI tokens", planted | {(OPEN, f"{CRITICAL['low']} 4"): MANY}) == (
        "does not"
    )


def test_flips_on_recall_are_compared_from_two_heads_on(line):
    recall, opened = ((name, CRITICAL["high"]) for name in (RECALL, OPEN))
    babi = (BABI, CRITICAL["high"])
    one = {(RECALL, f"{CRITICAL['high']} 1"): SOME, (OPEN, f"{CRITICAL['high']} 1"): SOME}
    most = {recall: MANY, opened: FEW, babi: FEW}
    assert line("From k = 2", most | one) == "holds"
    assert line("From k = 2", {recall: FEW, opened: MANY, babi: MANY} | one) == "does not"
    assert line("From k = 2", most | {babi: SOME}) == "inconclusive"


def test_identifiable_heads_are_read_from_all_controls(line):
    every = {(name, pair): UP for name in (OPEN, BABI, RECALL) for pair in CONTROLS}
    assert line("Fragility is borne", every) == "holds"
    for pair in CONTROLS:
        assert line("Fragility is borne", every | {(OPEN, pair): WIDE}) == "inconclusive", pair
        assert line("Fragility is borne", every | {(OPEN, pair): DOWN}) == "does not", pair


def test_matched_perturbations_are_the_verdict_s(line):
    start = "Matched perturbations"
    for outcome, said in (
        ("special", "holds"), ("reproduced", "does not"), ("inconclusive", "inconclusive"),
    ):  # fmt: skip
        assert line(start, {}, [(OPEN, (outcome, None))]) == said
        assert line(start, {}, [(RECALL, (outcome, None))]) == "not measured here"
