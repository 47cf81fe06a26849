"""Masked passes during generation: all subnetworks advance one position at a time.

All subnetworks share the prompt's keys and values, from the unmasked model; each has its own for
the answer. Each step returns final states, as scope "response" does for the finished answer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from lm_polygraph_asmi.model.check import checks_of, difference, extent_of, named
from lm_polygraph_asmi.model.devices import execution_device, quick_rows
from lm_polygraph_asmi.model.layer_call import (
    KeysValues,
    KeyValueTap,
    LayerCall,
    cache_of,
    with_cache,
)
from lm_polygraph_asmi.model.layers import (
    base_model,
    context_window,
    decoder_layers,
    final_norm,
)
from lm_polygraph_asmi.model.masking import masked_heads, masked_layer
from lm_polygraph_asmi.model.model_cache import has_foreign_code
from lm_polygraph_asmi.model.structure import states_of
from lm_polygraph_asmi.model.suffix import Strategy, cache_of_rows
from lm_polygraph_asmi.model.unmasked import (
    PrefixCache,
    RecordedInputs,
    UnmaskedPass,
    check_scope_runs,
    record_inputs,
    run_unmasked,
)

CHECKED_TOKENS = 3
"""Number of answer tokens in the check of the steps."""
CAPACITY = 16
"""Positions allocated at first; doubled when full."""


Steps = Callable[[Iterable[int]], Tensor]
"""Called with the prompt, then with each token of the answer. Returns final states (rows, 1, D) at
the last token: of the unmasked model, then under each of the B masks. More rows may follow, to be
ignored."""


@dataclass(frozen=True)
class StreamState:
    """Steps, and the rows of their states for the drawn masks; as in `Subnetworks`.

    Attributes:
        steps: runs the unmasked model and the subnetworks one step further.
        rows: row of each distinct subnetwork in the states of a step.
        index: for each of the S drawn masks, the index of its distinct subnetwork.
        counts: how often each distinct mask was drawn; sums to S.

    Example:
        >>> from lm_polygraph_asmi.model import scoring_session
        >>> with scoring_session(model):
        ...     stream = steps_of(model, ids[:6], 2, masks)
        >>> isinstance(stream, StreamState), stream.counts
        (True, tensor([2., 1.]))
    """

    steps: Steps
    rows: Int[Tensor, " distinct"]
    index: Int[Tensor, " S"]
    counts: Float[Tensor, " distinct"]


class _GrowingKeysValues:
    """Keys and values of a layer: the prompt's, then at each step one of every row."""

    def __init__(self, *prompt: Tensor) -> None:
        self.parts = list(prompt)
        self.length = prompt[0].shape[-2] if prompt else 0

    def __call__(self, key: Tensor, value: Tensor) -> KeysValues:
        parts = self.parts or [key[:, :, :0], value[:, :, :0]]  # a prompt of one token
        end = self.length + key.shape[-2]
        if end > parts[0].shape[-2]:
            free = max(CAPACITY * key.shape[-2], end)
            self.parts = [
                part.new_empty(*part.shape[:2], end + free, part.shape[-1]) for part in parts
            ]
            for larger, part in zip(self.parts, parts, strict=True):
                larger[:, :, : self.length] = part[:, :, : self.length]
        for part, new in zip(self.parts, (key, value), strict=True):
            part[:, :, self.length : end] = new
        self.length = end
        keys, values = self.parts
        return keys[:, :, :end], values[:, :, :end]


def _rows(model: PreTrainedModel, masks: Shaped[Tensor, "B H"]) -> Shaped[Tensor, "rows H"]:
    """Masks of all rows: one that keeps every head, those of the subnetworks, and, if a larger
    batch is faster, padding rows that keep every head."""
    ones, rows = masks.new_ones(1, masks.shape[1]), 1 + len(masks)
    padding = quick_rows(rows, execution_device(model.get_input_embeddings())) - rows
    return torch.cat([ones, masks, ones.expand(padding, -1)])


def _pass_at_last(ids: list[int], recorded: RecordedInputs | None = None) -> UnmaskedPass:
    """An unmasked pass over the last of these tokens, without its final states."""
    recorded = recorded or RecordedInputs()
    return UnmaskedPass(
        input_ids=torch.tensor([*ids, ids[-1]]),  # the token after the last is not used
        prompt_length=len(ids),
        targets=recorded.targets,
        calls=recorded.calls,
        scope="response",
        keys_values={},
        devices=frozenset(),
        final_hidden=torch.empty(0, 1),
        start=len(ids) - 1,
    )


