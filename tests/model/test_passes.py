"""Masked passes whatever the family: masks, hooks of others, compiled modules, refusals.

What they compute is compared with full passes, family by family, in test_on_device.py.
"""

import pytest
import torch

from tests.families import (
    FAMILIES,
    IDS,
    PROMPT,
    both_scopes,
    full_passes,
    masks,
    sequence,
    subnetwork_log_probs,
    tiny_model,
)
from tests.rounding import allowed


def late(hidden):
    """At positions that the first text, which is the one that is checked, does not have."""
    return torch.cat([hidden[:, :18], hidden[:, 18:] + 2], dim=1)


def before(layers):
    layers[3].register_forward_pre_hook(lambda _, args: (late(args[0]),))


def behind(layers):
    """Steering of heads, layers and their outputs."""
    attention = layers[2].self_attn
    attention.register_forward_hook(lambda *call: (call[-1][0] + 0.3, *call[-1][1:]))
    attention.o_proj.register_forward_hook(lambda *call: call[-1] * 1.1)
    layers[2].register_forward_hook(lambda *call: late(call[-1]))


@pytest.mark.parametrize("steer", [before, behind])
@both_scopes
def test_hooks_of_others_are_part_of_the_model(scope, steer):
    """Scored as the brute force finds it."""
    model, texts = tiny_model("llama"), (sequence(18, seed=18), sequence(21, seed=21))
    most = allowed(model, texts[1])  # before the hooks, to which a cache is no sequence
    steer(model.model.layers)
    for prompt, ids in zip((12, 14), texts, strict=True):
        fast = subnetwork_log_probs(model, ids, prompt, 2, masks(), scope=scope)
        slow = full_passes(FAMILIES["llama"], model, ids, prompt, scope)
        torch.testing.assert_close(fast, slow, atol=most, rtol=0)


def test_modules_compiled_in_place_are_run_as_written():
    """A compiled layer would go on as it was, whatever masks its heads."""
    model = tiny_model("llama")
    expected = subnetwork_log_probs(model, IDS, PROMPT, 2, masks())
    compiled = model.model.layers[2:]
    calls = [layer.compile(backend="eager") or layer._compiled_call_impl for layer in compiled]
    model(input_ids=IDS[None])
    assert torch.equal(subnetwork_log_probs(model, IDS, PROMPT, 2, masks()), expected)
    assert [layer._compiled_call_impl for layer in compiled] == calls


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"input_ids": torch.ones(1, 17).long()}, r"input_ids .*\(1, 17\)"),
        ({"prompt_length": 17}, "response"),
        ({"prompt_length": 0}, "prompt"),
        ({"input_ids": torch.ones(129).long()}, "window of 128"),
        ({"input_ids": torch.full((17,), 61)}, r"token ids .*60"),
        ({"layer": -1}, "layer .*got -1"),
        ({"layer": 4}, "layer .*got 4"),
        ({"masks": torch.ones(3, 2)}, r"masks .*\(3, 2\)"),
        ({"masks": torch.ones(0, 4)}, r"masks"),
        ({"masks": torch.full((3, 4), 0.5)}, "masks"),
    ],
    ids=str,
)
def test_refusals(llama, given, said):
    usual = {"input_ids": IDS, "prompt_length": PROMPT, "layer": 2, "masks": masks()}
    with pytest.raises(ValueError, match=said):
        subnetwork_log_probs(llama, **usual | given)
