import numpy as np
import pytest
from statsmodels.stats.power import NormalIndPower

from lm_polygraph_asmi.analysis import sample_size
from tests.analysis.simulation import monte_carlo_error


def test_sizes_are_those_of_a_z_test():
    """One mean against zero, a cluster an observation: statsmodels, for one sample."""
    found = sample_size(0.03, 0.05, clusters=100, questions=450)
    spread = 0.05 * np.sqrt(100)
    expected = NormalIndPower(ddof=0).solve_power(
        effect_size=0.03 / spread, alpha=0.05, power=0.8, ratio=0
    )
    assert found.clusters == np.ceil(expected)
    assert found.questions == np.ceil(found.clusters * 4.5)
    assert found.detectable == pytest.approx(0.05 * (1.959964 + 0.841621), rel=1e-5)
    # What the pilot can find needs the pilot's size.
    assert sample_size(found.detectable - 1e-9, 0.05, 100, 450).clusters == 101


def test_the_planned_size_has_the_power():
    rng, spread = np.random.default_rng(0), 0.4
    pilot_error = spread / np.sqrt(50)
    size = sample_size(0.1, pilot_error, 50, 50).clusters
    means = rng.normal(0.1, spread, size=(4000, size)).mean(1)
    found = (np.abs(means) > 1.959964 * spread / np.sqrt(size)).mean()
    assert found == pytest.approx(0.8, abs=3 * monte_carlo_error(0.8, 4000) + 0.01)
