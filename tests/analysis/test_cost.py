import statistics

import numpy as np
import pytest

from lm_polygraph_asmi.analysis.cost import method_seconds, phase_seconds
from lm_polygraph_asmi.results.manifest import PHASES, seconds_by_phase
from lm_polygraph_asmi.results.names import SECONDS


def test_warm_up_is_left_out():
    seconds = [100.0] * 10 + np.random.default_rng(0).random(21).tolist()
    found = phase_seconds({"asmi": seconds})
    assert found == {"asmi": (pytest.approx(statistics.median(seconds[10:])), 21)}
    # The tenth answer is warm-up, the eleventh is not.
    edge = phase_seconds({"asmi": [100.0] * 10 + [1.0]})
    assert edge["asmi"] == (1.0, 1)
    everything = phase_seconds({"asmi": [100.0] * 10 + [1.0]}, warm_up=0)
    assert everything["asmi"] == (100.0, 11)


def test_a_slow_answer_moves_a_median_little():
    found = phase_seconds({"greedy": [1.0, 2.0, 3.0, 500.0]}, warm_up=0)
    assert found["greedy"].median == 2.5


def test_every_phase_a_run_can_save():
    stats = {name: [float(i)] * 12 for i, name in enumerate(PHASES)}
    found = phase_seconds(seconds_by_phase(stats | {"asmi": [{0.6: {}}] * 12}))
    assert {name.removeprefix("seconds_") for name in SECONDS} | {"asmi", "diversity"} == set(found)
    assert [found[phase].median for phase in PHASES.values()] == list(range(len(PHASES)))


def test_phases_not_saved_or_too_short_are_left_out():
    assert phase_seconds({}) == {}
    stats = {"asmi_seconds": [1.0] * 10, "seconds_nli": [], "seconds_greedy": [1.0] * 11}
    assert list(phase_seconds(seconds_by_phase(stats))) == ["greedy"]


def test_a_method_costs_the_median_of_its_sums():
    """Where phases take turns in being slow, a sum of medians is another number."""
    rng = np.random.default_rng(3)
    phases = ("greedy", "samples", "nli", "asmi", "diversity")
    seconds = {phase: rng.exponential(size=31).tolist() for phase in phases}
    found = method_seconds(seconds, warm_up=4)
    by_hand = {
        "MSP": ["greedy"],
        "Semantic Entropy": ["greedy", "samples", "nli"],
        "Sem-ASMI": ["greedy", "asmi"],
        "Adapt-ASMI": ["greedy", "samples", "asmi", "diversity"],
        "ASMI alone, marginal": ["asmi"],
    }
    assert list(found) == list(by_hand)
    for method, parts in by_hand.items():
        sums = [sum(seconds[part][i] for part in parts) for i in range(4, 31)]
        assert found[method] == (pytest.approx(np.median(sums)), 27)
    medians = sum(np.median(seconds[part][4:]) for part in by_hand["Adapt-ASMI"])
    assert found["Adapt-ASMI"].median != pytest.approx(medians)


def test_a_method_whose_phases_were_not_all_measured_is_left_out():
    seconds = {"greedy": [1.0] * 12, "asmi": [2.0] * 12, "samples": [3.0] * 11, "nli": [1.0] * 12}
    assert list(method_seconds(seconds)) == ["MSP", "Sem-ASMI", "ASMI alone, marginal"]
    assert method_seconds(seconds, warm_up=12) == {}
