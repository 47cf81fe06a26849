"""The self-check: compares masked passes with full forward passes before a score is trusted.

A model, or a release of transformers, may do more than its structure shows: bias attention by
position, share keys between layers, or compute a row differently in another batch.

The check runs the first time a model is scored with a layer, scope and attention implementation.
Some masks of the run are evaluated in batches or packed sequences of the run's width. They are
compared with full forward passes in which a hook masks the same heads, and the final states with
the model's logits. All rows of a chunk also run a second time beside other rows, since a row's
result may depend on its batch (experts with a limited capacity).

The check runs again for a clearly longer sequence, and for a length beyond another number of the
model's configuration (a window, a chunk, a length where a scale starts).

If a strategy fails and a slower one is right, the slower one is used for the sequence's kind from
then on. If all fail, the sequence raises, and from then on every sequence of its kind is checked;
so it is if only full forward passes of one mask at a time are right.
A check costs up to five passes over the sequence and two chunks.
"""

import logging
import math
import re
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from lm_polygraph_asmi.model.devices import execution_device, lowest_precision
from lm_polygraph_asmi.model.layer_call import MASKABLE, LayerCall
from lm_polygraph_asmi.model.memory import in_chunks
from lm_polygraph_asmi.model.model_cache import model_cache
from lm_polygraph_asmi.model.readout import own_logits, readout
from lm_polygraph_asmi.model.session import attention_of, scoring_session
from lm_polygraph_asmi.model.structure import special_tokens
from lm_polygraph_asmi.model.suffix import Strategy, full_forward_passes, strategies
from lm_polygraph_asmi.model.unmasked import UnmaskedPass

log = logging.getLogger("lm_polygraph")

LIMITS = {torch.float64: 1e-5, torch.float32: 2e-4}
LIMIT_16_BITS = 2e-2
"""Largest total variation, mean over masks and the response, explained by rounding.

Measured for correct passes: tiny models, below 1e-5 in 32 bits and 2e-3 in 16;
SmolLM2-135M-Instruct (30 layers), 2e-6 in 32 bits, in bfloat16 1e-3 for rows of a batch and 6e-3
to 2e-2 for a packed sequence; Qwen2.5-Coder-0.5B (24 layers), in bfloat16 0 and 7e-3.
Observed errors: 3e-3 to 0.6.
Tiny hybrids, whose recurrent layers round most, stay below 2e-5 in 32 bits if the order of summing
depends on the number of rows, as on other processors.
"""
SINGLE = 3.0
"""In 16 bits a single mask may differ by this many times the limit."""
ROUNDINGS = 2.0
"""In 16 bits the limit is at least this many times the difference between attention backends."""
OUTSTANDING = 10.0
"""A single position may differ by this many times the mean allowed."""
SAME_STATES = 0.1
"""Final states come from one pass: their readout may differ by this fraction of the limit."""
LONGER, WIDER = 1.25, 2.0
"""A sequence this many times longer, or a batch this many times wider, is checked again."""
CHECKED_ROWS = 3

_NO_LENGTH = re.compile(
    r"^(num|n)_|_(id|ids|dim|rank|index)$|hidden|intermediate|vocab|embd|ffn|heads|experts|layers"
)
"""Names of configuration numbers that are not lengths."""


