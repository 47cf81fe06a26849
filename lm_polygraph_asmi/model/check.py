"""Is what the masked passes return right? Compared with full forward passes before it is believed.

A model, or a release of transformers, may do more than its structure shows: bias attention by
position, share keys between layers, compute a row otherwise in another batch. So the first time a
model is scored at a layer, in a scope, with an attention implementation, some of the very masks of
the run are run as they will be, in batches or packed sequences of the same width, and compared with
whole forward passes of the model itself whose heads are masked by a hook; and the final states with
the model's own logits. It is done again when a sequence is clearly longer than any checked before,
or has passed another number in the model's configuration (a window, a chunk, a length at which a
scale sets in); and for every sequence of a kind of which another was wrong in that way, or by full
forward passes. Where the cheapest way of running the passes is wrong the next one is taken for
sequences like that one; where none is right the sequence is refused. All rows of a piece are run a
second time, in other company, since a model may compute a row otherwise beside others (experts that
take so many tokens of a batch and no more). Where even full forward passes are right one mask at a
time alone, the sequences of that kind are run so from then on. It costs up to five passes over the
sequence and two pieces of the run.
"""

import logging
import math
import re
from bisect import bisect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lm_polygraph_asmi.model.devices import execution_device, lowest_precision
from lm_polygraph_asmi.model.layer_call import MASKABLE
from lm_polygraph_asmi.model.memory import in_chunks
from lm_polygraph_asmi.model.model_cache import model_cache
from lm_polygraph_asmi.model.perturbation import WITHOUT_HEADS, Perturbation
from lm_polygraph_asmi.model.readout import own_logits, readout
from lm_polygraph_asmi.model.session import attention_of, scoring_session
from lm_polygraph_asmi.model.structure import special_tokens
from lm_polygraph_asmi.model.suffix import Strategy, strategies, whole_passes
from lm_polygraph_asmi.model.unmasked import Remembered, UnmaskedPass

log = logging.getLogger("lm_polygraph")

LIMITS = {torch.float64: 1e-5, torch.float32: 2e-4}
LIMIT_16_BITS = 2e-2
"""Largest total variation, mean over masks and the response, that rounding explains.

Measured: correct passes of tiny models stay below 1e-5 in 32 bits and 2e-3 in 16; on SmolLM2-135M,
30 layers, 2e-6 in 32 bits, and in bfloat16 1e-3 where rows of a batch are compared, 6e-3 to 2e-2
where a packed sequence is; on Qwen2.5-Coder-0.5B, 24 layers, in bfloat16 0 and 7e-3. Errors seen
make 3e-3 to 0.6. Tiny hybrids, whose recurrent layers round most, stay below 2e-5 in 32 bits with
products summed in an order that depends on the number of rows, as other processors do it.
"""
SINGLE = 3.0
"""In 16 bits a single mask may differ by so many limits."""
ROUNDINGS = 2.0
"""In 16 bits the limit is at least so many times what another attention makes of the same pass."""
OUTSTANDING = 10.0
"""A single position may differ by so many times the mean that is allowed."""
SAME_STATES = 0.1
"""The final states are those of the same pass: their readout may differ by this part of one."""
LONGER, WIDER = 1.25, 2.0
"""How much longer or wider than what was checked calls for another check."""
CHECKED_ROWS = 3

_NO_LENGTH = re.compile(
    r"^(num|n)_|_(id|ids|dim|rank|index)$|hidden|intermediate|vocab|embd|ffn|heads|experts|layers"
)
"""Names of numbers in configurations that no position is compared with."""


@dataclass(frozen=True)
class Extent:
    """How far a check reached.

    Attributes:
        prompt: positions before those that predict the response. What is kept of them was made
            by a pass of that length, so it has a regime of its own.
        response: positions that predict the response.
        keys: keys in one sequence.
        rows: masks together.
        regime: see `regimes`.
        special: see `specials`.
    """

    prompt: int
    response: int
    keys: int
    rows: int
    regime: tuple[int, ...]
    special: tuple[int, ...]

    def covers(self, other: "Extent") -> bool:
        return (
            self.kind == other.kind
            and other.prompt <= LONGER * self.prompt
            and other.response <= LONGER * self.response
            and other.keys <= LONGER * self.keys
            and other.rows <= WIDER * self.rows
        )

    @property
    def kind(self) -> "Kind":
        """What no length makes up for: layers may do nothing, or another thing, with one of it."""
        one = self.prompt == 0, self.response == 1, self.rows == 1
        return self.regime, self.special, one

    def resembles(self, other: "Extent") -> bool:
        return self.covers(other) and other.covers(self)


