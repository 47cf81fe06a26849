import statistics

import numpy as np
import pytest

from lm_polygraph_asmi.analysis.cost import phase_seconds
from lm_polygraph_asmi.saved.manifest import PHASES, seconds_by_phase
from lm_polygraph_asmi.saved.names import SECONDS


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
    found = phase_seconds(seconds_by_phase(stats | {"asmi_mi_d60": [np.ones(3)] * 12}))
    assert {name.removeprefix("seconds_") for name in SECONDS} | {"asmi", "diversity"} == set(found)
    assert [found[phase].median for phase in PHASES.values()] == list(range(len(PHASES)))


def test_phases_not_saved_or_too_short_are_left_out():
    assert phase_seconds({}) == {}
    stats = {"asmi_seconds": [1.0] * 10, "seconds_nli": [], "seconds_greedy": [1.0] * 11}
    assert list(phase_seconds(seconds_by_phase(stats))) == ["greedy"]
