"""The self-check: masked passes are compared with full passes before a score is trusted.

Two masks of the first answer are compared, for each model, layer, scope and attention
implementation. They are compared again when a prompt, or the answers in one pass, are more than
twice as long. A pass that differs is not used again; the next slower one is, and a warning says why
and how much more it computes. Full passes are the slowest and the truth.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from lm_polygraph_asmi.core.model.devices import lowest_precision
from lm_polygraph_asmi.core.model.foreign import depends_on_place
from lm_polygraph_asmi.core.model.masked import MaskedModel
from lm_polygraph_asmi.core.model.passes import (
    UnmaskedPass,
    full_passes,
    packed,
    rows_after_prompt,
    suffix,
)
from lm_polygraph_asmi.core.model.readout import own_logits, readout
from lm_polygraph_asmi.core.model.session import scoring_session

log = logging.getLogger("lm_polygraph")
Pass = Callable[[MaskedModel, UnmaskedPass, int, Tensor], Tensor]
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
MASKABLE = ("eager", "sdpa")
"""Attention implementations that take an explicit (queries, keys) mask, as packed answers need."""
FULL = "full passes"
LIMITS = {torch.float64: 1e-5, torch.float32: 2e-4}
LIMIT_16_BITS = 2e-2
"""Largest total variation, mean over the response, explained by rounding.

