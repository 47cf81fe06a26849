"""Masked passes whatever the family: compiled modules, refusals.

What they compute is compared with full passes, family by family, in test_on_device.py.
"""

import pytest
import torch

from tests.families import (
    IDS,
    PROMPT,
    masks,
    subnetwork_log_probs,
    tiny_model,
)


def test_modules_compiled_in_place_are_run_as_written():
    """A compiled layer would go on as it was, whatever masks its heads."""
    model = tiny_model("llama")
    expected = subnetwork_log_probs(model, IDS, PROMPT, 2, masks())
    layer = model.model.layers[2]
    layer.compile(backend="eager")
    call = layer._compiled_call_impl
    model(input_ids=IDS[None])
    assert torch.equal(subnetwork_log_probs(model, IDS, PROMPT, 2, masks()), expected)
    assert layer._compiled_call_impl is call


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
