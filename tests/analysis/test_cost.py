import numpy as np
import pytest

from lm_polygraph_asmi.analysis.cost import WARM_UP, method_seconds, phase_seconds
from lm_polygraph_asmi.results.manifest import PHASES, seconds_by_phase
from lm_polygraph_asmi.results.names import SECONDS


def test_every_phase_a_run_can_save():
    """One that is too short is left out."""
    stats = {name: [float(i)] * 12 for i, name in enumerate(PHASES)}
    found = phase_seconds(seconds_by_phase(stats | {"asmi": [{0.6: {}}] * 12}))
    assert {name.removeprefix("seconds_") for name in SECONDS} | {"asmi", "diversity"} == set(found)
    assert [found[phase].median for phase in PHASES.values()] == list(range(len(PHASES)))
    short = {"asmi_seconds": [1.0] * 10, "seconds_nli": [], "seconds_greedy": [1.0] * 11}
    assert list(phase_seconds(seconds_by_phase(short))) == ["greedy"]


def test_a_method_costs_the_median_of_its_sums():
    """Where phases take turns in being slow, a sum of medians is another number."""
    rng = np.random.default_rng(3)
    phases = ("greedy", "samples", "nli", "asmi", "diversity")
    seconds = {phase: rng.exponential(size=31).tolist() for phase in phases}
    by_hand = {
        "MSP": ["greedy"],
        "Semantic Entropy": ["greedy", "samples", "nli"],
        "Sem-ASMI": ["greedy", "asmi"],
        "Adapt-ASMI": ["greedy", "samples", "asmi", "diversity"],
        "ASMI alone, marginal": ["asmi"],
    }
    expected = {
        method: (pytest.approx(np.median(sum(np.array(seconds[p][WARM_UP:]) for p in parts))), 21)
        for method, parts in by_hand.items()
    }
    assert method_seconds(seconds) == expected
    # A method whose phases were not all measured is left out.
    seconds = {"greedy": [1.0] * 12, "asmi": [2.0] * 12, "samples": [3.0] * 11, "nli": [1.0] * 12}
    assert list(method_seconds(seconds)) == ["MSP", "Sem-ASMI", "ASMI alone, marginal"]
    assert method_seconds({"greedy": [1.0] * WARM_UP}) == {}
