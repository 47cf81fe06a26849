"""Sampled answers: as the host draws them, all of a question in one batch."""

from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from lm_polygraph.stat_calculators import SamplingGenerationCalculator
from lm_polygraph.utils.generation_parameters import GenerationParameters
from lm_polygraph.utils.model import WhiteboxModel
from transformers import T5Config, T5ForConditionalGeneration

from lm_polygraph_asmi.core.maths.masks import example_seed
from lm_polygraph_asmi.stat_calculators.sampling import SeededSamplingCalculator
from tests.families import DECODERS, tiny_class
from tests.scoring.conftest import PROMPT, ending_model
from tests.tiny_lm import tokenizer

TEXTS = ["Who built the ferry? The answer is in the passage."]
STATISTICS = SamplingGenerationCalculator.meta_info()[0]
TRIED = "llama", "gemma3-mixed", "gpt2", "gated hybrid", "indexed attention", "no cache"
"""One of each kind of positions and of caches; the last three run the prompt in the batch."""
REFUSED = "MambaForCausalLM", "ProphetNetForCausalLM", "RwkvForCausalLM", "XLMWithLMHeadModel"
"""Classes without heads to mask. All but the first answer otherwise in a batch of equal prompts, or
after a part of the prompt."""


def prompt_of(model, text):
    return model.tokenize([text])["input_ids"][0].tolist()


def around(name):
    tok = tokenizer()
    make = partial(tiny_class, name) if name in REFUSED else DECODERS[name].make
    decoder = make(vocab_size=len(tok))
    decoder.generation_config.pad_token_id = tok.pad_token_id
    return WhiteboxModel(decoder, tok, "tiny", "CausalLM", GenerationParameters(temperature=0.5))


def draw(model, count, tokens, texts=TEXTS, **settings):
    return SeededSamplingCalculator(count, **settings)({}, texts, model, tokens)


def host_draws(model, count, tokens, seed=0, text=TEXTS[0]):
    """The host's own loop for one sample, from the seed of each number."""
    drawn = {name: [] for name in STATISTICS}
    for number in range(count):
        torch.manual_seed(example_seed(seed, [*prompt_of(model, text), number]))
        one = SamplingGenerationCalculator(1)({}, [text], model, tokens)
        for name in STATISTICS:
            drawn[name] += one[name][0]
    return drawn


def assert_same(drawn, *questions):
    for row, expected in enumerate(questions):
        for name in ("sample_tokens", "sample_texts"):
            assert drawn[name][row] == expected[name]
        for name in ("sample_log_probs", "sample_log_likelihoods", "sample_embeddings"):
            for mine, other in zip(drawn[name][row], expected[name], strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, {}) for name in (*TRIED, *REFUSED)),
        ("llama", {"temperature": 1.5, "top_k": 7, "top_p": 0.6}),
        ("llama", {"allow_newlines": False}),
        ("llama", {"repetition_penalty": 1.5, "do_sample": True, "top_k": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_each_sample_is_the_one_the_host_draws_alone_from_its_seed(name, settings):
    """Of each question; other methods draw what they would have without it."""
    model, texts, state = around(name), ["", TEXTS[0]], torch.get_rng_state()
    assert len(prompt_of(model, "")) == 1  # no token but the first one's is kept
    usual = draw(model, 2, 3, texts, seed=3) if settings.keys() - {"allow_newlines"} else None
    vars(model.generation_parameters).update(settings)
    ours = draw(model, 2, 3, texts, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(ours, *(host_draws(model, 2, 3, seed=3, text=text) for text in texts))
    assert usual is None or ours["sample_tokens"] != usual["sample_tokens"]


def test_an_encoder_decoder_draws_from_one_stream_of_the_prompt():
    tok = tokenizer()
    sizes = {"vocab_size": len(tok), "d_model": 32, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    host = WhiteboxModel(model.eval(), tok, "tiny", "Seq2SeqLM", GenerationParameters())
    ours = draw(host, 3, 5)
    torch.manual_seed(example_seed(0, [*prompt_of(host, TEXTS[0]), 0]))
    expected = SamplingGenerationCalculator(3)({}, TEXTS, host, 5)
    assert_same(ours, {name: rows[0] for name, rows in expected.items()})


def test_samples_end_at_their_own_end():
    """At end tokens, of which the host drops one, at stop strings, after one token, or not."""
    model = ending_model(stop_strings=["e"])
    model.model.generation_config.eos_token_id = [2, *range(3, 400, 20)]
    ours = draw(model, 8, 5, [PROMPT], seed=3)
    assert_same(ours, host_draws(model, 8, 5, seed=3, text=PROMPT))
    (samples,) = ours["sample_tokens"]
    assert {*map(len, samples)} == {1, 2, 3, 4, 5}
    stops = ["e" in model.tokenizer.decode(ids) for ids in samples]
    others = [ids for ids, stop in zip(samples, stops, strict=True) if not stop]
    kinds = {(len(ids) == 5, ids[-1] % 20 == 3) for ids in others}
    assert (any(stops), kinds >= {(True, False), (False, True), (False, False)}) == (True, True)


@pytest.mark.parametrize("name", ["llama", "gated hybrid"])
def test_batch_size_and_number_change_no_sample(name, monkeypatch):
    """In 32 bits a draw within rounding of a tie may differ: none of 16 tokens does."""
    model = around(name)
    whole = {name: rows[0] for name, rows in draw(model, 8, 2).items()}
    assert_same(draw(model, 3, 2), {name: whole[name][:3] for name in STATISTICS})
    sizes, generate = [], model.generate

    def generate_some(**arguments):
        sizes.append(len(arguments["input_ids"]))
        if sizes[-1] > most:
            raise torch.OutOfMemoryError
        return generate(**arguments)

    monkeypatch.setattr(model, "generate", generate_some)
    for most, asked in ((7, [8, 4, 4]), (2, [8, 4, 2, 2, 2, 2]), (1, [8, 4, 2] + 8 * [1])):
        sizes.clear()
        assert_same(draw(model, 8, 2), whole)
        assert sizes == asked, most
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        draw(model, 3, 2)


def test_answers_come_from_the_cache(model, tmp_path, monkeypatch):
    """If nothing that they depend on has changed."""

    def drawn(count=3, tokens=6, **settings):
        return draw(model, count, tokens, result_cache=str(tmp_path), **settings)

    first, other_end = drawn(), deepcopy(model.tokenizer)
    other_end.eos_token = "<pad>"
    monkeypatch.setattr(SamplingGenerationCalculator, "__call__", Mock(side_effect=LookupError))
    np.testing.assert_equal(drawn(), first)
    for model_with, asked in (
        (nullcontext(), {"count": 4}),
        (nullcontext(), {"seed": 1}),
        (nullcontext(), {"tokens": 7}),
        (patch.object(model, "tokenizer", other_end), {}),
        (patch.object(model.generation_parameters, "temperature", 1.0), {}),
        (patch.object(model.model.generation_config, "eos_token_id", [2, 5]), {}),
        (patch.object(model.model.config, "_attn_implementation_internal", "sdpa"), {}),
    ):
        with model_with, pytest.raises(LookupError):
            drawn(**asked)