def limit(dtype: torch.dtype) -> float:
    """Largest mean total variation between two ways to the same distributions."""
    return LIMITS.get(dtype, LIMIT_16_BITS)


UNMASKED = "the unmasked model"


def _excess(found: dict[str, float], dtype: torch.dtype, rounding: float = 0.0) -> str | None:
    """What is more than rounding among differences by name; None if nothing is.

    Args:
        rounding: what rounding was seen to make of this model and sequence.
    """
    most = max(limit(dtype), ROUNDINGS * rounding)
    rows = {name: value for name, value in found.items() if name != UNMASKED}
    worst = max(rows, key=lambda name: rows[name])
    unlike = _other_states(found[UNMASKED], dtype)
    if unlike is not None:
        return unlike
    single = most if dtype in LIMITS else SINGLE * most
    if not (sum(rows.values()) <= most * len(rows) and rows[worst] <= single):
        return f"total variation {rows[worst]:.2g} ({worst})"
    return None


def total_variation(p: Float[Tensor, "T V"], q: Float[Tensor, "T V"]) -> Float[Tensor, " T"]:
    """Half the sum of |p - q| at each position; from log-probabilities."""
    return (p.exp() - q.to(p.device).exp()).abs().sum(-1) / 2


def _apart(p: Float[Tensor, "T V"], q: Float[Tensor, "T V"]) -> float:
    """Total variation over the response: its mean, or more where single positions stand out."""
    by_position = total_variation(p, q)
    return max(by_position.mean().item(), by_position.max().item() / OUTSTANDING)


def _numbers(config: PretrainedConfig) -> Iterator[int]:
    """Numbers in a configuration that a position may be compared with."""

    def walk(name: str, value: Any) -> Iterator[int]:
        if isinstance(value, dict):
            for key, part in value.items():
                yield from walk(str(key), part)
        elif isinstance(value, list | tuple):
            for part in value:
                yield from walk(name, part)
        elif isinstance(value, bool) or not isinstance(value, int | float):
            return
        elif 1 < value < 2**31 and not _NO_LENGTH.search(name):
            yield int(value)

    yield from walk("", config.to_dict())


def regimes(model: PreTrainedModel, *lengths: int) -> tuple[int, ...]:
    """For each length, how many numbers of the model's configuration it has passed."""
    facts = model_cache(model)
    if "lengths" not in facts:
        facts["lengths"] = sorted(set(_numbers(model.config)))
    # A number n sets in at position n, or one later.
    return tuple(bisect(facts["lengths"], length - 1) for length in lengths)


def specials(model: PreTrainedModel, *ids: Tensor) -> tuple[int, ...]:
    """Which tokens that the model's configuration names are in a text; some models leave out the
    places of padding when they count positions."""
    named = special_tokens(model)
    return tuple(sorted({token for part in ids for token in part.tolist()} & named))


def _extent(model: PreTrainedModel, unmasked: UnmaskedPass, packed: bool, rows: int) -> Extent:
    return extent_of(model, unmasked.input_ids, unmasked.prompt_length, packed, rows)


def extent_of(
    model: PreTrainedModel,
    input_ids: Int[Tensor, " tokens"],
    prompt_length: int,
    packed: bool,
    rows: int,
) -> Extent:
    """How far a check of a sequence reaches; see `Extent`.

    Args:
        input_ids: prompt and response; the last token is not looked at.
        prompt_length: number of prompt tokens.
        packed: whether all masks stand in one sequence.
        rows: masks together.
    """
    prompt, tokens = prompt_length - 1, len(input_ids) - 1
    response = tokens - prompt
    keys = prompt + rows * response if packed else tokens
    return Extent(
        prompt,
        response,
        keys,
        rows,
        regimes(model, prompt, tokens, keys),
        specials(model, input_ids[:-1]),
    )


Kind = tuple[object, ...]
"""See `Extent.kind`."""


