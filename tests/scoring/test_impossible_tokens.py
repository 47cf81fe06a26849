"""Tokens that the model makes impossible: a logit of minus infinity is probability 0."""

from functools import partial

import pytest
import torch
import transformers

from lm_polygraph_asmi.files import to_json
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.unmasked import read
from tests.families import SIZES, tiny_model
from tests.scoring.conftest import PROMPT
from tests.stat_calculators.test_masked_heads import MaskedHeadsCalculator, greedy
from tests.tiny_lm import whitebox

UNUSED = slice(-16, None)
HIDDEN, SMALL = -torch.inf, -1e4
"""What a model may write for a token that it never says; in 32 bits both are probability 0."""


def biased(family: str, value: float, dtype: torch.dtype, vocabulary: int):
    """A model whose own forward method gives the last 16 tokens this logit."""
    if family == "phi":
        sizes = SIZES | {"vocab_size": vocabulary, "max_position_embeddings": 256}
        torch.manual_seed(0)
        model = transformers.PhiForCausalLM(transformers.PhiConfig(**sizes)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.25)
            model.lm_head.bias[UNUSED] = value
        return model.to(dtype)
    model = tiny_model(family, vocab_size=vocabulary, max_position_embeddings=256).to(dtype)
    if family == "gpt2":  # no bias: the model masks its own logits
        forward = type(model).forward

        class Masking(type(model)):
            def forward(self, *args, **kwargs):
                output = forward(self, *args, **kwargs)
                output.logits[..., UNUSED] = value
                return output

        model.__class__ = Masking
    else:
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(vocabulary, dtype=dtype))
        with torch.no_grad():
            model.lm_head.bias[UNUSED] = value
    return model


@pytest.mark.parametrize("scope", ["all", "response"])
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("phi", torch.float32),
        ("llama", torch.bfloat16),
        ("llama-tied", torch.float32),
        ("gpt2", torch.float32),
        ("phi", torch.float16),
    ],
)
def test_a_logit_of_minus_infinity_is_probability_0(family, dtype, scope, tokenizer):
    def scored(value):
        model = biased(family, value, dtype, len(tokenizer))
        scorer = Scorer(model, tokenizer=tokenizer, scope=scope, top_k=len(tokenizer))
        return scorer.score(PROMPT, [7, 8, 2]), read(scorer, PROMPT, [7, 8, 2])

    (found, alone), (expected, _) = scored(HIDDEN), scored(SMALL)
    assert found.score == pytest.approx(expected.score, rel=1e-4)
    assert found.msp == pytest.approx(expected.msp, rel=1e-5)
    assert alone.signals["msp"] == pytest.approx(found.msp, rel=1e-5)
    assert found.score > 0
    assert "NaN" not in to_json(found.to_dict())


def test_in_a_run(tokenizer):
    def scored(value):
        host = whitebox()
        host.model = biased("phi", value, torch.float32, len(tokenizer))
        stats = MaskedHeadsCalculator(details=True)(greedy(host, [PROMPT]), [PROMPT], host)
        return {name: values[0] for name, values in stats.items()} | stats["asmi"][0][0.6]

    found, expected = scored(HIDDEN), scored(SMALL)
    for name in ("mi", "kl", "asmi_entropy", "asmi_log_likelihood"):
        assert found[name] == pytest.approx(expected[name], abs=1e-5)


def test_an_answer_with_an_impossible_token_is_refused(tokenizer):
    model = biased("phi", HIDDEN, torch.float32, len(tokenizer))
    scorer, last = Scorer(model, tokenizer=tokenizer), len(tokenizer) - 1
    said = rf"the answer's token 2 of 3 \(id {last}\) has probability 0"
    for score in (scorer.score, partial(read, scorer)):
        with pytest.raises(ValueError, match=said):
            score(PROMPT, [7, last, 2])


@pytest.mark.parametrize(
    ("where", "value", "dtype", "advice"),
    [
        (5, torch.nan, torch.float32, "check its weights"),
        (5, torch.inf, torch.float32, "check its weights"),
        (5, torch.inf, torch.float16, "load the model in bfloat16 or float32"),
        (slice(None), -torch.inf, torch.bfloat16, "check its weights"),
    ],
)
def test_logits_of_no_distribution(where, value, dtype, advice, tokenizer):
    model = biased("phi", 0.0, dtype, len(tokenizer))
    with torch.no_grad():
        model.lm_head.bias[where] = value
    with pytest.raises(FloatingPointError, match="logits that are no distribution") as raised:
        Scorer(model, tokenizer=tokenizer).score(PROMPT, [7, 8, 2])
    assert str(raised.value).startswith(f"PhiForCausalLM ({dtype}) returned")
    assert advice in str(raised.value)
