"""The estimators inside LM-Polygraph's own manager, on a tiny random model."""

from copy import copy
from types import SimpleNamespace
from unittest.mock import Mock

import lm_polygraph
import numpy as np
import pytest
from hydra.core.hydra_config import HydraConfig
from lm_polygraph.estimators import (
    RAUQ,
    AttentionScore,
    LexicalSimilarity,
    MahalanobisDistanceSeq,
    Perplexity,
    SemanticEntropy,
    TokenSAR,
)
from lm_polygraph.generation_metrics import RougeMetric
from lm_polygraph.ue_metrics import PredictionRejectionArea
from lm_polygraph.utils.builder_enviroment_stat_calculator import BuilderEnvironmentStatCalculator
from lm_polygraph.utils.dataset import Dataset
from lm_polygraph.utils.generation_parameters import GenerationParameters
from lm_polygraph.utils.manager import UEManager

from lm_polygraph_asmi import (
    ASMI,
    AdaptASMI,
    SemASMI,
    available_stat_calculators,
    estimate_uncertainty,
    score,
)
from lm_polygraph_asmi.results.names import MASKED_HEADS, SAVED, SECONDS
from tests.tiny_lm import unmaskable, whitebox

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


def test_one_answer_is_scored_as_by_a_manager_and_by_score(model, monkeypatch):
    settings = {"num_masks": 7, "mask_rate": 0.2, "scope": "response"}
    given = settings | {"num_samples": 4, "closing_token": False}
    estimators = [kind(**given) for kind in (ASMI, SemASMI, AdaptASMI)]
    run = manager(model, estimators, save_stats=["greedy_tokens", "sample_tokens"])
    run()
    assert [*map(len, run.stats["sample_tokens"])] == [4, 4]
    monkeypatch.setattr(model.generation_parameters, "max_new_tokens", 5)
    for estimator, row in zip(estimators, (0, 1, 0), strict=True):
        found = estimate_uncertainty(model, estimator, text := TEXTS[row])
        samples = run.stats["sample_tokens"][row] if estimator.method == "adapt" else None
        answer, text_of = (run.stats[name][row] for name in ("greedy_tokens", "greedy_texts"))
        expected = score(
            model, text, answer, samples=samples, method=estimator.method, closing_token=False,
            max_new_tokens=5, **settings,
        )  # fmt: skip
        assert 0 < found.uncertainty == pytest.approx(expected.score)
        assert vars(found) == {
            "uncertainty": run.estimations["sequence", str(estimator)][row], "input_text": text,
            "generation_text": text_of, "generation_tokens": answer[:-1], "model_path": "tiny",
            "estimator": str(estimator),
        }  # fmt: skip


def test_one_answer_by_the_hosts_estimators(monkeypatch):
    """As the host's own function, which fails on models without attention maps."""
    short = GenerationParameters(max_new_tokens=5)
    model, without = whitebox(), unmaskable("heads")
    other = SimpleNamespace(model_type="Blackbox")
    model.generation_parameters = without.generation_parameters = short
    other.generation_parameters = short
    for estimator in (Perplexity(), RAUQ()):
        expected = lm_polygraph.estimate_uncertainty(model, estimator, TEXTS[0])
        assert estimate_uncertainty(model, estimator, TEXTS[0]) == expected
    for estimator in (Perplexity(), LexicalSimilarity("rougeL")):
        assert np.isfinite(estimate_uncertainty(without, estimator, TEXTS[0]).uncertainty)
    for unable, word in ((without, "no attention heads"), (other, "type Blackbox")):
        with pytest.raises(TypeError, match=word):
            estimate_uncertainty(unable, SemASMI(), TEXTS[0])
    monkeypatch.setattr(lm_polygraph, "estimate_uncertainty", lambda *given: given)
    given = (other, Perplexity(), TEXTS[0], "picture.png")
    assert estimate_uncertainty(*given) == given


