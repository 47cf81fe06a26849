"""The self-check: masked passes are compared with full passes before a score is trusted.

Two masks of the first response are compared, for each model, layer, scope and attention
implementation. They are compared again when the prompt, or all copies of the response in one pass,
are more than twice as long. A pass that differs is not used again; the next slower one is, and a
warning says why and how much more it computes (`choice`). Full passes are the slowest and the
truth.
"""

import math

from jaxtyping import Float, Shaped
from torch import Tensor

from lm_polygraph_asmi.core.model.choice import FULL, passes_to_try
from lm_polygraph_asmi.core.model.devices import lowest_precision
from lm_polygraph_asmi.core.model.masked import MaskedModel
from lm_polygraph_asmi.core.model.passes import full_passes
from lm_polygraph_asmi.core.model.readout import own_logits, readout
from lm_polygraph_asmi.core.model.rounding import LIMITS, READOUT, limit, variation
from lm_polygraph_asmi.core.model.session import scoring_session
from lm_polygraph_asmi.core.model.unmasked import UnmaskedPass

LONGER = 2
"""Lengths up to this many times the longest that was compared are not compared again."""
DIFFER_IN_ROUNDING = ("eager", "sdpa")
"""Two attention implementations whose results differ by rounding alone."""


class PassFailed(Exception):
    """Masked passes raised an error, or differ from full passes by more than rounding."""


def check_unmasked(f: MaskedModel, unmasked: UnmaskedPass) -> None:
    """Raise RuntimeError if the final states of the unmasked pass do not give the model's
    distributions. Costs a pass for the first answer, and for one more than twice as long as the
    longest that was compared."""
    # A pass whose layers were given caches is another than one without.
    key = "unmasked", f.attention, f.compiles, bool(unmasked.caches)
    longest, length = f.kept.setdefault(key, [0]), len(unmasked.input_ids)
    if length <= LONGER * longest[0]:
        return
    difference = variation(_own_log_probs(f, unmasked), readout(f, unmasked.final_hidden))
    allowed = READOUT.of(f.model)
    if f.compiles and difference > allowed:  # compiled layers round otherwise
        allowed = largest_rounding(f, unmasked)
    if not difference <= allowed:  # NaN is not, either
        raise RuntimeError(
            f"self-check failed for {type(f.model).__name__}: the final states do not give the "
            f"model's distributions (total variation {difference:.2g}). Nothing was scored. Remove "
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
) -> None:
    """Compare masked passes with full passes, under the first and the last distinct mask, unless
    answers of such lengths were compared before. Raises `PassFailed`.

    Args:
        states: final states under all masks.
        positions: of all copies of the response in one pass: T, or in a packed one T times its
            masks.
    """
    choice, lengths = passes_to_try(f, layer, unmasked.scope), (unmasked.before, positions)
    known = all(now <= LONGER * most for now, most in zip(lengths, choice.compared, strict=True))
    if choice.first == FULL or known:
        return
    rows = sorted({0, len(masks) - 1})
    truth = full_passes(f, unmasked, layer, masks[rows])
    differences = {
        row: _difference(f, readout(f, right), states[row])
        for row, right in zip(rows, truth, strict=True)
    }
    worst = max(differences, key=lambda row: differences[row])
    # The second limit is the larger, but takes passes.
    allowed = limit(lowest_precision(f.model))
    if differences[worst] > allowed and differences[worst] > largest_rounding(f, unmasked):
        raise PassFailed(
            f"it differs from full passes by a total variation of {differences[worst]:.2g} (mask "
            f"{worst + 1} of {len(masks)} distinct ones)"
        )
    choice.compared = max(choice.compared[0], lengths[0]), max(choice.compared[1], positions)


def _difference(f: MaskedModel, truth: Float[Tensor, "T V"], states: Float[Tensor, "T D"]) -> float:
    """`variation` of the distributions of final states; infinite if they are no distributions."""
    try:
        return variation(truth, readout(f, states))
    except FloatingPointError:
        return math.inf


def largest_rounding(f: MaskedModel, unmasked: UnmaskedPass) -> float:
    """The largest `variation` from full passes that rounding explains. In 16 bits it takes a pass
    with each of two attention implementations, and is raised to twice their difference."""
    return max(limit(lowest_precision(f.model)), 2 * _rounding(f, unmasked))


def _rounding(f: MaskedModel, unmasked: UnmaskedPass) -> float:
    """Total variation of the unmasked pass between `DIFFER_IN_ROUNDING`. 0 if the model is not
    16-bit, or has only one of them."""
    if lowest_precision(f.model) in LIMITS:  # 32 or 64 bits
        return 0.0
    log_probs = []
    try:
        for attention in DIFFER_IN_ROUNDING:
            with scoring_session(f.model, attention):
                log_probs.append(_own_log_probs(f, unmasked))
    except ValueError:  # the model has only one
        return 0.0
    return variation(log_probs[0], log_probs[1])


def _own_log_probs(f: MaskedModel, unmasked: UnmaskedPass) -> Float[Tensor, "T V"]:
    """Log-probabilities of the response by an ordinary forward pass."""
    logits = own_logits(f, input_ids=unmasked.tokens(f.model))
    return logits[0, unmasked.predicting].log_softmax(-1)