@dataclass(frozen=True)
class Extent:
    """Lengths, widths and tokens that a check covers.

    Attributes:
        prompt: positions before those that predict the response. Their cache comes from a pass of
            that length, so this length has its own regime.
        response: positions that predict the response.
        keys: keys in one sequence.
        rows: masks evaluated together.
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
        """What must be equal whatever the lengths: models may treat a length of one differently."""
        shortest = self.prompt == 0, self.response == 1, self.rows == 1
        return self.regime, self.special, shortest


def limit(dtype: torch.dtype) -> float:
    """Largest mean total variation between two computations of the same distributions."""
    return LIMITS.get(dtype, LIMIT_16_BITS)


UNMASKED = "the unmasked model"


def _excess(differences: dict[str, float], dtype: torch.dtype, rounding: float = 0) -> str | None:
    """The largest difference that exceeds rounding, as text; None if there is none.

    Args:
        differences: total variation by the name of what was compared.
        rounding: total variation measured between attention backends for this sequence.
    """
    allowed = max(limit(dtype), ROUNDINGS * rounding)
    rows = {name: value for name, value in differences.items() if name != UNMASKED}
    worst = max(rows, key=lambda name: rows[name])
    wrong_states = _wrong_states(differences[UNMASKED], dtype)
    if wrong_states is not None:
        return wrong_states
    single = allowed if dtype in LIMITS else SINGLE * allowed
    if not (sum(rows.values()) <= allowed * len(rows) and rows[worst] <= single):
        return f"total variation {rows[worst]:.2g} ({worst})"
    return None


def total_variation(p: Float[Tensor, "T V"], q: Float[Tensor, "T V"]) -> Float[Tensor, " T"]:
    """Total variation at each position, half the sum of |p - q|, from log-probabilities."""
    return (p.exp() - q.to(p.device).exp()).abs().sum(-1) / 2


def _response_variation(p: Float[Tensor, "T V"], q: Float[Tensor, "T V"]) -> float:
    """Mean total variation over the response, or more if single positions are outliers."""
    by_position = total_variation(p, q)
    return max(by_position.mean().item(), by_position.max().item() / OUTSTANDING)


def _possible_lengths(config: PretrainedConfig) -> Iterator[int]:
    """Numbers in a configuration that may be lengths."""

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
    """For each length, how many numbers in the model's configuration it exceeds."""
    cache = model_cache(model)
    if "lengths" not in cache:
        cache["lengths"] = sorted(set(_possible_lengths(model.config)))
    # A number n takes effect at position n, or one later.
    return tuple(bisect(cache["lengths"], length - 1) for length in lengths)


def specials(model: PreTrainedModel, *ids: Tensor) -> tuple[int, ...]:
    """Special tokens of the model's configuration in a text; some models do not count padding
    when they number positions."""
    special = special_tokens(model)
    return tuple(sorted({token for part in ids for token in part.tolist()} & special))


def extent_of(
    model: PreTrainedModel,
    input_ids: Int[Tensor, " tokens"],
    prompt_length: int,
    packed: bool,
    rows: int,
) -> Extent:
    """The `Extent` of a check of a sequence.

    Args:
        input_ids: prompt and response; the last token is ignored.
        prompt_length: number of prompt tokens.
        packed: whether all masks are in one sequence.
        rows: masks evaluated together.
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
Candidate = tuple[str, Extent, Callable[[], str | None]]
"""A computation by name, what is to be checked, and the check: what is wrong, or None."""


class Checks:
    """Results of the checks of computations that should agree, for one state of a model.

    Attributes:
        passed: by name of a computation, (layer or None, extent) of the checks that passed.
        failed: the reason, by name and kind of extent. The computation is not tried again.
        doubtful: kinds of which every sequence is checked: no computation was right for one of
            them, or only one mask at a time. The cause, such as ties among keys or a capacity, is
            more than lengths.
    """

    def __init__(self) -> None:
        self.passed: defaultdict[str, list[tuple[int | None, Extent]]] = defaultdict(list)
        self.failed: dict[tuple[str, Kind], str] = {}
        self.doubtful: set[Kind] = set()

    def select(
        self, candidates: Iterable[Candidate], kind: Kind, layer: int | None = None
    ) -> tuple[str | None, dict[str, str]]:
        """The first candidate that is right, or None, and what is wrong with those before it.

        A failure excludes a candidate only if another one is right for the same sequence:
        otherwise the sequence is at fault.

        Args:
            candidates: cheapest first.
            kind: kind of the sequence, whatever the candidate.
            layer: the layer that a pass holds for.
        """
        reasons: dict[str, str] = {}
        failures: dict[tuple[str, Kind], str] = {}
        doubtful = kind in self.doubtful
        for name, extent, compare in candidates:
            failure = self.failed.get((name, extent.kind))
            if failure is None and (doubtful or not self._passed(name, extent, layer)):
                failure = compare()
                doubtful |= failure is not None  # others are compared for this very sequence
            if failure is None:
                if not self._passed(name, extent, layer):
                    self.passed[name].append((layer, extent))
                self.failed |= failures
                return name, reasons
            reasons[name] = failures[name, extent.kind] = failure
        self.doubtful.add(kind)
        return None, reasons

    def _passed(self, name: str, extent: Extent, layer: int | None) -> bool:
        return any(
            passed_layer == layer and passed.covers(extent)
            for passed_layer, passed in self.passed[name]
        )


def checks_of(model: PreTrainedModel, computation: Hashable) -> Checks:
    """The checks of a computation, for the model's current state and attention implementation."""
    checks: dict[Hashable, Checks] = model_cache(model).setdefault("checks", {})
    return checks.setdefault((computation, attention_of(model)), Checks())