Correct passes differed by 2e-6 in 32 bits, and in bfloat16 by 6e-3 to 2e-2 (packed sequences of
SmolLM2-135M-Instruct). Wrong passes differed by 3e-3 to 0.6: the smallest of these are caught in 32
bits, and not in 16.
"""
ROUNDINGS = 2.0
"""In 16 bits the limit is at least this many times the difference between attention backends."""
OUTSTANDING = 10.0
"""A single position may differ by this many times the mean allowed."""
SAME_STATES = 0.1
"""The readout of the final states may differ from the model's own logits by this fraction of the
limit, but by no less than the limit of 32 bits: 2e-4 in 64 and 32 bits, 2e-3 in 16."""
LONGER = 2
"""Lengths up to this many times the longest that was compared are not compared again."""


@dataclass
class Trusted:
    """The passes of one layer with one attention implementation that have not failed.

    The first is used. It is compared with full passes before its first result is, and again for
    longer texts.
    """

    scope: str
    attention: str
    names: list[str]  # of `PASSES`, fastest first
    # Most positions of a prompt, and of the answers in one pass, for which the first was right.
    compared: tuple[int, int] = 0, 0
    used: bool = False  # whether an answer was scored with the first
    cause: str | None = None  # why faster ones are not among them, until it is said

    def give_up(self) -> str:
        """Do without the first from now on; its name. The next one has not been compared yet."""
        self.used, self.compared = False, (0, 0)
        return self.names.pop(0)


def trusted(f: MaskedModel, layer: int, scope: str) -> Trusted:
    """The record of the passes at a layer. A changed model gets a new one."""
    key = "trusted", layer, scope, f.attention, f.compiles
    if key not in f.found:
        names, cause = _to_try(f, scope)
        told = f.found.setdefault("causes of slower passes", set())
        f.found[key] = Trusted(scope, f.attention, names, cause=None if cause in told else cause)
        told.add(cause)
    found: Trusted = f.found[key]
    return found


def _to_try(f: MaskedModel, scope: str) -> tuple[list[str], str | None]:
    """Names of the passes that may be right, and why these are not all, if it is to be said."""
    names = list(PASSES[scope])
    listed = f.structure.passes.get(scope)  # the fastest that is right, by `classes.csv`
    if places := depends_on_place(f):
        code = f"code of others in {', '.join(places[:3])}"
        return [FULL], f"{code} does not act on each position alike (scope {scope})"
    if listed == FULL:
        return [FULL], f"no faster pass is right for its class (scope {scope})"
    if scope == "response" and f.attention not in MASKABLE:
        start = max(1, names.index(listed or names[1]))
        return names[start:], f"attention {f.attention!r} takes no mask (scope {scope})"
    if scope == "response" and listed is None:
        return names[1:], "its class is not listed, and may keep other things than keys and values"
    return names[names.index(listed or names[0]) :], None


def work_of(f: MaskedModel, unmasked: UnmaskedPass, layer: int, masks: int) -> dict[str, int]:
    """Layers times positions that each kind of passes computes for an answer."""
    layers, before = f.structure.num_layers, unmasked.before
    length = len(unmasked.final_hidden)
    above, every = masks * (layers - layer), masks * layers
    return {
        "suffix": above * (before + length),
        "suffix in rows": above * (before + length),
        "packed": above * length,
        "rows after the prompt": above * length + layers * before,
        FULL: every * (before + length),
    }


def warn_slower(
    f: MaskedModel, unmasked: UnmaskedPass, layer: int, masks: int, cause: str, fast: str
) -> None:
    """Say why a slower pass runs in place of a fast one, and how much more it computes."""
    slow, work = trusted(f, layer, unmasked.scope).names[0], work_of(f, unmasked, layer, masks)
    log.warning(
        "%s: %s. Using %r instead of %r, which is %.1f times the work (layers times positions)",
        type(f.model).__name__, cause, slow, fast, work[slow] / work[fast],
    )  # fmt: skip


def keeps_cache(f: MaskedModel, layers: list[int], scope: str) -> bool:
    """Whether masked passes of some layer will read keys and values of the unmasked pass."""
    packs = (trusted(f, layer, scope).names[0] == "packed" for layer in layers)
    return scope == "response" and any(packs)


def passes_in_use(f: MaskedModel, scope: str) -> list[str]:
    """Names of the passes that scored answers with the attention in use, of any layer."""
    found = {
        each.names[0]
        for each in f.found.values()
        if isinstance(each, Trusted)
        and each.used
        and (each.scope, each.attention) == (scope, f.attention)
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


def check_unmasked(f: MaskedModel, unmasked: UnmaskedPass) -> None:
    """Raise RuntimeError if the final states of the unmasked pass do not give the model's
    distributions. Costs a pass for the first answer, and for one twice as long as the longest."""
    longest = f.found.setdefault(("unmasked", f.attention, f.compiles), [0])
    length = len(unmasked.input_ids)
    if length <= LONGER * longest[0]:
        return
    logits = own_logits(f, input_ids=unmasked.tokens(f.model))
    direct = logits[0, unmasked.predicting].log_softmax(-1)
    found = variation(direct, readout(f, unmasked.final_hidden))
    allowed = max(SAME_STATES * limit(lowest_precision(f.model)), LIMITS[torch.float32])
    if f.compiles and found > allowed:  # compiled layers round otherwise
        allowed = largest_rounding(f, unmasked)
    if not found <= allowed:  # NaN is not, either
        raise RuntimeError(
            f"self-check failed for {type(f.model).__name__}: the final states do not give the "
            f"model's distributions (total variation {found:.2g}). Nothing was scored. Remove "
            "hooks that change the model's output; otherwise report this model class"
        )
    longest[0] = length


def self_check(
    f: MaskedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    states: Float[Tensor, "B T D"],
    positions: int,
) -> str | None:
    """The self-check: how masked passes differ from full passes beyond rounding, in words.

    The first and the last distinct mask are compared. None: no difference, or answers of such
    lengths were compared before.

    Args:
        states: final states under all masks.
        positions: most positions that one pass had of all its answers together.
    """
    use, lengths = trusted(f, layer, unmasked.scope), (unmasked.before, positions)
    seen = all(now <= LONGER * most for now, most in zip(lengths, use.compared, strict=True))
    if use.names[0] != FULL and not seen:
        rows = sorted({0, len(masks) - 1})
        truth = full_passes(f, unmasked, layer, masks[rows])
        found = {
            row: variation(readout(f, right), readout(f, states[row]))
            for row, right in zip(rows, truth, strict=True)
        }
        worst = max(found, key=lambda row: (math.isnan(found[row]), found[row]))
        allowed = limit(lowest_precision(f.model))
        if found[worst] > allowed:
            allowed = largest_rounding(f, unmasked)
        if not found[worst] <= allowed:  # NaN is not, either
            return (
                f"it differs from full passes by a total variation of {found[worst]:.2g} (mask "
                f"{worst + 1} of {len(masks)} distinct ones)"
            )
        use.compared = max(use.compared[0], lengths[0]), max(use.compared[1], positions)
    use.used = True
    return None


def largest_rounding(f: MaskedModel, unmasked: UnmaskedPass) -> float:
    """The largest `variation` from full passes that rounding explains. In 16 bits it takes a pass
    with each of two attention implementations."""
    return max(limit(lowest_precision(f.model)), ROUNDINGS * _rounding(f, unmasked))


def _rounding(f: MaskedModel, unmasked: UnmaskedPass) -> float:
    """Total variation of the unmasked pass between two attention implementations, which differ only
    in rounding. 0 if the model is not 16-bit, or has only one implementation."""
    if lowest_precision(f.model) in LIMITS:
        return 0.0
    log_probs = []
    try:
        for attention in MASKABLE:
            with scoring_session(f.model, attention):
                logits = own_logits(f, input_ids=unmasked.tokens(f.model))
            log_probs.append(logits[0, unmasked.predicting].log_softmax(-1))
    except ValueError:  # the model has only one
        return 0.0
    return variation(log_probs[0], log_probs[1])
