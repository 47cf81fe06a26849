"""The check: when it is made, what it sees, and that a pass that fails is slow, never wrong."""

import math
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from random import Random
from types import MethodType
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core.model import (
    attention_of,
    check,
    choice,
    forwards,
    masked_model,
    rounding,
    run_unmasked,
    structure_of,
    subnetworks,
)
from tests.families import (
    FAMILIES,
    PROMPT,
    apart,
    both_scopes,
    full_passes,
    masks,
    of_model,
    sequence,
    subnetwork_log_probs,
    tiny_class,
    tiny_model,
)


@pytest.fixture
def compares(monkeypatch):
    """Whether passes are compared with full ones for a text."""
    whole = Mock(side_effect=check.full_passes)
    monkeypatch.setattr(check, "full_passes", whole)

    def compares(model, ids, prompt=PROMPT, layer=2, **how) -> bool:
        whole.reset_mock()
        subnetwork_log_probs(model, ids, prompt, layer, masks(6), **how)
        return whole.called

    return compares


def score(model, length=17, layer=2, **how) -> torch.Tensor:
    return subnetwork_log_probs(model, sequence(length), PROMPT, layer, masks(6), **how)


def error(model, ids, scope, prompt=PROMPT, **how) -> float:
    """Total variation between the package and full passes, at the worst position."""
    found = subnetwork_log_probs(model, ids, prompt, 1, masks(), scope=scope, **how)
    expected = full_passes(FAMILIES["llama"], model, ids, prompt, scope, layer=1)
    assert apart(expected, expected[:1].expand_as(expected)) > 1e-3  # masks change something
    return apart(found, expected)


@both_scopes
def test_every_pass_is_right_one_mask_at_a_time(scope, monkeypatch):
    """As where memory is short: no batch changes what the next one reads."""
    for name in list(choice.PASSES[scope]):
        model = tiny_model("llama")
        assert error(model, sequence(17), scope, memory_budget=1) < 1e-5, name
        assert of_model(choice.passes_in_use, model, scope) == [name]
        # The next is used.
        monkeypatch.setitem(choice.PASSES[scope], name, Mock(side_effect=KeyError))


