"""Diversity of sampled answers: that of separate passes, and of the host's embeddings."""

import numpy as np
import pytest
import torch

from lm_polygraph_asmi.core.engine import NO_EVIDENCE
from lm_polygraph_asmi.core.scores import adaptive_gate
from lm_polygraph_asmi.stat_calculators import ResponseDiversityCalculator
from lm_polygraph_asmi.stat_calculators.sampling import SeededSamplingCalculator
from tests import brute_force
from tests.families import FAMILIES
from tests.model.test_responses import separate
from tests.scoring.conftest import PROMPT, ending_model
from tests.tiny_lm import whitebox

TEXTS = ["Who built the ferry?", "Where do the blue kites start in the passage?"]


def diversity(model, text: str, samples: list[list[int]]) -> float:
    prompt = model.tokenize([text])["input_ids"][0]
    return brute_force.response_diversity(separate(FAMILIES["llama"], model.model, prompt, samples))


def found(model, *samples, texts=TEXTS, limit=100):
    return ResponseDiversityCalculator()(
        {"sample_tokens": samples}, texts[: len(samples)], model, limit
    )


def test_second_last_tokens_are_those_of_the_hosts_embeddings():
    model = ending_model(stop_strings=["e"])
    limit, endings = 5, set()
    for seed, text in ((0, PROMPT), (5, PROMPT), (6, TEXTS[1])):
        host = SeededSamplingCalculator(samples_n=8, seed=seed)({}, [text], model, limit)
        (samples,), (embeddings,) = host["sample_tokens"], host["sample_embeddings"]
        if len(embeddings) > len(samples):  # the host skips the tokens of an answer of none
            continue
        # The host embeds an answer of one token by a mean over the prompt.
        longer = [at for at, tokens in enumerate(samples) if len(tokens) > 1]
        expected = brute_force.response_diversity(torch.tensor(np.array(embeddings))[longer])
        stats = found(model, [samples[at] for at in longer], texts=[text], limit=limit)
        assert stats["asmi_diversity_second_last"][0] == pytest.approx(expected, abs=1e-5)
        for tokens in (samples[at] for at in longer):
            endings.add(("e" in model.tokenizer.decode(tokens), len(tokens) == limit))
    assert {(True, False), (False, True), (False, False)} <= endings  # stopped, cut, ended


def test_equals_separate_passes():
    """Answers of a stop string alone are alike at their second-last token."""
    stopping = whitebox(stop_strings=["\n"])
    stop = next(i for i in range(10, 400) if "\n" in stopping.tokenizer.decode([i]))
    samples = [[stop], [stop], [7, stop]], [[5, 6], [7]]
    expected = [diversity(stopping, *row) for row in zip(TEXTS, samples, strict=True)]
    stats, second_last = found(stopping, *samples), diversity(stopping, TEXTS[0], [[], [], [7]])
    assert stats["asmi_diversity"] == pytest.approx(expected, abs=1e-5)
    assert stats["asmi_diversity_second_last"][0] == pytest.approx(second_last, abs=1e-5)
    assert (min(expected) > 0.01, stats["asmi_num_responses"]) == (True, [3, 2])
    padded = [[*ids, 9, 9] for ids in samples[0]]  # as LM-Polygraph leaves them in a batch
    assert found(stopping, padded, padded)["asmi_diversity"][0] == stats["asmi_diversity"][0]


@pytest.mark.parametrize("samples", [[], [[5, 6]], [[], [5], []]])
def test_fewer_than_two_responses_shut_the_gate(model, samples, caplog):
    stats = found(model, samples)
    assert stats["asmi_diversity"] == stats["asmi_diversity_second_last"] == [NO_EVIDENCE]
    assert stats["asmi_num_responses"] == [sum(bool(s) for s in samples)]
    assert adaptive_gate(NO_EVIDENCE) < 1e-3
    assert "no semantic discount" in caplog.text
