"""Adjusted p-values against another implementation."""

import numpy as np
from statsmodels.stats.multitest import multipletests

from lm_polygraph_asmi.analysis import holm


def test_holm_is_statsmodels():
    rng = np.random.default_rng(0)
    p_values = rng.random(20) ** 3
    expected = multipletests(p_values, method="holm")[1]
    np.testing.assert_allclose(holm(p_values), expected)
    with_gaps = np.insert(p_values, 4, np.nan)
    found = holm(with_gaps)
    assert np.isnan(found[4])
    np.testing.assert_allclose(np.delete(found, 4), expected)
    assert holm([0.04]) == [0.04]
