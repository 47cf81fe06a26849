"""Scores of hand-made statistics, and statistics that an estimator refuses."""

import numpy as np
import pytest

from lm_polygraph_asmi import ASMI, AdaptASMI, SemASMI
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.estimators.base import MaskedHeadsEstimator

USED = ASMIConfig(num_masks=40, mask_rate=0.15).to_dict("masks") | {"num_heads": 32}
MI = [np.array([0.4, 0.2, 0.0]), np.array([0.1])]
AGREEMENT = [np.array([0.5, 1.0, 1.0]), np.array([0.25])]
ALPHA, SOFT = 1 / (1 + np.exp([-3, 2])), 1 / (1 + np.exp(-1.5))


def stats(depth: float = 0.6, mi=MI, closing: bool = True, **settings) -> dict:
    used = USED | {"depth": depth} | settings
    rows = zip(mi, AGREEMENT, strict=True)
    return {
        "asmi": [{depth: {"mi": own, "agreement": a, "settings": used}} for own, a in rows],
        "asmi_diversity_second_last": [0.0, 0.5],
        "asmi_closing": [closing, closing],
    }


class Least(MaskedHeadsEstimator):
    """An estimator of a user's."""

    symbol = "Least"

    def _token_scores(self, example):
        return -example["agreement"]


@pytest.mark.parametrize(
    ("estimator", "found", "expected"),
    [
        (ASMI(), stats(), [0.2, 0.1]),
        (ASMI(**ASMIConfig().to_dict()), stats(), [0.2, 0.1]),  # as a node `asmi`
        (SemASMI(), stats(), [0.2 / 3, 0.075]),
        (AdaptASMI(), stats(), [(0.4 * (1 - ALPHA[0] / 2) + 0.2 * (1 - ALPHA[0])) / 3,
                                0.1 * (1 - ALPHA[1] / 4)]),
        (AdaptASMI(tau=0.5, beta=3.0), stats(), [(0.4 * (1 - SOFT / 2) + 0.2 * (1 - SOFT)) / 3,
                                                 0.1 * (1 - 0.5 / 4)]),
        # A gate as steep as a step: of the first alone.
        (AdaptASMI(tau=0.25, beta=1e6), stats(), [0.2 / 3, 0.1]),
        # The closing token is left out, and never the whole answer.
        (ASMI(closing_token=False), stats(), [0.3, 0.1]),
        (ASMI(closing_token=False), stats(closing=False), [0.2, 0.1]),
        (ASMI(aggregation="sum"), stats(), [0.6, 0.1]),
        (ASMI(aggregation="max"), stats(), [0.4, 0.1]),
        # Another score of the tokens, from other fields.
        (Least(aggregation="max"), stats(), [-0.5, -0.25]),
        # A depth that was computed is the one that was written.
        (ASMI(depth=0.1 * 6), stats(), [0.2, 0.1]),
        # Settings that are not given follow the heads.
        (ASMI(num_masks=40, mask_rate=0.15), stats(num_heads=9), [0.2, 0.1]),
        (ASMI(), stats(num_heads=9, num_masks=56, mask_rate=0.09), [0.2, 0.1]),
    ],
)  # fmt: skip
def test_scores_by_hand(estimator, found, expected):
    np.testing.assert_allclose(estimator(found), expected)


def test_each_depth_reads_its_own_statistics():
    deeper = stats(0.9, mi=[3 * values for values in MI])["asmi"]
    both = stats() | {"asmi": [a | b for a, b in zip(stats()["asmi"], deeper, strict=True)]}
    np.testing.assert_allclose(ASMI(depth=0.9)(both), 3 * ASMI(depth=0.6)(both))
    with pytest.raises(KeyError, match=r"0\.5, only 0\.6, 0\.9"):
        ASMI(depth=0.5)(both)


@pytest.mark.parametrize(
    ("estimator", "found", "word"),
    [
        *((ASMI(**{name: value}), stats(), "same settings") for name, value in (
            ("top_k", 256), ("num_masks", 80), ("mask_rate", 0.1), ("seed", 1),
            ("scope", "response"), ("mask_sampler", "balanced"),
        )),
        *((ASMI(), stats(**used), "same settings") for used in (
            {"num_masks": 80}, {"mask_rate": 0.2}, {"num_heads": 9},
        )),
        *((ASMI(), stats(mi=[np.array([value]), np.array([0.1])]), "finite")
          for value in (np.nan, np.inf, -np.inf)),
    ],
)  # fmt: skip
def test_statistics_that_are_refused(estimator, found, word):
    with pytest.raises(ValueError, match=word):
        estimator(found)


@pytest.mark.parametrize(
    ("estimator", "needed"),
    [
        (ASMI(), ["asmi", "asmi_closing"]),
        (SemASMI(), ["asmi", "asmi_closing"]),
        (AdaptASMI(), ["asmi", "asmi_closing", "asmi_diversity_second_last"]),
        (AdaptASMI(gate_token="last"), ["asmi", "asmi_closing", "asmi_diversity"]),
    ],
)
def test_a_statistic_left_out_of_the_config(estimator, needed):
    assert estimator.stats_dependencies == needed
    for missing in needed:
        found = stats() | {"asmi_diversity": [0.0, 0.5]}
        found.pop(missing)
        with pytest.raises(KeyError, match=f"'{missing}' is missing.*stat_calculators"):
            estimator(found)
