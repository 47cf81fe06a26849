"""The subnetworks of an answer, every distinct mask once, in chunks that fit into memory; and the
check: two masks against full passes, before a score is trusted.

It is made for the first answer of a model, layer, scope and attention implementation, and again
when a prompt, or the answers in one pass, are more than twice as long as those compared. A pass
that fails is not used again: the next slower one is. Full passes, the slowest, are the truth.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.devices import lowest_precision
from lm_polygraph_asmi.model.heads import num_heads, structure_of
from lm_polygraph_asmi.model.memory import batch_bytes, default_budget, in_chunks
from lm_polygraph_asmi.model.passes import (
    UnmaskedPass,
    full_passes,
    packed,
    rows_after_prompt,
    suffix,
)
from lm_polygraph_asmi.model.readout import own_logits, readout
from lm_polygraph_asmi.model.session import attention_of, scoring_session
from lm_polygraph_asmi.model.state import has_foreign_code, known_of, known_values

log = logging.getLogger("lm_polygraph")

Pass = Callable[[PreTrainedModel, UnmaskedPass, int, Tensor], Tensor]
PASSES: dict[str, dict[str, Pass]] = {
    "all": {
        "suffix": suffix, "suffix in rows": partial(suffix, one_row=False),
        "full passes": full_passes,
    },
    "response": {
        "packed": packed, "rows after the prompt": rows_after_prompt, "full passes": full_passes,
    },
}  # fmt: skip
"""By scope, the passes by name, fastest first."""
PACKED_POSITIONS = {"cpu": 256, "gpu": 4096}
"""Most response positions in one packed sequence. Each is compared with all others, so longer ones
cost a processor more than fewer passes save."""
MASKABLE = ("eager", "sdpa")
"""Attention implementations that take an explicit (queries, keys) mask, as packed answers need."""
FULL = "full passes"
LIMITS = {torch.float64: 1e-5, torch.float32: 2e-4}
LIMIT_16_BITS = 2e-2
"""Largest total variation, mean over the response, explained by rounding.

Measured for correct passes: in 32 bits 2e-6; in bfloat16 6e-3 to 2e-2 for the packed sequences of
SmolLM2-135M-Instruct. Observed errors: 3e-3 to 0.6.
"""
ROUNDINGS = 2.0
"""In 16 bits the limit is at least this many times the difference between attention backends."""
OUTSTANDING = 10.0
"""A single position may differ by this many times the mean allowed."""
SAME_STATES = 0.1
"""Final states come from one pass: their readout may differ by this fraction of the limit."""
LONGER = 2


@dataclass
class Checked:
    """What is known of the passes of a model and layer."""

    scope: str
    attention: str
    names: list[str]  # the passes that have not failed, fastest first
    compared: tuple[int, int] = 0, 0  # most positions before, and of, answers that were right
    used: bool = False


def checked(model: PreTrainedModel, layer: int, scope: str) -> Checked:
    """What is known of the passes, for the model's present state and attention implementation."""
    values, attention = known_values(model), attention_of(model)
    key = "checked", layer, scope, attention, known_of(model).compiles
    if key not in values:
        names, tried = list(PASSES[scope]), structure_of(model).passes.get(scope)
        # Of a class that nobody tried, layers may know caches of another kind.
        start = names.index(tried) if tried else int(scope == "response")
        if scope == "response" and attention not in MASKABLE:
            start = max(start, 1)
        if has_foreign_code(model):  # it may act differently at each position
            start = len(names) - 1
        values[key] = Checked(scope, attention, names[start:])
    return values[key]


def keeps_cache(model: PreTrainedModel, layers: list[int], scope: str) -> bool:
    """Whether masked passes of some layer will read keys and values of the unmasked pass."""
    packs = (checked(model, layer, scope).names[0] == "packed" for layer in layers)
    return scope == "response" and any(packs)


