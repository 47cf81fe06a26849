"""The subnetworks of an answer: every distinct mask runs once, in chunks that fit into memory."""

import logging
import time
from bisect import bisect_right
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.model.check import (
    PASSES,
    Pass,
    check_unmasked,
    checked,
    failure,
    keeps_cache,
)
from lm_polygraph_asmi.model.devices import execution_device
from lm_polygraph_asmi.model.heads import num_heads, output_embeddings, plain_model
from lm_polygraph_asmi.model.memory import (
    batch_bytes,
    default_budget,
    distributions_at_once,
    in_chunks,
)
from lm_polygraph_asmi.model.passes import (
    UnmaskedPass,
    full_passes,
    packed,
    rows_after_prompt,
    run_unmasked,
)
from lm_polygraph_asmi.model.readout import readout
from lm_polygraph_asmi.model.session import scoring_session

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
    check_seconds: float = 0.0  # of the comparison with full passes


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
    start = time.perf_counter()
    check_unmasked(model, unmasked)
    seconds = time.perf_counter() - start
    budget = memory_budget or default_budget(unmasked.final_hidden.device)
    names = checked(model, layer, unmasked.scope).names
    wrong: str | None
    while len(masked):
        start, way = time.perf_counter(), PASSES[unmasked.scope][names[0]]
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
            start = time.perf_counter()  # of the check, where the pass is right
            positions = len(unmasked.final_hidden) * (chunk if way is packed else 1)
            wrong = failure(model, unmasked, layer, masked, states, positions)
        seconds += time.perf_counter() - start
        if wrong is None:
            break
        slow = names.pop(0)
        log.warning(
            "%s: %r failed the self-check (scope %s): %s. Using %r, which is slower",
            type(model).__name__, slow, unmasked.scope, wrong, names[0],
        )  # fmt: skip
    return Subnetworks(hidden, counts.float(), index, seconds)


def subnetwork_log_probs(
    model: nn.Module,
    input_ids: Int[Tensor, " N"],
    prompt_length: int,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    *,
    scope: str = "all",
    attention: str | None = None,
    memory_budget: int | None = None,
) -> Float[Tensor, "S T V"]:
    """Next-token log-probabilities of S subnetworks over a fixed response, by teacher forcing.

    Row t predicts input_ids[prompt_length + t]; T = N - prompt_length. Equals S full passes over
    the first N - 1 tokens whose heads at `layer` (from 0) are masked before the output projection
    at all positions or, in scope "response", at those that predict it. Source: Algorithm 1 of the
    paper, lines 2 to 6. 1 keeps a query head, 0 masks it.

    Raises:
        TypeError: the heads cannot be masked; the message gives the reason.
        RuntimeError: the self-check failed (see `check`).
        ValueError: an argument out of range; the message says which.
        FloatingPointError: logits that are no distribution, as `readout`.

    Example:
        >>> log_probs = subnetwork_log_probs(model, ids, 6, 2, masks)
        >>> log_probs.shape  # (S, T, V)
        torch.Size([3, 2, 50])
        >>> unmasked = model.eval()(ids[None]).logits[0, 5:7].log_softmax(-1)
        >>> torch.allclose(log_probs[0], unmasked, atol=1e-5)  # the first mask keeps every head
        True
    """
    decoder = plain_model(model)
    ASMIConfig(scope=scope)  # raises for invalid values
    with scoring_session(decoder, attention):
        keep = keeps_cache(decoder, [layer], scope)
        unmasked = run_unmasked(decoder, input_ids, prompt_length, [layer], scope, keep)
        subnetworks = run_subnetworks(decoder, unmasked, layer, masks, memory_budget)
        hidden, device = subnetworks.hidden, execution_device(output_embeddings(decoder))
        chunk = distributions_at_once(decoder, device, memory_budget) // hidden.shape[1]
        log_probs = torch.cat(in_chunks(partial(readout, decoder), hidden, chunk))
    return log_probs[subnetworks.index.to(log_probs.device)]