def named(reasons: dict[str, str]) -> str:
    """Reasons, each behind its name."""
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


class MaskedPasses(NamedTuple):
    """Key of the checks of strategies."""

    scope: str


def strategies_seen_right(
    model: PreTrainedModel, scope: str, attention: str | None = None
) -> set[str]:
    """Names of the strategies that passed for the model's current state, in a scope; with one
    attention implementation, or any."""
    return {
        name
        for (key, used), checks in model_cache(model).get("checks", {}).items()
        if isinstance(key, MaskedPasses) and key.scope == scope and attention in (None, used)
        for name, passed in checks.passed.items()
        if passed
    }


def _direct_log_probs(model: PreTrainedModel, unmasked: UnmaskedPass) -> Float[Tensor, "T V"]:
    """Log-probabilities of the response from the unmodified model."""
    ids = unmasked.input_ids[None, :-1].to(execution_device(model.get_input_embeddings()))
    return own_logits(model, wide=False, input_ids=ids)[0, unmasked.predicting].log_softmax(-1)


def _wrong_states(variation: float, dtype: torch.dtype) -> str | None:
    """Why recorded final states differ from the model's; None if they do not."""
    if variation <= max(SAME_STATES * limit(dtype), LIMITS[torch.float32]):
        return None
    return f"total variation {variation:.2g} ({UNMASKED})"


def check_unmasked(model: PreTrainedModel, unmasked: UnmaskedPass) -> None:
    """Raise unless the recorded final states give the model's logits.

    `select_strategy` also checks this. Costs one pass per new `Extent`. Call it inside
    `scoring_session`.

    Raises:
        RuntimeError: they differ by more than rounding.

    Example:
        >>> from lm_polygraph_asmi.model import run_unmasked
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     check_unmasked(model, unmasked)
    """

    def compare() -> str | None:
        recorded = readout(model, unmasked.final_hidden, wide=False)
        variation = _response_variation(_direct_log_probs(model, unmasked), recorded)
        return _wrong_states(variation, lowest_precision(model))

    extent = extent_of(model, unmasked.input_ids, unmasked.prompt_length, False, 1)
    checks = checks_of(model, UNMASKED)
    right, reasons = checks.select([(UNMASKED, extent, compare)], extent.kind)
    if right is None:
        raise RuntimeError(
            f"self-check failed for {type(model).__name__}: the final states do not give the "
            f"model's distributions ({reasons[UNMASKED]}). Nothing was scored. Remove hooks that "
            "change the model's output; otherwise report this model class"
        )


def _differences(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    chunk_size: int,
    strategy: Strategy,
) -> dict[str, float]:
    """Total variation between a strategy and full forward passes, by what was compared."""

    def run(rows: Shaped[Tensor, "S H"], chunk: int) -> Float[Tensor, "S T D"]:
        return torch.cat(
            in_chunks(
                lambda part: strategy.run(model, unmasked, layer, rows[part]),
                len(rows),
                chunk,
            )
        )

    checked = masks[:chunk_size]
    states = run(checked, chunk_size)
    # Again beside other rows: in smaller batches, in reverse order, the first with all heads kept.
    reordered = torch.cat([torch.ones_like(checked[:1]), checked[1:]]).flip(0)
    beside_others = run(reordered, math.isqrt(len(checked) - 1) + 1).flip(0)
    direct, all_kept = _direct_log_probs(model, unmasked), readout(model, beside_others[0])
    recorded = readout(model, unmasked.final_hidden, wide=False)
    differences = {
        UNMASKED: _response_variation(direct, recorded),
        "all heads kept": _response_variation(unmasked.log_probs(model), all_kept),
    }
    if lowest_precision(model) not in LIMITS:  # 32-bit logits change only the rounding
        differences["logits in 32 bits"] = _response_variation(direct, unmasked.log_probs(model))
    rows = torch.linspace(0, len(checked) - 1, min(CHECKED_ROWS, len(checked))).long().unique()
    for row in rows.tolist():
        hidden = full_forward_passes(model, unmasked, layer, checked[row : row + 1])[0]
        differences[f"mask {row + 1} of {len(checked)}"] = _response_variation(
            readout(model, hidden), readout(model, states[row])
        )
    if len(checked) > 1:
        moved = (states - beside_others)[1:].float().flatten(1).norm(dim=1)
        row = 1 + int(moved.argmax())
        differences[f"mask {row + 1} of {len(checked)} beside other masks"] = _response_variation(
            readout(model, beside_others[row]), readout(model, states[row])
        )
    return differences


