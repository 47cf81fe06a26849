import logging

import numpy as np
import pytest
import torch
from lm_polygraph.stat_calculators import SamplingGenerationCalculator

from lm_polygraph_asmi.maths import adaptive_gate
from lm_polygraph_asmi.scoring.engine import NO_EVIDENCE
from lm_polygraph_asmi.stat_calculators import ResponseDiversityCalculator
from lm_polygraph_asmi.stat_calculators.sampling import SeededSamplingCalculator
from tests import brute_force
from tests.scoring.conftest import PROMPT, ending_model
from tests.tiny_lm import whitebox

TEXTS = ["Who built the ferry?", "Where do the blue kites start in the passage?"]


@pytest.fixture(scope="module")
def model():
    return whitebox()


def diversity(model, text: str, samples: list[list[int]]) -> float:
    prompt = model.tokenize([text])["input_ids"][0]
    embeddings = []
    for sample in samples:
        ids = torch.cat([prompt, torch.tensor(sample, dtype=torch.long)])[None]
        with torch.no_grad():
            states = model.model(input_ids=ids, output_hidden_states=True).hidden_states
        embeddings.append(states[2][0, -1])
    return brute_force.response_diversity(torch.stack(embeddings))


def test_equals_separate_passes_over_what_the_host_sampled(model):
    torch.manual_seed(0)
    samples = SamplingGenerationCalculator(samples_n=5)({}, TEXTS, model, 6)["sample_tokens"]
    found = ResponseDiversityCalculator()({"sample_tokens": samples}, TEXTS, model)
    expected = [diversity(model, text, tokens) for text, tokens in zip(TEXTS, samples, strict=True)]
    assert found["asmi_diversity"] == pytest.approx(expected, abs=1e-5)
    assert min(expected) > 0.01
    assert found["asmi_num_responses"] == [5, 5]


def test_samples_of_one_token_and_equal_samples(model):
    samples = [[[5], [9]], [[5, 6]] * 3]
    found = ResponseDiversityCalculator()({"sample_tokens": samples}, TEXTS, model)
    expected = [diversity(model, TEXTS[0], samples[0]), 0]
    assert found["asmi_diversity"] == pytest.approx(expected, abs=1e-5)


def test_second_last_tokens_are_those_of_the_hosts_embeddings():
    """One prompt at a time; answers closed by a line break, by the end token, and cut off."""
    model = ending_model(stop_strings=["e"])
    limit, endings = 5, set()
    for seed, text in enumerate([PROMPT] * 6 + TEXTS[1:]):
        sampling = SeededSamplingCalculator(samples_n=8, seed=seed)
        host = sampling({}, [text], model, limit)
        (samples,), (embeddings,) = host["sample_tokens"], host["sample_embeddings"]
        if len(embeddings) > len(samples):  # the host skips the tokens of an answer of none
            continue
        # The host embeds an answer of one token by a mean over the prompt.
        pairs = [pair for pair in zip(samples, embeddings, strict=True) if len(pair[0]) > 1]
        samples, embeddings = zip(*pairs, strict=True)
        found = ResponseDiversityCalculator()({"sample_tokens": [samples]}, [text], model, limit)
        expected = brute_force.response_diversity(torch.tensor(np.array(embeddings)))
        assert found["asmi_diversity_second_last"][0] == pytest.approx(expected, abs=1e-5)
        for tokens in samples:
            closed = "e" in model.tokenizer.decode(tokens)
            endings.add("stop" if closed else "cut" if len(tokens) == limit else "end")
    assert endings == {"stop", "cut", "end"}


def test_answers_of_a_stop_string_alone_are_alike_at_their_second_last_token(model):
    stop = next(i for i in range(10, 400) if "\n" in model.tokenizer.decode([i]))
    stopping = whitebox()
    stopping.generation_parameters.stop_strings = ["\n"]
    samples = [[stop], [stop], [7, stop]]
    found = ResponseDiversityCalculator()({"sample_tokens": [samples]}, TEXTS[:1], stopping)
    expected = diversity(stopping, TEXTS[0], [[], [], [7]])
    assert found["asmi_diversity_second_last"][0] == pytest.approx(expected, abs=1e-5)
    assert found["asmi_diversity"][0] == pytest.approx(
        diversity(stopping, TEXTS[0], samples), abs=1e-5
    )


@pytest.mark.parametrize("samples", [[], [[5, 6]], [[], [5], []]])
def test_fewer_than_two_responses_shut_the_gate(model, samples, caplog):
    with caplog.at_level(logging.WARNING, logger="lm_polygraph"):
        found = ResponseDiversityCalculator()({"sample_tokens": [samples]}, TEXTS[:1], model)
    assert found["asmi_diversity"] == found["asmi_diversity_second_last"] == [NO_EVIDENCE]
    assert found["asmi_num_responses"] == [sum(bool(s) for s in samples)]
    assert adaptive_gate(NO_EVIDENCE) < 1e-3
    assert "no semantic discount" in caplog.text


def test_missing_samples(model):
    with pytest.raises(KeyError, match="'sample_tokens' is missing"):
        ResponseDiversityCalculator()({}, TEXTS[:1], model)
