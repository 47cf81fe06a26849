"""Sampled answers: the host's own, but each question's from a seed of its own."""

import numpy as np
import pytest
import torch
from lm_polygraph.stat_calculators import SamplingGenerationCalculator

from lm_polygraph_asmi.maths import example_seed
from lm_polygraph_asmi.stat_calculators.sampling import SeededSamplingCalculator
from tests.families import CONFIGS
from tests.tiny_lm import whitebox

pytestmark = pytest.mark.usefixtures("unseen")

TEXTS = ["Who built the ferry? The answer is in the passage.", "Where do the blue kites start?"]


@pytest.fixture(scope="module")
def model():
    return whitebox()


def prompt_of(model, text):
    return model.tokenize([text])["input_ids"][0].tolist()


TRIED = ("llama", "mistral-window", "gemma3-mixed", "gpt2")
"""One of each kind of positions and of caches."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=[] if name in TRIED else pytest.mark.slow) for name in CONFIGS],
)
def test_answers_are_those_the_host_draws_from_the_same_seed(family):
    """Running the prompt once changes no answer, sliding windows included."""
    model = whitebox(family)
    ours = SeededSamplingCalculator(4, seed=3)({}, TEXTS[:1], model, 8)
    torch.manual_seed(example_seed(3, prompt_of(model, TEXTS[0])))
    host = SamplingGenerationCalculator(4)({}, TEXTS[:1], model, 8)
    assert ours["sample_tokens"] == host["sample_tokens"]
    assert ours["sample_texts"] == host["sample_texts"]
    for name in ("sample_log_probs", "sample_log_likelihoods", "sample_embeddings"):
        for mine, theirs in zip(ours[name][0], host[name][0], strict=True):
            np.testing.assert_allclose(mine, theirs, atol=2e-5)


def test_answers_depend_on_the_question_and_the_seed_alone(model):
    def draw(texts, **settings):
        return SeededSamplingCalculator(**({"samples_n": 3} | settings))({}, texts, model, 6)

    both = draw(TEXTS)["sample_tokens"]
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert draw(TEXTS[1:])["sample_tokens"] == both[1:]
    assert torch.equal(torch.get_rng_state(), state)  # other methods draw what they would have
    assert draw(TEXTS[::-1])["sample_tokens"] == both[::-1]
    assert draw(TEXTS, seed=1)["sample_tokens"] != both
    assert len(set(map(tuple, both[0]))) > 1


def test_a_prompt_of_one_token(model):
    drawn = SeededSamplingCalculator(2)({}, [""], model, 4)
    assert len(prompt_of(model, "")) == 1
    assert len(drawn["sample_tokens"][0]) == 2


def test_answers_come_from_the_journal(model, tmp_path, monkeypatch):
    first = SeededSamplingCalculator(3, result_cache=str(tmp_path))({}, TEXTS, model, 6)

    def refuse(*_, **__):
        raise AssertionError("drawn again")

    monkeypatch.setattr(SamplingGenerationCalculator, "__call__", refuse)
    again = SeededSamplingCalculator(3, result_cache=str(tmp_path))({}, TEXTS, model, 6)
    assert again["sample_tokens"] == first["sample_tokens"]
    assert again["seconds_samples"] == first["seconds_samples"]
    for changed in ({"samples_n": 4}, {"samples_n": 3, "seed": 1}):
        with pytest.raises(AssertionError, match="drawn again"):
            SeededSamplingCalculator(**changed, result_cache=str(tmp_path))({}, TEXTS, model, 6)
    with pytest.raises(AssertionError, match="drawn again"):
        SeededSamplingCalculator(3, result_cache=str(tmp_path))({}, TEXTS, model, 7)
    for settings, name, value in (
        (model.generation_parameters, "temperature", 1.0),
        (model.model.generation_config, "eos_token_id", [2, 5]),
        (model.model.generation_config, "min_p", 0.2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(settings, name, value)
            with pytest.raises(AssertionError, match="drawn again"):
                SeededSamplingCalculator(3, result_cache=str(tmp_path))({}, TEXTS, model, 6)
    monkeypatch.setattr(model.generation_parameters, "top_p", 0.5)
    with pytest.raises(AssertionError, match="drawn again"):
        SeededSamplingCalculator(3, result_cache=str(tmp_path))({}, TEXTS, model, 6)