def passes_in_use(model: PreTrainedModel, scope: str) -> list[str]:
    """Names of the passes that scored answers with the attention in use, of any layer."""
    here = scope, attention_of(model)
    found = {
        each.names[0]
        for each in known_values(model).values()
        if isinstance(each, Checked) and each.used and (each.scope, each.attention) == here
    }
    return [name for name in PASSES[scope] if name in found]


def limit(dtype: torch.dtype) -> float:
    """Largest mean total variation between two computations of the same distributions."""
    return LIMITS.get(dtype, LIMIT_16_BITS)


def variation(p: Float[Tensor, "T V"], q: Float[Tensor, "T V"]) -> float:
    """Mean total variation over the response of log-probabilities, or more if single positions are
    outliers."""
    by_position = (p.exp() - q.to(p.device).exp()).abs().sum(-1) / 2
    return max(by_position.mean().item(), by_position.max().item() / OUTSTANDING)


def check_unmasked(model: PreTrainedModel, unmasked: UnmaskedPass) -> None:
    """Raise RuntimeError if the final states of the unmasked pass do not give the model's
    distributions. Costs a pass for the first answer, and for one twice as long as the longest."""
    compiles = known_of(model).compiles
    longest = known_values(model).setdefault(("unmasked", attention_of(model), compiles), [0])
    length = len(unmasked.input_ids)
    if length <= LONGER * longest[0]:
        return
    logits = own_logits(model, input_ids=unmasked.tokens(model))
    direct = logits[0, unmasked.predicting].log_softmax(-1)
    found = variation(direct, readout(model, unmasked.final_hidden))
    allowed = max(SAME_STATES * limit(lowest_precision(model)), LIMITS[torch.float32])
    if compiles and found > allowed:  # compiled layers round otherwise
        allowed = max(limit(lowest_precision(model)), ROUNDINGS * _rounding(model, unmasked))
    if not found <= allowed:
        raise RuntimeError(
            f"self-check failed for {type(model).__name__}: the final states do not give the "
            f"model's distributions (total variation {found:.2g}). Nothing was scored. Remove "
            "hooks that change the model's output; otherwise report this model class"
        )
    longest[0] = length


def failure(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    states: Float[Tensor, "B T D"],
    positions: int,
) -> str | None:
    """How final states of the first and the last mask differ from full passes beyond rounding; None
    if they do not, or if such lengths were compared. `positions`: of all answers in one pass."""
    known, lengths = checked(model, layer, unmasked.scope), (unmasked.before, positions)
    seen = all(now <= LONGER * most for now, most in zip(lengths, known.compared, strict=True))
    if known.names[0] != FULL and not seen:
        rows = sorted({0, len(masks) - 1})
        truth = full_passes(model, unmasked, layer, masks[rows])
        found = {
            row: variation(readout(model, right), readout(model, states[row]))
            for row, right in zip(rows, truth, strict=True)
        }
        worst = max(found, key=lambda row: found[row])
        allowed = limit(lowest_precision(model))
        if found[worst] > allowed:
            allowed = max(allowed, ROUNDINGS * _rounding(model, unmasked))
        if not found[worst] <= allowed:
            known.used = False
            return f"total variation {found[worst]:.2g} (mask {worst + 1} of {len(masks)})"
        known.compared = max(known.compared[0], lengths[0]), max(known.compared[1], positions)
    known.used = True
    return None


def _rounding(model: PreTrainedModel, unmasked: UnmaskedPass) -> float:
    """Total variation of the unmasked pass between two attention implementations, which differ only
    in rounding. 0 if the model is not 16-bit, or has only one implementation."""
    if lowest_precision(model) in LIMITS:
        return 0.0
    log_probs = []
    try:
        for attention in MASKABLE:
            with scoring_session(model, attention):
                logits = own_logits(model, input_ids=unmasked.tokens(model))
            log_probs.append(logits[0, unmasked.predicting].log_softmax(-1))
    except ValueError:  # the model has only one
        return 0.0
    return variation(log_probs[0], log_probs[1])


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
            wrong: str | None = f"{type(error).__name__}: {error}"
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
