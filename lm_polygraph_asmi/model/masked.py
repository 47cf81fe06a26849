"""The subnetworks of an answer: every distinct mask runs once, in chunks that fit into memory."""

import logging
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.check import (
    PASSES,
    Pass,
    check_unmasked,
    checked,
    failure,
)
from lm_polygraph_asmi.model.heads import num_heads
from lm_polygraph_asmi.model.memory import (
    batch_bytes,
    default_budget,
    in_chunks,
)
from lm_polygraph_asmi.model.passes import (
    UnmaskedPass,
    full_passes,
    packed,
    rows_after_prompt,
)

log = logging.getLogger("lm_polygraph")

PACKED_POSITIONS = {"cpu": 256, "gpu": 4096}
"""Most response positions in one packed sequence. Each is compared with all others, so longer ones
cost a processor more than fewer passes save."""


@dataclass(frozen=True)
class Subnetworks:
    """Final states of the distinct subnetworks of one example and layer."""

    hidden: Float[Tensor, "distinct T D"]  # after the final norm, where the response is predicted
    counts: Float[Tensor, " distinct"]  # how often each was drawn; sums to S
    index: Int[Tensor, " S"]  # for each of the S drawn masks, its row


def _masks_per_pass(
    model: PreTrainedModel, unmasked: UnmaskedPass, total: int, budget: int, way: Pass
) -> int:
    """How many of `total` masks to run together within `budget` bytes; at least one."""
    length, before = len(unmasked.final_hidden), unmasked.before
    if way is packed:
        kind = "cpu" if unmasked.final_hidden.device.type == "cpu" else "gpu"
        total = min(total, PACKED_POSITIONS[kind] // length)

    def needed(masks: int) -> int:  # grows with their number
        if way in (packed, rows_after_prompt):
            return batch_bytes(model, masks, length, cached=before, packed=way is packed)
        return batch_bytes(model, masks, before + length)

    return max(1, bisect_right(range(1, total + 1), budget, key=needed))


def run_subnetworks(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    memory_budget: int | None = None,
    shortcut: bool = True,
) -> Subnetworks:
    """Run the masked passes of S masks, in a session; equal masks once, the all-ones mask not at
    all unless `shortcut` is False.

    `memory_budget`: bytes above weights and cached states; None: `default_budget`. When memory
    runs out, chunks are halved and nothing is lost. Raises ValueError: a layer without heads, or
    masks that are not (S, H) zeros and ones; RuntimeError: see `check_unmasked`.
    """
    heads = num_heads(model, layer)
    if masks.ndim != 2 or masks.shape[1] != heads or not len(masks):
        raise ValueError(
            f"masks must have shape (S, H = {heads}), one column per query head, got "
            f"{tuple(masks.shape)}"
        )
    if not ((masks == 0) | (masks == 1)).all():
        raise ValueError("masks must contain only 1 (keep) and 0 (mask)")
    # On the CPU, since indices from there fit states on any device.
    distinct, index, counts = masks.cpu().unique(dim=0, return_inverse=True, return_counts=True)
    kept = distinct.bool().all(dim=1) & shortcut
    masked = distinct[~kept]
    hidden = unmasked.final_hidden.new_empty(len(distinct), *unmasked.final_hidden.shape)
    hidden[kept] = unmasked.final_hidden
    check_unmasked(model, unmasked)
    budget = memory_budget or default_budget(unmasked.final_hidden.device)
    names = checked(model, layer, unmasked.scope).names
    wrong: str | None
    while len(masked):
        way = PASSES[unmasked.scope][names[0]]
        chunk = _masks_per_pass(model, unmasked, len(masked), budget, way)
        try:
            states = torch.cat(in_chunks(partial(way, model, unmasked, layer), masked, chunk))
        except (torch.OutOfMemoryError, FloatingPointError):
            raise
        except Exception as error:  # models raise different errors
            if way is full_passes:
                raise
            wrong = f"{type(error).__name__}: {error}"
        else:
            hidden[~kept] = states
            positions = len(unmasked.final_hidden) * (chunk if way is packed else 1)
            wrong = failure(model, unmasked, layer, masked, states, positions)
        if wrong is None:
            break
        slow = names.pop(0)
        log.warning(
            "%s: %r failed the self-check (scope %s): %s. Using %r, which is slower",
            type(model).__name__, slow, unmasked.scope, wrong, names[0],
        )  # fmt: skip
    return Subnetworks(hidden, counts.float(), index)