@pytest.mark.parametrize(("positions", "equal"), [(2, 0), (30, 29), (30, 10), (4, 4)])
def test_variation_is_the_mean_or_a_tenth_of_the_largest(positions, equal):
    p, q = torch.randn(2, positions, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    q[:equal] = p[:equal]
    pairs = zip(p.tolist(), q.tolist(), strict=True)
    each = [sum(abs(a - b) for a, b in zip(*pair, strict=True)) / 2 for pair in pairs]
    expected = max(sum(each) / positions, max(each) / 10)
    assert rounding.variation(p.log(), q.log()) == pytest.approx(expected, rel=1e-5)


@both_scopes
def test_it_is_made_again_for_more_than_twice_the_lengths_that_were_compared(
    compares, scope, monkeypatch
):
    """Of a prompt, or of the answers in one pass; a text that was not compared vouches for none."""
    monkeypatch.setitem(subnetworks.PACKED_POSITIONS, "cpu", 120)  # copies of short answers alone
    model, distinct, draw = tiny_model("llama"), len(masks(6).unique(dim=0)), Random(4)
    texts = [(draw.randint(1, 2 * n), draw.randint(1, 2 * n)) for n in range(1, 17)]
    compared = [(0, 0)]
    for prompt, response in texts:
        packed = min(distinct, subnetworks.PACKED_POSITIONS["cpu"] // response)
        lengths = prompt - 1, response * (packed if scope == "response" else 1)
        longest = map(max, zip(*compared, strict=True))
        due = any(now > 2 * most for now, most in zip(lengths, longest, strict=True))
        found = compares(model, sequence(prompt + response), prompt, scope=scope)
        assert found == due, (prompt, response)
        compared += [lengths] * due
    assert 3 < len(compared) < len(texts)


def test_it_is_made_for_every_layer_scope_attention_and_state(compares):
    model, ids = tiny_model("llama"), sequence(17)
    made = [
        compares(model, ids, layer=layer, scope=scope, attention=attention)
        for layer, scope, attention in (
            (2, "all", None), (1, "all", None), (1, "response", None), (1, "response", "sdpa")
        )
        for _ in range(2)
    ]  # fmt: skip
    assert made == [True, False] * 4
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(1.5)
    assert compares(model, ids, layer=1)


WRONG, FAILS = "it differs from full passes", "it raised KeyError"
NO_NUMBER = "it differs from full passes by a total variation of inf"


@both_scopes
@pytest.mark.parametrize(
    ("row", "spoilt"),
    [
        (0, ((0, WRONG), (0, FAILS))),
        (-1, ((0, WRONG), (0, FAILS))),
        (-1, ((30, WRONG), (30, FAILS))),
        # What the first compared says nothing of the next, whose answer is no longer.
        (0, ((14, FAILS), (0, WRONG))),
        (0, ((0, NO_NUMBER), (0, NO_NUMBER))),
    ],
)
def test_a_pass_that_is_wrong_or_fails_is_never_believed(scope, row, spoilt, monkeypatch, caplog):
    """From some length of a text on: passes but the slowest."""

    def run_spoilt(run, length, how, model, unmasked, *rest):
        found = run(model, unmasked, *rest).clone()
        if len(unmasked.input_ids) >= length:
            if how is FAILS:
                raise KeyError("of a model")
            found[row] += math.nan if how is NO_NUMBER else 0.3
        return found

    names = list(choice.PASSES[scope])
    for name, how in zip(names, spoilt, strict=False):
        own = partial(run_spoilt, choice.PASSES[scope][name], *how)
        if name == "packed":  # which packs all masks
            monkeypatch.setattr(subnetworks, name, own)
        monkeypatch.setitem(choice.PASSES[scope], name, own)
    caplog.set_level("WARNING", "lm_polygraph")
    model = tiny_model("llama")
    for length in (13, 17, 60, 17):
        assert error(model, sequence(length), scope) < 1e-5
    assert of_model(choice.passes_in_use, model, scope) == [choice.FULL]
    for said, at, (_, why) in zip(caplog.messages, range(2), spoilt, strict=True):
        times = {"suffix": "1.0 times", "suffix in rows": "1.3 times"}.get(names[at], "")
        assert f"{names[at]!r} failed the self-check (scope {scope}): {why}" in said
        assert f"Using {names[at + 1]!r} instead of {names[at]!r}, which is {times}" in said


@pytest.mark.parametrize("all_fail", [True, False])
def test_an_error_of_full_passes_is_raised(all_fail, monkeypatch):
    """Also as the reference alone, when the faster pass is not to blame."""
    fails, model = Mock(side_effect=KeyError("of a model")), tiny_model("llama")
    with monkeypatch.context() as patch:
        patch.setattr(check, "full_passes", fails)
        if all_fail:
            patch.setitem(choice.PASSES, "all", dict.fromkeys(choice.PASSES["all"], fails))
        with pytest.raises(KeyError, match="of a model"):
            score(model)
    score(model)
    assert of_model(choice.passes_in_use, model, "all") == [choice.FULL if all_fail else "suffix"]


class Unmasked(LlamaAttention):
    """Causal by itself, whatever mask it is given."""

    def forward(self, *, attention_mask: Tensor, **given: Any) -> Any:
        queries, keys = attention_mask.shape[-2:]
        own = torch.full((1, 1, queries, keys), float("-inf")).triu(1 + keys - queries)
        return super().forward(attention_mask=own, **given)


class Capacity(LlamaMLP):
    """Experts that take so many tokens of a whole batch and no more."""

    def forward(self, x: Tensor) -> Tensor:
        chance, expert = self.up_proj(x.flatten(0, 1))[:, :4].softmax(-1).max(-1)
        place = F.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None])[:, 0]
        taken = chance * (place <= int(len(chance) / 4 + 1))
        return super().forward(x) * taken.view(*x.shape[:2], 1)