class OneSequence:
    """One pass per step. Up to the masked layer it is the pass of generation; from there on its
    position becomes one row per mask. The rows share one prompt and do not attend to each other.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layer: int,
        masks: Shaped[Tensor, "B H"],
    ) -> None:
        if not PrefixCache.serves(model):
            raise NotImplementedError("its layers keep more than keys and values")
        self.model, self.layer = model, layer
        self.masks = _rows(model, masks)
        self.ids: list[int] = []
        self.shared = 0  # number of positions whose keys and values all rows share
        self.keys_values: dict[int, _GrowingKeysValues] = defaultdict(_GrowingKeysValues)

    def __call__(self, tokens: Iterable[int]) -> Tensor:
        *before, last = tokens
        if before:
            cache = DynamicCache()
            self._run(before, cache)
            layers: list[Any] = cache.layers
            for index, layer in enumerate(layers):
                self.keys_values[index] = _GrowingKeysValues(layer.keys, layer.values)
            self.ids, self.shared = before, len(before)
        tap = KeyValueTap(
            lambda key, value, layer: self.keys_values[layer](key, value), self.model.config
        )
        tap.length = len(self.ids)
        self.ids.append(last)
        with self._in_rows():
            return self._run([last], tap).reshape(len(self.masks), 1, -1)

    def _run(self, ids: list[int], cache: DynamicCache) -> Tensor:
        input_ids = torch.tensor([ids], device=execution_device(self.model.get_input_embeddings()))
        base = base_model(self.model)
        return states_of(base(input_ids=input_ids, **with_cache(base, cache), use_cache=True))

    @contextmanager
    def _in_rows(self) -> Iterator[None]:
        """Give every module after the masked layer all rows instead of one."""
        model, layer, position = self.model, self.layer, len(self.ids) - 1
        upper = [*decoder_layers(model), final_norm(model)][layer + 1 :]
        places = torch.zeros(len(self.masks), dtype=torch.long)  # all rows at the one position
        packed: dict[int, Tensor] = {}

        def enter(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            hidden, call = LayerCall.split(module, args, kwargs, position)
            if module is upper[0]:
                unmasked = _pass_at_last(self.ids, recorded)
                hidden = masked_layer(
                    model, unmasked, layer, self.masks, unmasked.predicting
                ).reshape(1, len(self.masks), -1)
            if module is upper[-1]:
                return (hidden,), call.arguments
            call = LayerCall(call.arguments, 1, position)  # the other arguments: one position
            kind = id(call.arguments.get("attention_mask"))
            if kind not in packed:
                packed[kind] = self._allowed(call).to(hidden.device)
            return (hidden,), call.at_places(places, packed[kind].to(hidden.device))

        with ExitStack() as hooks:
            recorded = hooks.enter_context(record_inputs(model, [layer], [layer], position))
            for module in upper:
                handle = module.register_forward_pre_hook(enter, with_kwargs=True)
                hooks.callback(handle.remove)
            yield

    def _allowed(self, call: LayerCall) -> Tensor:
        """(rows, keys): which keys each row attends to: shared ones, and its own of each step."""
        shared, answer = call.allowed(slice(0, 1)).cpu().tensor_split([self.shared], dim=1)
        same_row = torch.eye(len(self.masks), dtype=torch.bool)
        steps = answer[0][None, :, None] & same_row[:, None]  # (row, step, row)
        return torch.cat([shared.expand(len(same_row), -1), steps.flatten(1)], dim=1)


class RowsOfBatch:
    """Each row of a batch has its own cache, of any kind that the model keeps."""

    def __init__(
        self,
        model: PreTrainedModel,
        layer: int,
        masks: Shaped[Tensor, "B H"],
    ) -> None:
        self.model, self.layer = model, layer
        self.masks = _rows(model, masks)
        self.ids: list[int] = []
        self.cache: Any = None

    def __call__(self, tokens: Iterable[int]) -> Tensor:
        tokens = list(tokens)
        device = execution_device(self.model.get_input_embeddings())
        rows = len(self.masks)
        if len(tokens) > 1:
            prompt = torch.tensor([tokens[:-1]], device=device)
            output = base_model(self.model)(input_ids=prompt, use_cache=True)
            self.cache = cache_of_rows(cache_of(output), rows, device)
        self.ids += tokens
        ids = torch.tensor(tokens[-1:], device=device).expand(rows, 1)
        position = len(self.ids) - 1
        with masked_heads(
            self.model, self.layer, self.masks, torch.tensor([position]), before=position
        ):
            base = base_model(self.model)
            output = base(input_ids=ids, **with_cache(base, self.cache), use_cache=True)
        self.cache = cache_of(output)
        if self.cache is None:
            raise NotImplementedError("the model keeps no cache")
        return states_of(output)


def _stepwise(kind: Any) -> Any:
    """A function that runs a finished answer step by step, for the check."""

    def run(
        model: PreTrainedModel,
        unmasked: UnmaskedPass,
        layer: int,
        masks: Shaped[Tensor, "B H"],
    ) -> Float[Tensor, "B T D"]:
        steps: Steps = kind(model, layer, masks)
        ids, prompt_length = unmasked.input_ids.tolist(), unmasked.prompt_length
        inputs = [ids[:prompt_length], *([token] for token in ids[prompt_length:-1])]
        return torch.cat([steps(tokens)[1 : 1 + len(masks)] for tokens in inputs], dim=1)

    return run


KINDS = (
    (OneSequence, Strategy("growing packed sequence", "response", _stepwise(OneSequence),
                      lambda *_: 0, packed=True)),
    (RowsOfBatch, Strategy("growing batch", "response", _stepwise(RowsOfBatch), lambda *_: 0)),
)  # fmt: skip
"""Cheapest first."""


def repeat_prompt(prompt: Int[Tensor, " P"], tokens: int) -> Int[Tensor, " N"]:
    """The prompt, followed by its own first tokens as an answer for the check."""
    return torch.cat([prompt] * (1 + -(-tokens // len(prompt))))[: len(prompt) + tokens]


def steps_of(
    model: PreTrainedModel,
    prompt: Int[Tensor, " P"],
    layer: int,
    masks: Shaped[Tensor, "S H"],
) -> "StreamState":
    """Subnetworks of S masks for an answer that is being generated; equal masks are run once.

    The steps are compared with full forward passes, for this prompt or one like it. The answer of
    that check is the prompt's own first tokens. Call it in `scoring_session`.

    Raises:
        RuntimeError: the self-check failed, or the model has foreign hooks.

    Example:
        >>> from lm_polygraph_asmi.model import scoring_session
        >>> with scoring_session(model):
        ...     stream = steps_of(model, ids[:6], 2, masks)
        ...     states = stream.steps(ids[:6].tolist())  # the prompt
        ...     states = stream.steps([9])  # the first token of the answer
        >>> states[stream.rows].shape  # (distinct, 1, D)
        torch.Size([2, 1, 16])
    """
    check_scope_runs(model, "response")
    if has_foreign_code(model):
        raise RuntimeError(
            f"{type(model).__name__} cannot be scored while it writes: it has hooks or "
            "foreign forward methods, which may act differently step by step. Remove them, or "
            "score the finished answer with `score`"
        )
    distinct, index, counts = masks.cpu().unique(dim=0, return_inverse=True, return_counts=True)
    masked = ~distinct.all(dim=1)  # the row that keeps every head is the unmasked model's
    kind = _select_kind(model, prompt.cpu(), layer, distinct[masked])
    steps = kind(model, layer, distinct[masked])
    return StreamState(steps, masked.cumsum(0) * masked, index, counts.float())


def _select_kind(
    model: PreTrainedModel,
    prompt: Int[Tensor, " P"],
    layer: int,
    masks: Shaped[Tensor, "B H"],
) -> Any:
    """The cheapest kind of steps that passes the self-check."""
    if not len(masks):
        return RowsOfBatch
    tokens_left = (context_window(model) or len(prompt) + CHECKED_TOKENS) - len(prompt)
    input_ids = repeat_prompt(prompt, max(1, min(CHECKED_TOKENS, tokens_left)))
    extent = extent_of(model, input_ids, len(prompt), True, len(masks))
    unmasked = cache(lambda: run_unmasked(model, input_ids, len(prompt), [layer], "response"))

    def compare(strategy: Strategy) -> str | None:
        return difference(model, unmasked(), layer, masks, len(masks), strategy)

    kinds = {strategy.name: (kind, strategy) for kind, strategy in KINDS}
    right, reasons = checks_of(model, ("steps",)).select(
        [(name, extent, partial(compare, strategy)) for name, (_, strategy) in kinds.items()],
        extent.kind,
        layer,
    )
    if right is not None:
        return kinds[right][0]
    raise RuntimeError(
        f"{type(model).__name__} cannot be scored while it writes: masked steps from layer {layer} "
        f"on disagree with full forward passes ({named(reasons)}). Score the finished answer with "
        "`score`"
    )
