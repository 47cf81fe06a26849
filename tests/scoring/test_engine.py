"""Statistics of an answer: at several depths, and of tokens that cannot be."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core import algorithm
from lm_polygraph_asmi.core.engine import Engine
from tests.families import SIZES, sequence, tiny_model
from tests.rounding import allowed

PROMPT = 9
SETTINGS = {"num_masks": 6, "mask_rate": 0.4, "top_k": 8}
IDS = sequence(14)
ANSWER = (IDS[:PROMPT], IDS[PROMPT:].tolist())
TOKEN_STATISTICS = ("mi", "entropy", "log_likelihood", "entropy_of_mean", "tail_mass")


def assert_close(found, expected, most, names, rtol=0.0):
    for name in names:
        own, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(own, other, rtol=rtol, atol=most, err_msg=name)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("scope", SCOPES)
def test_depths_share_the_unmasked_pass(llama, monkeypatch, scope):
    unmasked = Mock(side_effect=algorithm.run_unmasked)
    monkeypatch.setattr(algorithm, "run_unmasked", unmasked)
    engine, depths = Engine(scope=scope, **SETTINGS), [0.3, 0.9]
    together = engine.score(llama, *ANSWER, depths=depths)
    unmasked.assert_called_once()
    for depth, shared in zip(depths, together, strict=True):
        (apart,) = Engine(scope=scope, depth=depth, **SETTINGS).score(llama, *ANSWER)
        assert_close(shared, apart, allowed(llama, IDS), TOKEN_STATISTICS)
        assert shared.mask_seed == apart.mask_seed
        assert shared.settings == apart.settings == engine.settings(llama, depth)
    assert len({tuple(each.mi.round(6)) for each in together}) == 2


UNUSED = slice(-16, None)
# What a model may write for a token that it never says; in 32 bits both are probability 0.
HIDDEN, SMALL = -torch.inf, -1e4


def phi(bias: float, at: slice | int = UNUSED, dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    model = transformers.PhiForCausalLM(transformers.PhiConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
        model.lm_head.bias[at] = bias
    return model.to(dtype)


def masking(value: float):
    model = tiny_model("gpt2")

    class Masking(type(model)):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits[..., UNUSED] = value
            return output

    model.__class__ = Masking
    return model


@pytest.mark.parametrize(
    ("make", "scope"),
    [
        *((phi, scope) for scope in SCOPES),
        (lambda value: phi(value, dtype=torch.float16), "all"),
        (masking, "response"),
    ],
    ids=["bias", "bias after the prompt", "float16", "own forward"],
)
def test_a_logit_of_minus_infinity_is_probability_0(make, scope):
    engine = Engine(scope=scope, details=True, **SETTINGS | {"top_k": SIZES["vocab_size"]})
    prompt, answer = ANSWER[0], [7, 8, 2]
    (found,), (expected,) = (engine.score(make(v), prompt, answer) for v in (HIDDEN, SMALL))
    assert_close(
        found, expected, 1e-6, ("mi", "agreement", "kl", "entropy", "log_likelihood"), rtol=1e-4
    )
    assert found.mi.min() > 0
    alone = engine.read(make(HIDDEN), prompt, answer)["log_likelihood"]
    np.testing.assert_allclose(alone, found.log_likelihood, rtol=1e-5)


def test_an_answer_with_an_impossible_token_is_refused():
    engine, last = Engine(**SETTINGS), SIZES["vocab_size"] - 1
    for score in (engine.score, engine.read):
        with pytest.raises(ValueError, match=rf"token 2 of 3 \(id {last}\)"):
            score(phi(HIDDEN), ANSWER[0], [7, last, 2])


@pytest.mark.parametrize(
    ("bias", "at", "dtype", "advice"),
    [
        (torch.nan, 5, torch.float32, "check its weights"),
        (torch.inf, 5, torch.float16, "load the model in bfloat16 or float32"),
        (-torch.inf, slice(None), torch.bfloat16, "check its weights"),
    ],
)
def test_logits_of_no_distribution(bias, at, dtype, advice):
    with pytest.raises(FloatingPointError, match=rf"PhiForCausalLM \({dtype}\).*{advice}"):
        Engine(**SETTINGS).score(phi(bias, at, dtype), *ANSWER)


def test_what_is_read_without_masks_is_checked_too():
    def negate(_module, _given, output):
        output.last_hidden_state = -output.last_hidden_state

    (model := tiny_model("llama")).model.register_forward_hook(negate)
    with pytest.raises(RuntimeError, match="final states do not give"):
        Engine().read(model, *ANSWER)