class Record:
    """What was found of one thing that is compared before it is believed.

    Attributes:
        right: where it was right, a layer or None, and at what extent.
        wrong: extents at which it was wrong, and how.
        doubts: kinds of which a sequence was wrong in a way that no like one need be; other things
            may share them.
    """

    def __init__(self, doubts: set[Kind]) -> None:
        self.right: list[tuple[int | None, Extent]] = []
        self.wrong: list[tuple[Extent, str]] = []
        self.doubts = doubts

    def ask(
        self,
        extent: Extent,
        compare: Callable[[], str | None],
        layer: int | None = None,
        lasting: bool = True,
        kind: Kind | None = None,
    ) -> str | None:
        """What is wrong at an extent; None if nothing is. Compared, unless an extent like it was.

        What was wrong of one sequence and right of another of its kind depends on more than
        lengths, such as ties among keys: it is believed of none that was not looked at.

        Args:
            compare: says what is wrong, or None.
            layer: what is right at one is believed of no other; what is wrong at one, of all.
            lasting: whether what is found wrong is believed of sequences like this one. Else it
                makes all of its kind doubtful, here and where doubts are shared.
            kind: of which the sequence is, in whatever way it is run; by default the extent's.
        """
        kind = extent.kind if kind is None else kind
        for at, found in self.wrong:
            if at.resembles(extent):
                return found
        known_right = any(where == layer and at.covers(extent) for where, at in self.right)
        doubtful = kind in self.doubts or any(at.kind == extent.kind for at, _ in self.wrong)
        if known_right and not doubtful:
            return None
        why = compare()
        if why is None:
            if not known_right:
                self.right.append((layer, extent))
            return None
        if lasting:
            self.wrong.append((extent, why))
        else:
            self.doubts.add(kind)
        return why


def record_of(model: PreTrainedModel, what: Hashable, among: Hashable = None) -> Record:
    """What was found of something, of the model as it is now, under the attention in use.

    Args:
        among: names the things with which it shares its doubts; by default it has its own.
    """
    facts, attention = model_cache(model), attention_of(model)
    records: dict[Hashable, Record] = facts.setdefault("checks", {})
    doubts: dict[Hashable, set[Kind]] = facts.setdefault("doubts", {})
    shared = doubts.setdefault((what if among is None else among, attention), set())
    return records.setdefault((what, attention), Record(shared))


class StrategyChecked(NamedTuple):
    """What was compared with full forward passes: one way to run masks."""

    scope: str
    strategy: str
    kind: tuple[str, ...]
    remembered: Remembered


def strategies_seen_right(model: PreTrainedModel, scope: str) -> set[str]:
    """Names of the ways that served the model as it is now, in a scope."""
    checks = model_cache(model).get("checks", {})
    return {
        what.strategy
        for (what, _), record in checks.items()
        if isinstance(what, StrategyChecked) and what.scope == scope and record.right
    }


def _own(model: PreTrainedModel, unmasked: UnmaskedPass) -> Float[Tensor, "T V"]:
    """What the model itself says of the response, nothing of it replaced."""
    ids = unmasked.input_ids[None, :-1].to(execution_device(model.get_input_embeddings()))
    return own_logits(model, wide=False, input_ids=ids)[0, unmasked.predicting].log_softmax(-1)


def _other_states(found: float, dtype: torch.dtype) -> str | None:
    """Why recorded final states are not the model's own; None if they are."""
    if found <= max(SAME_STATES * limit(dtype), LIMITS[torch.float32]):
        return None
    return f"total variation {found:.2g} ({UNMASKED})"


def check_unmasked(model: PreTrainedModel, unmasked: UnmaskedPass) -> None:
    """Raise unless the recorded final states are those of the model's own logits.

    Where heads are masked `select_strategy` sees to it, too. Costs a pass, once for each `Extent`.
    Call it inside `scoring_session`.

    Raises:
        RuntimeError: the two differ by more than rounding.

    Example:
        >>> from lm_polygraph_asmi.model import run_unmasked
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     check_unmasked(model, unmasked)
    """

    def compare() -> str | None:
        recorded = readout(model, unmasked.final_hidden, wide=False)
        return _other_states(_apart(_own(model, unmasked), recorded), lowest_precision(model))

    what = UNMASKED, unmasked.remembered
    extent = _extent(model, unmasked, False, 1)
    reason = record_of(model, what).ask(extent, compare, lasting=False)
    if reason is not None:
        raise RuntimeError(
            f"the final states of {type(model).__name__}, read out, do not give the model's own "
            f"distributions: {reason}. A hook that changes what the model returns does that; else "
            "please report it"
        )


