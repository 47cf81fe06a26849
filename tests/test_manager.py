"""The estimators inside LM-Polygraph's own manager, on a tiny random model."""

import numpy as np
import pytest
from lm_polygraph.defaults.register_default_stat_calculators import (
    register_default_stat_calculators,
)
from lm_polygraph.estimators import RAUQ, Perplexity
from lm_polygraph.generation_metrics import RougeMetric
from lm_polygraph.stat_calculators import SamplingGenerationCalculator
from lm_polygraph.ue_metrics import PredictionRejectionArea
from lm_polygraph.utils.builder_enviroment_stat_calculator import (
    BuilderEnvironmentStatCalculator,
)
from lm_polygraph.utils.dataset import Dataset
from lm_polygraph.utils.manager import UEManager

from lm_polygraph_asmi import ASMI, AdaptASMI, SemASMI, available_stat_calculators
from lm_polygraph_asmi.estimators.base import at_depth
from lm_polygraph_asmi.results.names import MASKED_HEADS, SAVED, SECONDS
from tests.tiny_lm import whitebox

TEXTS = ["Who built the ferry?", "Where do the blue kites start?", "True or False?", "A question"]
TARGETS = ["Brask", "the answer", "True", "passage"]


def manager(model, estimators, available=None, batch_size=1, rows=2, **arguments) -> UEManager:
    return UEManager(
        data=Dataset(TEXTS[:rows], TARGETS[:rows], batch_size),
        model=model,
        estimators=estimators,
        builder_env_stat_calc=BuilderEnvironmentStatCalculator(model),
        available_stat_calculators=available or available_stat_calculators(estimators),
        generation_metrics=[RougeMetric("rougeL")],
        ue_metrics=[PredictionRejectionArea()],
        processors=[],
        ignore_exceptions=False,
        verbose=False,
        max_new_tokens=5,
        **arguments,
    )


@pytest.fixture(scope="module")
def model():
    return whitebox()


def test_scores_are_means_of_the_saved_tokens(model):
    run = manager(model, [ASMI(), SemASMI(), AdaptASMI()], save_stats=[*SAVED, "greedy_tokens"])
    run()
    lengths = [[len(row) for row in run.stats[name]] for name in ("asmi_tokens", "greedy_tokens")]
    assert lengths[0] == lengths[1]
    masked = at_depth(run.stats, 0.6)
    information, agreement = ([own[name] for own in masked] for name in ("mi", "agreement"))
    scores = {name: values for (_, name), values in run.estimations.items()}
    np.testing.assert_allclose(
        scores["ASMI (60%, K=64)"], [values.mean() for values in information]
    )
    np.testing.assert_allclose(
        scores["Sem-ASMI (60%, K=64)"],
        [(mi * (1 - a)).mean() for mi, a in zip(information, agreement, strict=True)],
    )
    gate = 1 / (1 + np.exp(-10 * (0.3 - np.array(run.stats["asmi_diversity_second_last"]))))
    np.testing.assert_allclose(
        scores["Adapt-ASMI (60%, K=64)"],
        [
            (mi * (1 - alpha * a)).mean()
            for mi, a, alpha in zip(information, agreement, gate, strict=True)
        ],
    )
    # The host's own calculators, which these are, do not time themselves.
    assert set(SAVED) - set(run.stats) == set(SECONDS)
    assert all(len(run.stats[name]) == 2 for name in set(SAVED) - set(SECONDS))


def test_batch_size_does_not_change_the_scores(model):
    one, four = (manager(model, [SemASMI()], batch_size=size, rows=4) for size in (1, 4))
    one(), four()
    key = ("sequence", "Sem-ASMI (60%, K=64)")
    np.testing.assert_allclose(one.estimations[key], four.estimations[key], atol=1e-6)


