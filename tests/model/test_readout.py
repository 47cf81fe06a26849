"""From final states to distributions, and the rows of the unembedding."""

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

from lm_polygraph_asmi.core.identity import model_key
from lm_polygraph_asmi.core.model import check, plain_model, readout, unembedding
from tests.families import (
    IDS,
    PROMPT,
    masks,
    of_model,
    subnetwork_log_probs,
    tiny_class,
    tiny_model,
)

in_32_and_16_bits = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@in_32_and_16_bits
def test_a_logit_scale_that_is_ignored_is_seen_in_16_bits(dtype, monkeypatch):
    """0.9 on the logits of a confident model: within 0.5 nats, far outside rounding."""
    model, other = (tiny_class("CohereForCausalLM", logit_scale=0.9).to(dtype) for _ in range(2))
    subnetwork_log_probs(model, IDS, PROMPT, 1, masks())  # as it is, it is scored
    direct = check.readout
    monkeypatch.setattr(check, "readout", lambda *a, **k: (direct(*a, **k) / 0.9).log_softmax(-1))
    with pytest.raises(RuntimeError, match=r"final states do not give .* Nothing was scored"):
        subnetwork_log_probs(other, IDS, PROMPT, 1, masks())


@in_32_and_16_bits
def test_an_unembedding_whose_own_forward_was_replaced_is_called_as_it_is(dtype):
    model = tiny_model("llama").to(dtype)
    head = model.lm_head
    head.forward = lambda states: nn.functional.linear(states, head.weight) * 0.5
    logits = model(input_ids=IDS[None, :-1]).logits[0, PROMPT - 1 :]
    found = subnetwork_log_probs(model, IDS, PROMPT, 2, torch.cat([torch.ones(1, 4), masks()]))
    torch.testing.assert_close(found[0], logits.float().log_softmax(-1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_unembedding_of_16_bits_is_read_out_in_32(wrapped):
    """With its bias; also if accelerate has wrapped it."""
    model = tiny_model("llama").to(torch.bfloat16)
    head = model.lm_head
    head.bias = nn.Parameter(torch.arange(61).bfloat16() / 8)
    if wrapped:
        add_hook_to_module(head, ModelHook())
    hidden = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = (hidden.double() @ head.weight.double().T + head.bias.double()).log_softmax(-1)
    found, rounded = of_model(readout, model, hidden), head(hidden).float().log_softmax(-1)
    assert found.dtype == torch.float32
    assert (found - exact).abs().max() < 1e-5 < 1e-3 < (rounded - exact).abs().max()


def lora(**settings: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    own = {"r": 4, "target_modules": ["lm_head"], "init_lora_weights": False} | settings
    config, model = peft.LoraConfig(task_type="CAUSAL_LM", **own), tiny_model("llama")
    model.lm_head.bias = nn.Parameter(torch.ones(61))  # no part of the unembedding
    return peft.get_peft_model(model, config).eval()


def test_the_scaling_of_an_adapter_counts():
    weak, strong, same = (plain_model(lora(lora_alpha=alpha)) for alpha in (4, 32, 4))
    key = model_key(weak)
    assert model_key(strong) != key == model_key(same)
    assert not torch.allclose(of_model(unembedding, weak), of_model(unembedding, strong))
    weak.lm_head.set_scale("default", 8)
    assert model_key(weak) != key
    torch.testing.assert_close(of_model(unembedding, weak), of_model(unembedding, strong))


@pytest.mark.parametrize(
    "more", [{}, {"use_rslora": True}, {"target_modules": ["q_proj"]}, {"use_dora": True}]
)
def test_the_unembedding_has_the_adapters_part(more):
    """As the merged weights have it; DoRA's is not added but computed anew."""
    model = lora(lora_alpha=16, **more)
    found = of_model(unembedding, model)
    with model.disable_adapter():
        bare = of_model(unembedding, model)
    torch.testing.assert_close(bare, tiny_model("llama").lm_head.weight.detach())
    assert torch.equal(found, bare) == ("target_modules" in more)
    merged = of_model(unembedding, model.merge_and_unload())
    torch.testing.assert_close(found, merged, atol=1e-5, rtol=1e-4)
