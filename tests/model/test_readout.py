"""From final states to distributions, and the rows of the unembedding."""

import pytest
import torch
from torch import nn

from lm_polygraph_asmi.core.identity import model_key
from lm_polygraph_asmi.core.model import check, masked_model, model_state, plain_model
from lm_polygraph_asmi.core.model.readout import readout, unembedding
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


def test_the_unembedding_of_16_bits_is_read_out_in_32():
    """With its bias; also if accelerate has wrapped it."""
    hooks = pytest.importorskip("accelerate.hooks")
    model, wrapped = (tiny_model("llama").to(torch.bfloat16) for _ in range(2))
    for head in (model.lm_head, wrapped.lm_head):
        head.bias = nn.Parameter(torch.arange(61).bfloat16() / 8)
    hooks.add_hook_to_module(wrapped.lm_head, hooks.ModelHook())
    hidden = torch.randn(5, 3, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits = hidden.double() @ model.lm_head.weight.double().T + model.lm_head.bias.double()
    expected = logits.log_softmax(-1)
    with masked_model(model) as f, masked_model(wrapped) as other:
        found = readout(f, hidden)
        assert torch.equal(found, readout(other, hidden))
        rounded = model.lm_head(hidden).float().log_softmax(-1)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 < 1e-3 < (rounded - expected).abs().max()


def lora(**settings: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    own = {"r": 4, "target_modules": ["lm_head"], "init_lora_weights": False} | settings
    config, model = peft.LoraConfig(task_type="CAUSAL_LM", **own), tiny_model("llama")
    model.lm_head.bias = nn.Parameter(torch.ones(61))  # no part of the unembedding
    return peft.get_peft_model(model, config).eval()


def test_the_scaling_of_an_adapter_counts():
    whole = lora(lora_alpha=4)
    weak, strong = plain_model(whole), plain_model(lora(lora_alpha=32))
    before, key = model_state(weak), model_key(weak)
    assert key != model_key(strong)
    assert key == model_key(plain_model(lora(lora_alpha=4)))
    with whole.disable_adapter():
        assert model_state(weak) != before
        assert model_key(weak) != key
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
