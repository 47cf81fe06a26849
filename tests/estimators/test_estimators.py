import math

import numpy as np
import pytest

from lm_polygraph_asmi import ASMI, AdaptASMI, SemASMI
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.estimators import adapt_asmi, asmi, sem_asmi

USED = ASMIConfig(num_masks=40, mask_rate=0.15).to_dict("masks") | {"num_heads": 32}
MI = [np.array([0.4, 0.2, 0.0]), np.array([0.1])]
AGREEMENT = [np.array([0.5, 1.0, 1.0]), np.array([0.25])]


def stats(depth: float = 0.6, mi=MI, **settings) -> dict:
    used = USED | {"depth": depth} | settings
    return {
        "asmi": [
            {depth: {"mi": own, "agreement": a, "settings": used}}
            for own, a in zip(mi, AGREEMENT, strict=True)
        ],
        "asmi_diversity_second_last": [0.0, 0.5],
        "asmi_closing": [True, True],
    }


def test_asmi_is_the_mean_of_mi():
    np.testing.assert_allclose(ASMI()(stats()), [0.2, 0.1])


def test_sem_asmi_discounts_agreement():
    np.testing.assert_allclose(SemASMI()(stats()), [0.2 / 3, 0.075])


def test_adapt_asmi_gates_the_discount():
    alpha = [1 / (1 + math.exp(-3)), 1 / (1 + math.exp(2))]
    expected = [
        (0.4 * (1 - alpha[0] * 0.5) + 0.2 * (1 - alpha[0])) / 3,
        0.1 * (1 - alpha[1] * 0.25),
    ]
    np.testing.assert_allclose(AdaptASMI()(stats()), expected)


def test_adapt_asmi_lies_between_the_other_two():
    low, middle, high = SemASMI()(stats()), AdaptASMI()(stats()), ASMI()(stats())
    assert (low <= middle).all()
    assert (middle <= high).all()


def test_more_disagreement_is_more_uncertain():
    more = stats(mi=[2 * values for values in MI])
    for estimator in (ASMI(), SemASMI(), AdaptASMI()):
        assert (estimator(more) > estimator(stats())).all()


def test_closing_token_can_be_left_out_but_never_the_whole_answer():
    np.testing.assert_allclose(ASMI(closing_token=False)(stats()), [0.3, 0.1])
    unfinished = stats() | {"asmi_closing": [False, False]}
    np.testing.assert_allclose(ASMI(closing_token=False)(unfinished), [0.2, 0.1])


def test_each_depth_reads_its_own_statistics():
    deeper = stats(0.9, mi=[3 * values for values in MI])["asmi"]
    both = stats() | {"asmi": [a | b for a, b in zip(stats()["asmi"], deeper, strict=True)]}
    np.testing.assert_allclose(ASMI(depth=0.9)(both), 3 * ASMI(depth=0.6)(both))
    with pytest.raises(KeyError, match=r"no depth 0\.5, only 0\.6, 0\.9: add it"):
        ASMI(depth=0.5)(both)


def test_a_depth_that_was_computed_is_the_one_that_was_written():
    assert 0.1 * 6 != 0.6
    np.testing.assert_allclose(ASMI(depth=0.1 * 6)(stats()), [0.2, 0.1])


def test_names_carry_every_setting_that_changes_the_score():
    assert str(ASMI()) == "ASMI (60%, K=64)"
    assert str(SemASMI(depth=0.9)) == "Sem-ASMI (90%, K=64)"
    assert str(AdaptASMI(tau=0.5)) == "Adapt-ASMI (60%, K=64, tau=0.5)"
    variations = [
        {},
        {"depth": 0.7},
        {"depth": 0.625},
        {"top_k": 256},
        {"num_masks": 80},
        {"mask_rate": 0.1},
        {"mask_sampler": "balanced"},
        {"scope": "response"},
        {"seed": 1},
        {"closing_token": False},
        {"aggregation": "sum"},
        {"aggregation": "max"},
    ]
    names = {str(variant(**v)) for variant in (ASMI, SemASMI, AdaptASMI) for v in variations}
    names |= {str(AdaptASMI(tau=0.4)), str(AdaptASMI(beta=5))}
    assert len(names) == 3 * len(variations) + 2


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ({"top_k": 256}, {}),
        ({"num_masks": 80}, {}),
        ({"mask_rate": 0.1}, {}),
        ({"seed": 1}, {}),
        ({"scope": "response"}, {}),
        ({"mask_sampler": "balanced"}, {}),
        ({}, {"num_masks": 80}),
        ({}, {"mask_rate": 0.2}),
        ({}, {"num_heads": 9}),
    ],
)
def test_other_settings_than_asked_for_are_an_error(asked, used):
    with pytest.raises(ValueError, match="give both the same settings"):
        ASMI(**asked)(stats(**used))


def test_derived_settings_follow_the_heads():
    np.testing.assert_allclose(
        ASMI()(stats(num_heads=9, num_masks=56, mask_rate=0.09)), ASMI()(stats())
    )
    np.testing.assert_allclose(
        ASMI(num_masks=40, mask_rate=0.15)(stats(num_heads=9)), ASMI()(stats())
    )


@pytest.mark.parametrize("missing", ["asmi", "asmi_closing"])
def test_a_statistic_left_out_of_the_config(missing):
    incomplete = {k: v for k, v in stats().items() if k != missing}
    with pytest.raises(KeyError, match=f"'{missing}' is missing.*stat_calculators"):
        ASMI()(incomplete)


def test_adapt_asmi_without_samples():
    without = {k: v for k, v in stats().items() if k != "asmi_diversity_second_last"}
    with pytest.raises(KeyError, match="'asmi_diversity_second_last' is missing"):
        AdaptASMI()(without)
    assert "asmi_diversity_second_last" in AdaptASMI().stats_dependencies
    assert "asmi_diversity" in AdaptASMI(gate_token="last").stats_dependencies
    assert "asmi_diversity_second_last" not in SemASMI().stats_dependencies


def test_never_nan():
    broken = stats(mi=[np.array([np.nan]), np.array([0.1])])
    with pytest.raises(ValueError, match="NaN as most confident"):
        ASMI()(broken)


@pytest.mark.parametrize("depth", [0, 1, 60])
def test_depth_outside_the_open_interval(depth):
    with pytest.raises(ValueError, match=r"depth must lie in \(0, 1\)"):
        ASMI(depth=depth)


@pytest.mark.parametrize("settings", [{"num_masks": 1}, {"mask_rate": 1.0}, {"mask_rate": 0}])
def test_masks_out_of_range(settings):
    with pytest.raises(ValueError, match=r"must (be at least 2|lie in \(0, 1\))"):
        ASMI(**settings)


def test_top_k_below_one():
    with pytest.raises(ValueError, match=r"top_k \(K\) must be at least 1"):
        SemASMI(top_k=0)


@pytest.mark.parametrize(
    ("module", "variant"), [(asmi, ASMI), (sem_asmi, SemASMI), (adapt_asmi, AdaptASMI)]
)
def test_each_module_is_a_builder(module, variant):
    estimator = module.load_estimator({"depth": 0.7, "top_k": 32})
    assert type(estimator) is variant
    assert estimator.level == "sequence"
    assert str(estimator).endswith("(70%, K=32)")