class OneRow(LlamaRMSNorm):
    """Returns the first row alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:1]


def odd(trait: type[nn.Module], at: str, **own: Any) -> nn.Module:
    model = tiny_model("llama", **own)
    for module in [part for path, part in model.named_modules() if path.endswith(at)]:
        module.__class__ = trait
    return model


KERNELS = {
    "LlamaRMSNorm": lambda self, x: F.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon),
    "SiLUActivation": lambda _, x: x * x.sigmoid(),
    "LlamaRotaryEmbedding": lambda self, x, position_ids: type(self).forward(self, x, position_ids),
}
"""Forward methods as in a library of kernels."""


def kernelized(model: nn.Module | None = None) -> nn.Module:
    """As `use_kernels=True` of transformers leaves a model."""
    model = model or tiny_model("llama")
    found = [module for module in model.modules() if type(module).__name__ in KERNELS]
    assert len(found) > 8
    for module in found:
        module.forward = MethodType(KERNELS[type(module).__name__], module)
    return model


def first_row_alone(x: Tensor) -> Tensor:
    return torch.cat([x[:1] * 1.5, x[1:]])


def hooked(change: Callable[[Any], Any], at: str = "layers.3.mlp") -> nn.Module:
    model = tiny_model("llama")
    model.model.get_submodule(at).register_forward_hook(lambda *call: change(call[-1]))
    return model


def overwritten() -> nn.Module:
    """By what belongs to the position before."""
    module = (model := tiny_model("llama")).model.layers[3].mlp
    module.forward = lambda x, own=module.forward: F.pad(own(x), (0, 0, 1, 0))[:, :-1]
    return model


NO_MEMORY = Mock(side_effect=torch.OutOfMemoryError("no memory is left"))
ROWS, PLACE = "rows after the prompt", "model.layers.3.mlp does not act on each position alike"


@both_scopes
@pytest.mark.parametrize(
    ("make", "ways", "told", "reason"),
    [
        (partial(odd, Unmasked, "self_attn"), ("suffix", ROWS), (0, 1), "self-check"),
        (partial(odd, Capacity, "mlp"), (choice.FULL, choice.FULL), (2, 2), "self-check"),
        (partial(odd, OneRow, "model.norm"), (choice.FULL, "packed"), (2, 0), "rows, got 1"),
        *((make, ("suffix", "packed"), (0, 0), None) for make in (
            kernelized, partial(hooked, lambda x: x * 1.1, "layers.1.self_attn.o_proj"))),
        *((partial(hooked, change, at), (choice.FULL, choice.FULL), (1, 1), f"{at} does not act")
          for at, change in {
              "layers.1.self_attn": lambda output: (output[0] + 0.3, *output[1:]),
              # Positions that the first text does not have.
              "layers.2": lambda x: torch.cat([x[:, :25], x[:, 25:] + 2], dim=1),
          }.items()),
        *((make, (choice.FULL, choice.FULL), (1, 1), PLACE)
          for make in (overwritten, *(
              partial(hooked, change) for change in (
                  first_row_alone,
                  # One position, that the first text does not have.
                  lambda x: torch.cat([x[:, :25], 1.5 * x[:, 25:26], x[:, 26:]], dim=1),
                  lambda x: x.mean(0, keepdim=True),  # one row of several
                  lambda x: x.view(1, *x.shape[1:]),  # takes one row alone
              )))),
    ],
)  # fmt: skip
def test_what_a_faster_pass_gets_wrong_is_told_once_and_run_slower(
    make, ways, told, reason, scope, caplog
):
    caplog.set_level("WARNING", "lm_polygraph")
    model, at = make(), SCOPES.index(scope)
    for length, seed in ((24, 0), (60, 3)):
        assert error(model, sequence(length, seed), scope, prompt=15) < 1e-5, (length, seed)
    assert of_model(choice.passes_in_use, model, scope) == [ways[at]]
    assert [reason in message for message in caplog.messages] == [True] * told[at]


@pytest.mark.parametrize(
    ("at", "change", "reason"),
    [
        # Noise that sets in with the length of a text.
        ("layers.3.mlp", lambda x: x * (1 + torch.rand(()) * (x.shape[1] > 13)), "final states"),
        ("layers.3.mlp", lambda x: x / (x.shape[1] != 23), "LlamaForCausalLM.* check its weights"),
        ("", lambda output: Mock(**output), "return a tensor"),
        # Memory that runs out in the first short texts, or where code of others gets a long one.
        *(("layers.3.mlp", lambda x, most=most: x if x.shape[1] <= most else NO_MEMORY(),
           "no memory is left") for most in (0, 100)),
    ],
)  # fmt: skip
def test_what_else_is_wrong_with_a_model_is_told(at, change, reason):
    with pytest.raises((RuntimeError, FloatingPointError), match=reason):
        score(hooked(change, at), 24)


@pytest.mark.parametrize("attention", [LlamaAttention, Unmasked])
def test_angles_that_switch_between_prompt_and_response(attention):
    """Also where no pass is packed, and the first text, which is checked, is too short."""
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}  # fmt: skip
    model = odd(attention, "self_attn", rope_parameters=long)
    for length, prompt in ((14, 8), (28, 4), (28, 24)):
        for scope in SCOPES:
            assert error(model, sequence(length), scope, prompt) < 1e-5


@pytest.mark.parametrize(("explained", "name"), [(0.005, choice.FULL), (0.02, "suffix")])
def test_a_model_in_16_bits_may_differ_by_what_its_own_rounding_explains(
    explained, name, monkeypatch
):
    """Measured on the model: the same pass under another attention implementation."""
    model = tiny_model("llama").to(torch.bfloat16)
    structure_of(model)
    monkeypatch.setattr(subnetworks, "check_unmasked", lambda *_: None)
    monkeypatch.setattr(check, "variation", lambda *_: 0.035)
    monkeypatch.setattr(check, "_rounding", lambda *_: explained)
    score(model)
    assert of_model(choice.passes_in_use, model, "all") == [name]


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [("llama", torch.float32, 0), ("llama", torch.bfloat16, 0.02),
     ("gemma2-softcap", torch.bfloat16, 0)],
)  # fmt: skip
def test_rounding_is_measured_between_two_attentions_in_16_bits(name, dtype, most):
    model = tiny_model(name).to(dtype)
    with masked_model(model) as f:
        found = check._rounding(f, run_unmasked(f, sequence(17), PROMPT, [2]))
        assert found == 0 if most == 0 else 1e-6 < found < most
    assert attention_of(model) == "eager"


def test_final_states_are_compared_with_caches_and_without_and_with_each_attention(monkeypatch):
    """Also where no pass is, since masks keep all heads."""
    compared, model = Mock(wraps=check.own_logits), tiny_model("llama", "sdpa")
    monkeypatch.setattr(check, "own_logits", compared)
    for number, how in enumerate(
        ({"scope": "all"}, {"scope": "response"}, {"attention": "eager"}), start=1
    ):
        for _ in range(2):
            subnetwork_log_probs(model, sequence(17), PROMPT, 2, torch.ones(3, 4), **how)
            assert compared.call_count == number


def blind_attention(_module, query, key, value, mask, scaling=None, **_):
    """Causal by itself, as flash attention is; takes no mask, and sees other keys after a cache."""
    assert mask is None
    assert len(query) == len(key)  # or SDPA has no fused kernel
    attend = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return attend(query, key, value, scale=scaling).transpose(1, 2), None


transformers.AttentionInterface.register("blind", blind_attention)


def test_a_class_without_faster_passes_is_scored_and_told_of_once(caplog):
    model = tiny_class("OpenAIGPTLMHeadModel")
    for layer in (1, 1, 2):
        score(model, layer=layer)
    (told,) = caplog.messages
    assert "no faster pass is right for its class" in told
    assert "1.3 times the work" in told  # layer 1 of 4


@both_scopes
def test_attention_that_takes_no_mask(scope, caplog):
    model = tiny_model("llama")
    found = score(model, scope=scope, attention="blind")
    used = of_model(choice.passes_in_use, model, scope, attention="blind")
    assert used == ["suffix" if scope == "all" else choice.FULL]
    words = ("takes no mask.* 1.8 times", f"{ROWS!r} failed.* 2.9 times")
    for word, said in zip(words if scope == "response" else (), caplog.messages, strict=True):
        assert re.search(word, said)
    # With another attention nothing was scored.
    assert of_model(choice.passes_in_use, model, scope) == []
    torch.testing.assert_close(found, score(model, scope=scope, attention="eager"))


def test_keys_and_values_that_are_shared_have_the_rows_of_the_states():
    model = tiny_class("Gemma4ForCausalLM")
    for layer in range(4):
        score(model, layer=layer, attention="blind")
    assert of_model(choice.passes_in_use, model, "all", attention="blind") == ["suffix"]


@pytest.mark.parametrize(
    ("name", "scope", "kernels"),
    [
        ("llama", "all", True),
        pytest.param("llama", "all", False, marks=pytest.mark.slow),
        pytest.param("gemma3-mixed", "response", False, marks=pytest.mark.slow),
    ],
)
def test_compiled_layers_share_their_graphs(name, scope, kernels, monkeypatch):
    """Layers have the graphs of those above them, and compute the same."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    forwards.compiled_forward.cache_clear()
    graphs = torch._dynamo.utils.counters["stats"]
    model = tiny_model(name, "sdpa")
    model, made = kernelized(model) if kernels else model, [graphs["unique_graphs"]]
    for layer, length in product((1, 0), (17, 19)):
        found = score(model, length, layer, scope=scope, compiles=True)
        torch.testing.assert_close(found, score(model, length, layer, scope=scope))
        made.append(graphs["unique_graphs"])
    assert made[0] < made[2] == made[4]
    torch._dynamo.reset()
    forwards.compiled_forward.cache_clear()
