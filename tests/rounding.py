"""What a model's own arithmetic makes of the same tokens: the control of bounds in 32 bits."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

TIMES = 4.0
"""So many times the control is allowed: each side of a comparison takes two of these ways."""
MOST = 1e-3  # A control above it is no rounding, and would make a test that cannot fail


def allowed(model: PreTrainedModel, input_ids: Tensor) -> float:
    """By how much log-probabilities of a sequence may differ, and means of them, in nats.

    `TIMES` what the model differs by from itself, with nothing of this package involved: run whole,
    beside other rows, and token by token over its own cache, if it has one. The control is at least
    two units in the last place of the largest log-probability.
    """
    ids = input_ids[None, :-1]
    with torch.no_grad():
        variants = [
            model(input_ids=ids, use_cache=False).logits,
            model(input_ids=torch.cat([ids.flip(1), ids, ids]), use_cache=False).logits[1:2],
        ]
        steps, cache = [], None
        for token in ids.split(1, dim=1):
            out = model(input_ids=token, past_key_values=cache, use_cache=True)
            cache = out.get("past_key_values")
            steps.append(out.logits)
        if cache is not None:
            variants.append(torch.cat(steps, dim=1))
    whole, *others = (logits.float().log_softmax(-1) for logits in variants)
    control = max((other - whole).abs().max().item() for other in others)
    assert control < MOST
    return TIMES * max(control, 2 * torch.finfo(torch.float32).eps * whole.abs().max().item())
