"""The gate: against plain loops, against exact probabilities of all looks, and its bad input."""

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions import RiskThreshold, risk_gate
from lm_polygraph_asmi.decisions.gate import LEVEL, SMALL_BETS
from lm_polygraph_asmi.decisions.risk_control import BETS
from tests.analysis.simulation import keys


def guaranteed(risk=0.1, confidence=0.9, clusters=500, largest=1):
    return RiskThreshold(
        0.3, 0.8, 0.04, risk, confidence, 0.2, clusters * largest, clusters, largest
    )


def purse(rows, risk, largest, above):
    """The bet in plain loops: a gambler for every stake, cluster after cluster; 1 / capital."""
    bets = SMALL_BETS if above else BETS
    worst = (risk if above else 1 - risk) * largest
    purses = [1.0] * len(bets)
    for key in dict.fromkeys(key for key, _, _ in rows):
        of_cluster = [(accepted, wrong) for k, accepted, wrong in rows if k == key][:largest]
        excess = sum(wrong - risk for accepted, wrong in of_cluster if accepted)
        for number, bet in enumerate(bets):
            purses[number] *= 1 + (1 if above else -1) * bet * excess / worst
    return min(1.0, len(purses) / sum(purses))


@pytest.mark.parametrize("largest", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_gate_is_that_of_plain_loops(seed, largest):
    rng = np.random.default_rng(seed)
    names = [str(key) for key in rng.integers(0, 40, size=90)]  # up to six answers in a cluster
    accepted, wrong = rng.random(90) < 0.7, rng.random(90) < (0.02, 0.2, 0.5)[seed]
    rows = list(zip(names, accepted, wrong, strict=True))
    guarantee = guaranteed(risk=0.2, largest=largest)
    gate = risk_gate(guarantee, accepted, Labelled(wrong, names))
    assert gate.p_holds == pytest.approx(purse(rows, 0.2, largest, above=False))
    assert gate.p_violated == pytest.approx(purse(rows, 0.2, largest, above=True))
    assert gate.answers == sum(min(names.count(key), largest) for key in set(names))
    assert gate.left_out == 90 - gate.answers > 0
    expected = "violated" if gate.p_violated <= 0.05 else "inconclusive"
    assert gate.outcome == ("holds" if gate.p_holds <= 0.1 else expected)

    error_rate = gate.errors / gate.accepted

    def of_end(risk, above):
        return purse(rows, risk, largest, above)

    assert gate.low - 1e-3 < error_rate < gate.high + 1e-3
    assert of_end(gate.high + 1e-3, False) < 0.1 < of_end(gate.high - 1e-3, False)
    if gate.low > 1e-3:
        assert of_end(gate.low - 1e-3, True) < 0.05 < of_end(gate.low + 1e-3, True)


@pytest.mark.parametrize(("risk", "confidence"), [(0.05, 0.95), (0.2, 0.9)])
def test_exact_probability_that_any_look_errs(risk, confidence):
    """Single answers at exactly the risk, with a look after each of 200: by all paths of errors."""
    guarantee = guaranteed(risk, confidence)
    for outcome, allowed in (("violated", LEVEL), ("holds", 1 - confidence)):
        alive, erred = {0: 1.0}, 0.0
        for n in range(1, 201):
            after: dict[int, float] = {}
            for errors, chance in alive.items():
                after[errors] = after.get(errors, 0) + chance * (1 - risk)
                after[errors + 1] = after.get(errors + 1, 0) + chance * risk
            crossed = {
                errors
                for errors, chance in after.items()
                if chance > 1e-9 and look(guarantee, n, errors) == outcome
            }
            erred += sum(after[errors] for errors in crossed)
            alive = {errors: chance for errors, chance in after.items() if errors not in crossed}
        assert allowed / 10 < erred <= allowed  # far below it, the test would have no power


def look(guarantee, n, errors, memo={}):  # noqa: B006
    """Outcome by the capital of n single answers, which depends on the number of errors alone."""
    key = guarantee.risk, guarantee.confidence, n, errors
    if key not in memo:
        risk, right = guarantee.risk, n - errors
        above = np.mean((1 + SMALL_BETS * (1 - risk) / risk) ** errors * (1 - SMALL_BETS) ** right)
        below = np.mean((1 - BETS) ** errors * (1 + BETS * risk / (1 - risk)) ** right)
        memo[key] = "inconclusive"
        if above >= 1 / LEVEL:
            memo[key] = "violated"
        elif below >= 1 / (1 - guarantee.confidence) * (1 - 1e-12):
            memo[key] = "holds"
    return memo[key]


@pytest.mark.parametrize(("n", "errors"), [(60, 0), (60, 3), (80, 20), (5, 5)])
def test_single_answers_depend_on_their_number_of_errors_alone(n, errors):
    guarantee = guaranteed()
    wrong = np.arange(n) < errors
    for shuffled in (wrong, wrong[::-1]):
        gate = risk_gate(guarantee, np.ones(n), Labelled(shuffled, keys(n, 1)))
        assert gate.outcome == look(guarantee, n, errors)


@pytest.mark.parametrize("largest", [1, 4])
@pytest.mark.parametrize(("risk", "confidence"), [(0.05, 0.95), (0.3, 0.8)])
def test_least_number_of_accepted_answers(risk, confidence, largest):
    guarantee = guaranteed(risk, confidence, largest=largest)

    def outcome(n):
        answers = Labelled([0] * (n + 2), keys(n + 2, 1))
        return risk_gate(guarantee, [1] * n + [0, 0], answers)

    least = outcome(1).least_holds
    assert (outcome(least).outcome, outcome(least - 1).outcome) == ("holds", "inconclusive")
    assert f"At least {least} accepted answers are needed for holds" in str(outcome(1))
    assert "needed" not in str(outcome(least))
    assert "none of 2 answers was accepted" in str(outcome(0))


def test_clusters_of_an_unrecorded_size_are_as_large_as_the_largest_here():
    guarantee = RiskThreshold(0.3, 0.8, 0.04, 0.1, 0.9, 0.2, 900, 300)
    gate = risk_gate(guarantee, np.ones(6), Labelled(np.zeros(6), list("aaabbc")))
    assert (gate.answers, gate.left_out) == (6, 0)
    assert gate.p_holds == pytest.approx(
        purse([(key, True, False) for key in "aaabbc"], 0.1, 3, above=False)
    )
