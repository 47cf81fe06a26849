"""A small part of scripts/simulate_guarantee.py: its levels, and that its gate is the package's."""

import numpy as np
import pytest
from simulate_guarantee import KINDS, answers, gate_case, looks

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions import RiskThreshold, risk_gate
from tests.analysis.simulation import keys, monte_carlo_error


@pytest.mark.parametrize("size", [1, 3])
def test_looks_are_those_of_the_gate(size):
    score, wrong = answers(np.random.default_rng(0), 40, size)
    guarantee = RiskThreshold(0.5, 0.7, 0.1, 0.2, 0.9, 0.4, 100 * size, 100, size)
    new = Labelled(wrong.ravel(), keys(40, size))
    gate = risk_gate(guarantee, score.ravel() <= 0.5, new)
    for above, p_value in ((True, gate.p_violated), (False, gate.p_holds)):
        assert looks(score, wrong, 0.5, 0.2, above)[-1] == pytest.approx(p_value)


@pytest.mark.parametrize(("clusters", "size"), [(500, 1), (125, 8)])
def test_levels_of_all_looks(clusters, size):
    """Where the risk is exact, both outcomes keep their level: three standard errors of 60."""
    line = gate_case(clusters, size, 0.2, 0.9, 60, **KINDS[0])
    for outcome, allowed in (("violated", 0.05), ("holds", 0.1)):
        share = line[f"at the risk: {outcome} at any look, %"] / 100
        assert share <= allowed + 3 * monte_carlo_error(allowed, 60)
    # The drift doubles the error rate: such a gate is worth running.
    assert line["after drift: violated at any look, %"] > 50
