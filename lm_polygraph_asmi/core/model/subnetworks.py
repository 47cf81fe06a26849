"""The subnetworks of an answer: every distinct mask once, in chunks that fit into memory.

The fastest passes that the self-check trusts are used. Where they fail, the next slower ones are.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from lm_polygraph_asmi.core.model.check import PassFailed, check_unmasked, self_check
from lm_polygraph_asmi.core.model.choice import (
    FULL,
    PASSES,
    MaskedPass,
    passes_to_try,
    warn_slower,
)
from lm_polygraph_asmi.core.model.masked import MaskedModel
from lm_polygraph_asmi.core.model.memory import batch_bytes, default_budget, in_chunks
from lm_polygraph_asmi.core.model.passes import packed, rows_after_prompt
from lm_polygraph_asmi.core.model.unmasked import UnmaskedPass

PACKED_POSITIONS = {"cpu": 256, "gpu": 4096}
"""Most response positions in one packed sequence. Scores of attention are computed for each pair of
them, so on a processor longer ones cost more than fewer passes save."""


@dataclass(frozen=True)
class Subnetworks:
    """Final states of the distinct subnetworks of one example and layer."""

    hidden: Float[Tensor, "distinct T D"]  # after the final norm, where the response is predicted
    counts: Float[Tensor, " distinct"]  # how often each was drawn; sums to S
    index: Int[Tensor, " S"]  # for each of the S drawn masks, its row


def _masks_per_pass(
    f: MaskedModel, unmasked: UnmaskedPass, total: int, budget: int, run: MaskedPass
) -> int:
    """How many of `total` masks to run together within `budget` bytes; at least one."""
    length, before = len(unmasked.final_hidden), unmasked.before
    if run is packed:
        kind = "cpu" if unmasked.final_hidden.device.type == "cpu" else "gpu"
        total = min(total, PACKED_POSITIONS[kind] // length)

    def needed(masks: int) -> int:  # grows with their number
        if run in (packed, rows_after_prompt):
            return batch_bytes(f, masks, length, cached=before, packed=run is packed)
        return batch_bytes(f, masks, before + length)

    # The largest number that needs no more than the budget.
    return max(1, bisect_right(range(1, total + 1), budget, key=needed))


def run_subnetworks(
    f: MaskedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    memory_budget: int | None = None,
    shortcut: bool = True,
) -> Subnetworks:
    """Run the masked passes of S masks; equal masks once.

    Args:
        memory_budget: bytes above weights and cached states; None: `default_budget`. When the
            memory of a device runs out, masks run in smaller chunks.
        shortcut: whether the mask that keeps all heads takes the unmasked states instead of a pass.

    Raises:
        ValueError: a layer without heads, or masks that are not (S, H) zeros and ones.
        RuntimeError: see `check_unmasked`.
    """
    heads = f.num_heads(layer)
    if masks.ndim != 2 or masks.shape[1] != heads or not len(masks):
        raise ValueError(
            f"masks must have shape (S, H = {heads}), one column per query head, got "
            f"{tuple(masks.shape)}"
        )
    if not ((masks == 0) | (masks == 1)).all():
        raise ValueError("masks must contain only 1 (keep) and 0 (mask)")
    # On the CPU, since indices from there fit states on any device.
    distinct, index, counts = masks.cpu().unique(dim=0, return_inverse=True, return_counts=True)
    keeps_all = distinct.bool().all(dim=1) & shortcut
    hidden = unmasked.final_hidden.new_empty(len(distinct), *unmasked.final_hidden.shape)
    hidden[keeps_all] = unmasked.final_hidden
    check_unmasked(f, unmasked)
    if not keeps_all.all():
        budget = memory_budget or default_budget(unmasked.final_hidden.device)
        to_run = ~keeps_all
        hidden[to_run] = _masked_states(f, unmasked, layer, distinct[to_run], budget)
    return Subnetworks(hidden, counts.float(), index)


def _masked_states(
    f: MaskedModel, unmasked: UnmaskedPass, layer: int, masks: Tensor, budget: int
) -> Float[Tensor, "B T D"]:
    """Final states under each mask: by the fastest pass, or by slower ones until one is right.

    Full passes, the last, always are; their errors are raised.
    """
    choice = passes_to_try(f, layer, unmasked.scope)  # one object, which `drop_first` changes
    fastest = next(iter(PASSES[unmasked.scope]))
    if choice.cause:
        warn_slower(f, unmasked, layer, len(masks), choice.cause, fastest)
        choice.cause = None
    while True:
        name = choice.first
        try:
            states = _by_pass(name, f, unmasked, layer, masks, budget)
        except PassFailed as error:
            choice.drop_first()
            cause = f"{name!r} failed the self-check (scope {unmasked.scope}): {error}"
            warn_slower(f, unmasked, layer, len(masks), cause, name)
        else:
            choice.used = True
            return states


def _by_pass(
    name: str, f: MaskedModel, unmasked: UnmaskedPass, layer: int, masks: Tensor, budget: int
) -> Float[Tensor, "B T D"]:
    """Final states under each mask, by a pass of `PASSES`. Raises `PassFailed`: it raised an error,
    but for full passes, whose own errors are raised; or the self-check finds it wrong."""
    run = PASSES[unmasked.scope][name]
    at_once = _masks_per_pass(f, unmasked, len(masks), budget, run)
    try:
        parts = in_chunks(partial(run, f, unmasked, layer), masks, at_once)
    except (torch.OutOfMemoryError, FloatingPointError):
        raise
    except Exception as error:  # models raise different errors
        if name == FULL:
            raise
        raise PassFailed(f"it raised {type(error).__name__}: {error}") from error
    states = torch.cat(parts)
    copies_in_one_pass = max(map(len, parts)) if run is packed else 1
    positions = copies_in_one_pass * len(unmasked.final_hidden)
    self_check(f, unmasked, layer, masks, states, positions)
    return states