def select_strategy(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    chunk_sizes: dict[str, int],
) -> Strategy:
    """The cheapest strategy for these masks that passes the self-check; see the module docstring.

    Call it inside `scoring_session`.

    Args:
        chunk_sizes: number of masks to run at once, by name of the strategy.

    Raises:
        RuntimeError: no strategy passes; the message gives the difference of each.
    """
    extent = partial(extent_of, model, unmasked.input_ids, unmasked.prompt_length)
    possible = {strategy.name: strategy for strategy in strategies(model, unmasked, layer)}
    candidates: list[Candidate] = []
    for name, strategy in possible.items():
        size = chunk_sizes[name]
        compare = partial(difference, model, unmasked, layer, masks, size, strategy)
        candidates.append((name, extent(strategy.packed, min(size, len(masks))), compare))
    checks = checks_of(model, MaskedPasses(unmasked.scope))
    known = {name for name, _ in checks.failed}
    kind = extent(False, len(masks)).kind
    right, reasons = checks.select(candidates, kind, layer)
    if right is not None:
        if possible[right].one_mask:  # rows depend on their batch: lengths do not say when
            checks.doubtful.add(kind)
        for name in reasons.keys() - known:
            log.warning(
                "%s: strategy %r failed the self-check (scope %s): %s. Using a slower one",
                type(model).__name__,
                name,
                unmasked.scope,
                reasons[name],
            )
        return possible[right]
    raise RuntimeError(
        f"self-check failed for {type(model).__name__} (layer {layer}, scope {unmasked.scope!r}, "
        f"{attention_of(model)}): masked passes disagree with full forward passes "
        f"({named(reasons)}). Nothing was scored. Non-deterministic models and batch-dependent "
        "rounding (such as dynamic quantization) are unsupported; otherwise try "
        "attention='eager', or report this model class"
    )


def _rounding(model: PreTrainedModel, unmasked: UnmaskedPass) -> float:
    """Total variation of the unmasked pass between two attention implementations, which differ only
    in rounding. 0 if the model is not 16-bit, or has only one implementation."""
    if lowest_precision(model) in LIMITS:
        return 0.0
    ids = unmasked.input_ids[None, :-1].to(execution_device(model.get_input_embeddings()))
    log_probs = []
    try:
        for attention in MASKABLE:
            with scoring_session(model, attention):
                logits = own_logits(model, input_ids=ids)[0, unmasked.predicting]
            log_probs.append(logits.log_softmax(-1))
    except ValueError:  # the model has only one
        return 0.0
    return _response_variation(log_probs[0], log_probs[1])


BUGS = (NameError, AttributeError, ImportError, TypeError, LookupError)
"""Errors that are bugs if this package raises them in a pass."""


def own_bug(error: Exception) -> bool:
    """Whether an error is a bug of this package, so that no slower way may hide it.

    Where the package reads what a model passes to its layers, which may be anything, it is not.
    """
    if not isinstance(error, BUGS):
        return False
    *_, (frame, _) = walk_tb(error.__traceback__)
    module = str(frame.f_globals.get("__name__"))
    of_package = module.partition(".")[0] == __name__.partition(".")[0]
    return of_package and module != LayerCall.__module__


def difference(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    chunk_size: int,
    strategy: Strategy,
) -> str | None:
    """How a strategy differs from full forward passes beyond rounding, or the error it raises; None
    if it agrees with them."""
    try:
        differences = _differences(model, unmasked, layer, masks, chunk_size, strategy)
    except (torch.OutOfMemoryError, FloatingPointError):
        raise
    except Exception as error:  # models raise different errors
        if own_bug(error):
            raise
        return f"{type(error).__name__}: {error}"
    excess = _excess(differences, lowest_precision(model))
    if excess is not None:
        excess = _excess(differences, lowest_precision(model), _rounding(model, unmasked))
    return excess