def _differences(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    together: int,
    strategy: Strategy,
    change: Perturbation,
) -> dict[str, float]:
    """Total variation of what a way returns from what full forward passes do, by what was
    compared."""

    def run(rows: Shaped[Tensor, "S H"], at_once: int) -> Float[Tensor, "S T D"]:
        return torch.cat(
            in_chunks(
                lambda part: strategy.run(model, unmasked, layer, rows[part], change),
                len(rows),
                at_once,
            )
        )

    pack = masks[:together]  # as it will be run
    states = run(pack, together)
    # And in other company: few together, in reverse, one with all heads in place of the first.
    mixed = torch.cat([torch.ones_like(pack[:1]), pack[1:]]).flip(0)
    elsewhere = run(mixed, math.isqrt(len(pack) - 1) + 1).flip(0)
    own, kept = _own(model, unmasked), readout(model, elsewhere[0])
    found = {
        UNMASKED: _apart(own, readout(model, unmasked.final_hidden, wide=False)),
        "all heads kept": _apart(unmasked.log_probs(model), kept),
    }
    if (
        lowest_precision(model) not in LIMITS
    ):  # what 32-bit logits change is the rounding, and no more
        found["logits in 32 bits"] = _apart(own, unmasked.log_probs(model))
    chosen = torch.linspace(0, len(pack) - 1, min(CHECKED_ROWS, len(pack))).long().unique()
    for row in chosen.tolist():
        whole = readout(model, whole_passes(model, unmasked, layer, pack[row : row + 1], change)[0])
        found[f"mask {row + 1} of {len(pack)}"] = _apart(whole, readout(model, states[row]))
    if len(pack) > 1:
        moved = (states - elsewhere)[1:].float().flatten(1).norm(dim=1)
        row = 1 + int(moved.argmax())
        found[f"mask {row + 1} of {len(pack)} in other company"] = _apart(
            readout(model, elsewhere[row]), readout(model, states[row])
        )
    return found


def select_strategy(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    together: "dict[str, int]",
    change: Perturbation = WITHOUT_HEADS,
) -> Strategy:
    """The cheapest way to run these masks that was seen to be right; see the module's docstring.

    Call it inside `scoring_session`.

    Args:
        together: by name of a way, how many masks it is to run at once.

    Raises:
        RuntimeError: none is right; the message says by how much each is wrong.
    """
    reasons = []
    possible = list(strategies(model, unmasked, layer))
    kind = _extent(model, unmasked, False, len(masks)).kind
    only_alone: set[Kind] = model_cache(model).setdefault(
        ("only alone", attention_of(model)), set()
    )
    if kind in only_alone:
        possible = possible[-1:]
    for strategy in possible:
        record = record_of(
            model,
            StrategyChecked(unmasked.scope, strategy.name, change.kind, unmasked.remembered),
            among=("strategies", unmasked.scope, change.kind, unmasked.remembered),
        )
        before = len(record.wrong)
        refused = record.ask(
            _extent(model, unmasked, strategy.packed, min(together[strategy.name], len(masks))),
            partial(
                difference, model, unmasked, layer, masks, together[strategy.name], strategy, change
            ),
            layer,
            # Not of full forward passes: what one example makes of all ways is to be no other's
            # end.
            lasting=not strategy.whole,
            kind=kind,
        )
        if refused is None:
            if strategy.alone:  # and full forward passes in a batch were wrong of the same sequence
                only_alone.add(kind)
            return strategy
        if before == 0 and record.wrong:
            log.warning(
                "%s is not scored by its cheapest passes (%r, scope %s): %s. A dearer way is tried",
                type(model).__name__,
                strategy.name,
                strategy.scope,
                refused,
            )
        reasons.append(f"{strategy.name}: {refused}")
    raise RuntimeError(
        f"the masked passes of {type(model).__name__} from layer {layer} on, scope "
        f"{unmasked.scope!r}, {attention_of(model)} attention, do not give what full forward "
        "passes give "
        f"({'; '.join(reasons)}). A model that answers the same pass otherwise the second time, or "
        "rounds a position otherwise beside others, as dynamic quantisation does, cannot be "
        "scored; else please report it"
    )


def _rounding(model: PreTrainedModel, unmasked: UnmaskedPass) -> float:
    """What another attention implementation makes of the unmasked pass: both are right, and round
    differently, the more so the deeper a 16-bit model is. 0 for other models, or without another.
    """
    if lowest_precision(model) in LIMITS:
        return 0.0
    ids = unmasked.input_ids[None, :-1].to(execution_device(model.get_input_embeddings()))
    found = []
    try:
        for attention in MASKABLE:
            with scoring_session(model, attention):
                logits = own_logits(model, input_ids=ids)[0, unmasked.predicting]
            found.append(logits.log_softmax(-1))
    except ValueError:  # the model has no other
        return 0.0
    return _apart(found[0], found[1])


def difference(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    together: int,
    strategy: Strategy,
    change: Perturbation,
) -> str | None:
    """By how much more than rounding a way differs from full forward passes, or why it fails; None
    if it gives what they give."""
    try:
        found = _differences(model, unmasked, layer, masks, together, strategy, change)
    except (torch.OutOfMemoryError, FloatingPointError):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    excess = _excess(found, lowest_precision(model))
    if excess is not None:
        excess = _excess(found, lowest_precision(model), _rounding(model, unmasked))
    return excess