def changed(**parameters):
    """A model with other generation parameters."""
    model = whitebox()
    model.generation_parameters = GenerationParameters(**parameters)
    return model


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"estimator": [SemASMI(), ASMI()]}, "one estimator, .*, got a list"),
        ({"estimator": SemASMI}, "got the class SemASMI"),
        ({"estimator": "SemASMI"}, "got 'SemASMI'"),
        ({"model": "smollm2"}, r"got 'smollm2': .* WhiteboxModel\(\*load_named"),
        ({"model": whitebox().model}, r"got a LlamaForCausalLM: .* WhiteboxModel\(model, tok"),
        ({"input_text": TEXTS}, "text, got a list"),
        ({"input_text": None}, "text, got None"),
        ({"input_image": "a.png"}, "input_image"),
        ({"model": changed(max_new_tokens=0)}, "max_new_tokens .* got 0"),
        ({"model": changed(num_beams=3)}, "num_beams=1, got 3"),
        ({"model": changed(temperature=0.0), "estimator": AdaptASMI()}, "above 0, got 0.0: Adapt-"),
        ({"estimator": TokenSAR()}, "'cross-encoder/stsb-roberta-large', which TokenSAR needs, is "
         "not .* run `hf download cross-encoder/stsb-roberta-large`"),
        ({"estimator": SemanticEntropy()}, "'microsoft/deberta-large-mnli', which SemanticEntropy"),
        ({"estimator": MahalanobisDistanceSeq("decoder")}, "'train_embeddings', .* polygraph_eval"),
        ({"model": unmaskable("heads"), "estimator": RAUQ()}, "maps, which MambaForCausalLM does"),
        ({"model": unmaskable("heads"), "estimator": AttentionScore()}, "AttentionS.* reads att"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_said_before_anything_is_generated(
    model, given, word, monkeypatch
):
    monkeypatch.setattr(HydraConfig, "initialized", lambda: False)  # by other tests
    arguments = {"model": model, "estimator": ASMI(), "input_text": TEXTS[0]} | given
    if hasattr(arguments["model"], "model_type"):  # fails if it is asked
        arguments["model"] = copy(arguments["model"])
        arguments["model"].generate = Mock(side_effect=AssertionError("it was asked"))
    with pytest.raises((TypeError, ValueError), match=word) as raised:
        estimate_uncertainty(**arguments)
    assert "\n" not in str(raised.value)


def test_a_manager_without_our_calculators_names_what_to_pass(model):
    with pytest.raises(Exception, match=r"asmi .*asmi\.available_stat_calculators\(estimators\)"):
        lm_polygraph.estimate_uncertainty(model, ASMI(), TEXTS[0])
    assert ASMI().stats_dependencies == ["asmi", "asmi_closing"]  # elsewhere plain names


def test_the_helper_reads_settings_from_the_estimators(model, tmp_path):
    settings = {"num_masks": 7, "mask_rate": 0.2, "top_k": 8, "scope": "response", "seed": 5}
    # The mean over tokens and the gate are the estimators' own.
    estimators = [ASMI(depth=0.9, **settings), SemASMI(closing_token=False, **settings),
                  Perplexity(), AdaptASMI(tau=0.5, **settings)]  # fmt: skip
    available = available_stat_calculators(
        estimators, attention="sdpa", details=True, result_cache=str(tmp_path)
    )
    run = manager(model, estimators, available, save_stats=[*SAVED, "greedy_tokens"])
    run()
    assert len(run.estimations) == 4
    untimed = dict.fromkeys(set(SECONDS) - {"seconds_samples"}, 0)  # of the host's own calculators
    assert {n: len(run.stats.get(n, ())) for n in SAVED} == dict.fromkeys(SAVED, 2) | untimed
    assert [*map(len, run.stats["asmi_tokens"])] == [*map(len, run.stats["greedy_tokens"])]
    assert {name for entry in available for name in entry.stats} >= set(MASKED_HEADS)
    assert list(run.stats["asmi"][0]) == [0.6, 0.9]
    for depth, own in run.stats["asmi"][0].items():
        assert own["settings"] == own["settings"] | settings | {
            "depth": depth, "mask_sampler": "bernoulli", "attention": "sdpa"
        }  # fmt: skip
        assert own["masks"].shape == (7, 4)
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("estimators", "options", "word"),
    [
        # Scores are the estimators' own.
        *(([ASMI()], {option: 1}, f"got {option}") for option in ("depths", "num_masks", "stop")),
        ([AdaptASMI(num_samples=5), AdaptASMI(depth=0.9)], {},
         "num_samples, got 5, 10.* Use several managers"),
        ([SemASMI(attention="eager"), SemASMI(depth=0.9)], {}, "attention"),
        ([ASMI(depth=0.9), SemASMI(mask_sampler="balanced"), Perplexity()], {},
         r"ASMI \(90.*Sem-ASMI \(60%, K=64, mask_sampler=balanced\).* Use several managers"),
    ],
)  # fmt: skip
def test_settings_that_the_helper_cannot_give_all_estimators(estimators, options, word):
    with pytest.raises(ValueError, match=word):
        available_stat_calculators(estimators, **options)


@pytest.mark.parametrize(
    ("estimator", "options", "name", "used"),
    [
        *((estimator, options, calculator, {"attention": "eager"})
          for estimator, options in ((AdaptASMI(attention="eager"), {}),
                                     (AdaptASMI(), {"attention": "eager"}))
          for calculator in ("MaskedHeadsCalculator", "ResponseDiversityCalculator")),
        (RAUQ(), {}, "GreedyProbsCalculator", {"output_attentions": True}),
        (ASMI(), {}, "GreedyProbsCalculator", {"output_attentions": False}),
    ],
)  # fmt: skip
def test_attention_of_the_helpers_calculators(estimator, options, name, used):
    (found,) = [c for c in available_stat_calculators([estimator], **options) if c.name == name]
    assert found.cfg.items() >= used.items()