def test_without_adapt_asmi_no_sample_is_drawn(model, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("samples were drawn")

    monkeypatch.setattr(SamplingGenerationCalculator, "__call__", refuse)
    manager(model, [ASMI(), SemASMI()])()
    with pytest.raises(AssertionError, match="samples were drawn"):
        manager(model, [AdaptASMI()])()


def test_four_depths_and_two_variants_in_one_run(model):
    depths = [0.05, 0.2, 0.6, 0.9]  # four layers of four
    estimators = [kind(depth=d) for d in depths for kind in (ASMI, SemASMI)]
    run = manager(model, estimators)
    run()
    assert len(run.estimations) == 8
    by_depth = [run.estimations["sequence", str(ASMI(depth=d))] for d in depths]
    assert len({tuple(scores) for scores in by_depth}) == 4


@pytest.mark.parametrize("missing", ["asmi_closing", "sample_tokens"])
def test_a_statistic_missing_from_the_entry_is_named_before_the_run(model, missing):
    available = available_stat_calculators([AdaptASMI()])
    for entry in available:
        entry.stats[:] = [name for name in entry.stats if name != missing]
    with pytest.raises(Exception, match=f"Cant find stat calculator for: {missing}"):
        manager(model, [AdaptASMI()], available)


def test_scores_that_the_calculator_does_not_have(model):
    run = manager(model, [ASMI(depth=0.9)], available_stat_calculators([ASMI()]))
    with pytest.raises(KeyError, match=r"no depth 0\.9, only 0\.6: add it to `depths`"):
        run()
    others = available_stat_calculators([ASMI(num_masks=7, mask_rate=0.2)])
    with pytest.raises(ValueError, match="give both the same settings"):
        manager(model, [ASMI()], others)()


def test_a_manager_without_our_calculators_names_what_to_pass(model):
    """LM-Polygraph's own list, as its examples pass it."""
    available = register_default_stat_calculators("Whitebox")
    with pytest.raises(Exception, match=r"stat calculator for: asmi \(") as error:
        manager(model, [ASMI()], available)
    advice = "available_stat_calculators=lm_polygraph_asmi.available_stat_calculators(estimators)"
    assert advice in str(error.value)
    names = ASMI().stats_dependencies
    assert names == ["asmi", "asmi_closing"]
    assert [str(name) for name in names] == names  # elsewhere they are plain names


def test_the_helper_reads_settings_from_the_estimators(model, tmp_path):
    settings = {"num_masks": 7, "mask_rate": 0.2, "top_k": 8, "scope": "response", "seed": 5}
    estimators = [
        ASMI(depth=0.9, **settings),
        SemASMI(mask_sampler="balanced", **settings),
        Perplexity(),
    ]
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
    declared = {name for container in available for name in container.stats}
    assert declared >= set(MASKED_HEADS)
    for depth, own in run.stats["asmi"][0].items():
        used = own["settings"]
        expected = settings | {"depth": depth, "mask_sampler": "bernoulli", "attention": "sdpa"}
        assert used.items() >= expected.items()
        assert own["masks"].shape == (7, 4)
    assert list(run.stats["asmi"][0]) == [0.6, 0.9]
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize("wanted", [True, False])
def test_attention_maps_on_request(model, wanted):
    available = available_stat_calculators([RAUQ()], output_attentions=wanted)
    run = manager(model, [RAUQ(), ASMI()], available, save_stats=["attention_all"])
    if not wanted:
        with pytest.raises((KeyError, IndexError, TypeError)):
            run()
        return
    run()
    assert np.isfinite(run.estimations["sequence", str(RAUQ())]).all()


def test_settings_that_the_helper_cannot_give_all_estimators():
    for option in ("depths", "num_masks", "stop"):  # Scores are the estimators' own.
        with pytest.raises(ValueError, match=f"got {option}. Depths and other settings of a score"):
            available_stat_calculators([ASMI()], **{option: 1})
    # LM-Polygraph's own calculator draws ten, whatever an estimator says.
    with pytest.raises(ValueError, match="expected num_samples=10"):
        available_stat_calculators([AdaptASMI(num_samples=5)])
    with pytest.raises(ValueError, match="attention and memory budget"):
        available_stat_calculators([SemASMI(attention="eager"), SemASMI(depth=0.9)])
    found = available_stat_calculators([AdaptASMI(attention="eager")])
    asked = {c.name: c.cfg.attention for c in found if "attention" in c.cfg}
    assert asked == dict.fromkeys(("MaskedHeadsCalculator", "ResponseDiversityCalculator"), "eager")
