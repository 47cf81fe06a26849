"""The estimators inside LM-Polygraph's own manager, on a tiny random model."""

from unittest.mock import Mock

import numpy as np
import pytest
from lm_polygraph.defaults import register_default_stat_calculators as defaults
from lm_polygraph.estimators import RAUQ, Perplexity
from lm_polygraph.generation_metrics import RougeMetric
from lm_polygraph.stat_calculators import SamplingGenerationCalculator
from lm_polygraph.ue_metrics import PredictionRejectionArea
from lm_polygraph.utils.builder_enviroment_stat_calculator import BuilderEnvironmentStatCalculator
from lm_polygraph.utils.dataset import Dataset
from lm_polygraph.utils.manager import UEManager

from lm_polygraph_asmi import ASMI, AdaptASMI, SemASMI, available_stat_calculators
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.results.names import MASKED_HEADS, SAVED, SECONDS
from tests.tiny_lm import whitebox

TEXTS = ["Who built the ferry?", "Where do the blue kites start?"]
TARGETS = ["Brask", "the answer"]


def manager(model, estimators, available=None, **arguments) -> UEManager:
    return UEManager(
        Dataset(TEXTS, TARGETS, 1), model, estimators, BuilderEnvironmentStatCalculator(model),
        available or available_stat_calculators(estimators), [RougeMetric("rougeL")],
        [PredictionRejectionArea()], [], ignore_exceptions=False, verbose=False, max_new_tokens=5,
        **arguments,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return whitebox()


def test_scores_are_means_of_the_saved_tokens(model):
    run = manager(model, [ASMI(), SemASMI(), AdaptASMI()], save_stats=[*SAVED, "greedy_tokens"])
    run()
    assert [*map(len, run.stats["asmi_tokens"])] == [*map(len, run.stats["greedy_tokens"])]
    gates = 1 / (1 + np.exp(-10 * (0.3 - np.array(run.stats["asmi_diversity_second_last"]))))
    for variant, alphas in ("ASMI", [0, 0]), ("Sem-ASMI", [1, 1]), ("Adapt-ASMI", gates):
        expected = [
            (own["mi"] * (1 - alpha * own["agreement"])).mean()
            for own, alpha in zip(at_depth(run.stats, 0.6), alphas, strict=True)
        ]
        np.testing.assert_allclose(run.estimations["sequence", f"{variant} (60%, K=64)"], expected)
    # The host's own calculators, which these are, do not time themselves.
    assert set(SAVED) - set(run.stats) == set(SECONDS)
    assert all(len(run.stats[name]) == 2 for name in set(SAVED) - set(SECONDS))


def test_without_adapt_asmi_no_sample_is_drawn(model, monkeypatch):
    refused = Mock(side_effect=AssertionError("samples were drawn"))
    monkeypatch.setattr(SamplingGenerationCalculator, "__call__", refused)
    manager(model, [ASMI(), SemASMI()])()
    with pytest.raises(AssertionError, match="samples were drawn"):
        manager(model, [AdaptASMI()])()


def test_a_manager_without_our_calculators_names_what_to_pass(model):
    with pytest.raises(Exception, match=r"stat calculator for: asmi \(") as error:
        manager(model, [ASMI()], defaults.register_default_stat_calculators("Whitebox"))
    advice = "available_stat_calculators=lm_polygraph_asmi.available_stat_calculators(estimators)"
    assert advice in str(error.value)
    names = ASMI().stats_dependencies
    assert names == ["asmi", "asmi_closing"]
    assert [str(name) for name in names] == names  # elsewhere they are plain names


def test_the_helper_reads_settings_from_the_estimators(model, tmp_path):
    settings = {"num_masks": 7, "mask_rate": 0.2, "top_k": 8, "scope": "response", "seed": 5}
    other = SemASMI(mask_sampler="balanced", **settings)
    estimators = [ASMI(depth=0.9, **settings), other, Perplexity()]
    with pytest.raises(ValueError, match=r"different settings .* Use several managers") as refused:
        available_stat_calculators(estimators)
    assert all(str(estimator) in str(refused.value) for estimator in estimators[:2])
    # The mean over tokens and the gate are the estimators' own.
    estimators[1] = SemASMI(closing_token=False, **settings)
    estimators.append(AdaptASMI(tau=0.5, **settings))
    options = {"attention": "sdpa", "details": True, "result_cache": str(tmp_path)}
    available = available_stat_calculators(estimators, **options)
    run = manager(model, estimators, available, save_stats=SAVED)
    run()
    assert len(run.estimations) == 4
    assert {name for entry in available for name in entry.stats} >= set(MASKED_HEADS)
    for depth, own in run.stats["asmi"][0].items():
        expected = settings | {"depth": depth, "mask_sampler": "bernoulli", "attention": "sdpa"}
        assert own["settings"].items() >= expected.items()
        assert own["masks"].shape == (7, 4)
    assert list(run.stats["asmi"][0]) == [0.6, 0.9]
    assert any(tmp_path.iterdir())


def test_settings_that_the_helper_cannot_give_all_estimators():
    for option in ("depths", "num_masks", "stop"):  # Scores are the estimators' own.
        with pytest.raises(ValueError, match=f"got {option}. Depths and other settings of a score"):
            available_stat_calculators([ASMI()], **{option: 1})
    # LM-Polygraph's own calculator draws ten, whatever an estimator says.
    with pytest.raises(ValueError, match="expected num_samples=10"):
        available_stat_calculators([AdaptASMI(num_samples=5)])
    with pytest.raises(ValueError, match="attention and memory budget"):
        available_stat_calculators([SemASMI(attention="eager"), SemASMI(depth=0.9)])
    for own, option in (({"attention": "eager"}, {}), ({}, {"attention": "eager"})):
        found = available_stat_calculators([AdaptASMI(**own)], **option)
        asked = {c.name: c.cfg.attention for c in found if "attention" in c.cfg}
        names = "MaskedHeadsCalculator", "ResponseDiversityCalculator"
        assert asked == dict.fromkeys(names, "eager")
    for wanted in (False, True):  # maps of attention
        found = available_stat_calculators([RAUQ()], output_attentions=wanted)
        (greedy,) = [c.cfg for c in found if c.name == "GreedyProbsCalculator"]
        assert greedy.output_attentions == wanted
