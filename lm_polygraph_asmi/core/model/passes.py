"""The passes: the model runs itself, with layers below the target bypassed and heads masked.

`run_unmasked` runs the model once and keeps the states that enter each target layer. A masked pass
calls the model again: layers below the target return at once, the target gets the kept state, and
the outputs of masked heads are zero before its output projection. The others are not rescaled.

Some layers hand more than states to layers above: keys and values (Gemma 4), which keys to attend
to (HY 4), states of a router (Zaya). Layers below the target hand on those of the unmasked pass.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.core.model.devices import execution_device
from lm_polygraph_asmi.core.model.forwards import (
    SHARED,
    Forward,
    OneLayerCache,
    Replacement,
    arguments,
    cache_of,
    first_tensor,
    parameters_of,
    replaced_forwards,
    with_cache,
)
from lm_polygraph_asmi.core.model.masked import MaskedModel
from lm_polygraph_asmi.core.model.structure import context_window

KeysAndValues = tuple[Tensor, ...]


@dataclass(frozen=True)
class UnmaskedPass:
    """The unmasked pass of one example; the last token, which predicts nothing, does not run.

    In this module, N is the number of tokens that run, T of them predict the response, and B is the
    number of masks that run together.
    """

    input_ids: Int[Tensor, " tokens"]  # prompt and response, N + 1
    prompt_length: int  # N + 1 - T
    scope: str
    final_hidden: Float[Tensor, "T D"]  # after the final norm, where the response is predicted
    # States that enter each target layer: (1, N, D), in some models with another axis. Masked
    # passes begin with them.
    entering: dict[int, Tensor]
    # States that leave each target layer, of the last layer after the norm; no pass reads them.
    leaving: dict[int, Float[Tensor, "T _"]]
    # Keys and values that layers below a target share with layers above, by layer.
    shared: dict[int, dict[str, KeysAndValues]] = field(default_factory=dict)
    # What these layers return beside their states, by layer.
    beside: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    # The next three are for scope "response". Of each layer from the lowest target on:
    attention_masks: dict[int, Tensor | None] = field(default_factory=dict)
    # Of the same layers, keys and values of all positions, if they are kept.
    caches: dict[int, OneLayerCache] = field(default_factory=dict)
    # The model's own cache of the prompt, which the first pass that needs it adds.
    prompt_caches: list[Any] = field(default_factory=list)

    @property
    def before(self) -> int:
        """Number of positions before those that predict the response."""
        return self.prompt_length - 1

    @property
    def predicting(self) -> slice:
        """Positions whose output distribution predicts the response tokens, the last T of N."""
        return slice(self.before, len(self.input_ids) - 1)

    def tokens(self, model: PreTrainedModel) -> Int[Tensor, "1 N"]:
        """See `running`."""
        return running(model, self.input_ids)


def validate_tokens(model: PreTrainedModel, input_ids: Tensor, prompt_length: int) -> None:
    """Raise ValueError unless token ids with a prompt are valid and fit the context window."""
    if input_ids.ndim != 1:
        raise ValueError(
            "input_ids must be one unpadded sequence of shape (tokens,), got "
            f"{tuple(input_ids.shape)}"
        )
    if prompt_length < 1:
        raise ValueError(
            f"the prompt must have at least one token (such as BOS), got {prompt_length}: it "
            "predicts the first response token"
        )
    vocabulary = model.config.get_text_config().vocab_size
    if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocabulary:
        raise ValueError(
            f"token ids must lie in [0, {vocabulary - 1}], the model's vocabulary, got "
            f"{int(input_ids.min())} to {int(input_ids.max())}: use the model's tokenizer"
        )
    window = context_window(model.config)
    if window is not None and len(input_ids) > window:
        raise ValueError(
            f"prompt and response are {len(input_ids)} tokens long, but {type(model).__name__} "
            f"has a context window of {window}: shorten the prompt or skip the example"
        )


def run_unmasked(
    f: MaskedModel,
    input_ids: Tensor,  # (tokens,), as is checked here
    prompt_length: int,
    target_layers: Iterable[int],
    scope: str = "all",
    keep_keys_and_values: bool = True,
) -> UnmaskedPass:
    """Run the model once, in a session; keep what masked passes from `target_layers` need.

    `keep_keys_and_values`: in scope "response", also keys and values.

    Raises ValueError: no prompt, an empty response, a sequence beyond the context window, or a
    layer without heads.
    """
    validate_tokens(f.model, input_ids, prompt_length)
    if prompt_length >= len(input_ids):
        raise ValueError(f"the response is empty: all {len(input_ids)} tokens are prompt")
    targets = sorted(set(target_layers))
    for layer in targets:
        f.projection(layer)  # raises for a layer without heads
    with_caches = scope == "response" and keep_keys_and_values and bool(targets)
    layers, before = f.layers, prompt_length - 1
    entering: dict[int, Tensor] = {}
    leaving: dict[int, Tensor] = {}
    shared: dict[int, dict[str, KeysAndValues]] = {}
    beside: dict[int, tuple[Any, ...]] = {}
    attention_masks: dict[int, Tensor | None] = {}
    caches: dict[int, OneLayerCache] = {}

    def watch(index: int, real: Forward, *args: Any, **kwargs: Any) -> Any:
        given = arguments(layers[index], args, kwargs)
        # The layer adds what it shares to the dictionary that it is given.
        already_shared = dict(given.get(SHARED) or {})
        if with_caches and index >= targets[0]:
            caches[index] = OneLayerCache()
            given |= caches[index].argument(layers[index])
            attention_masks[index] = given.get("attention_mask")
        output = real(**given) if index in caches else real(*args, **kwargs)
        if given.get(SHARED):
            shared[index] = _added(already_shared, given[SHARED])
        if index + 1 in targets and isinstance(output, tuple | list):
            beside[index] = tuple(output[1:])
        if index in targets:
            entering[index] = states = given[states_name(layers[index])]
            axis = row_axis(states)
            predicting = _without_first(before, states_of(output), axis).select(axis, 0)
            # A copy: the states at the other positions need not be kept.
            leaving[index] = predicting.movedim(axis, 0).flatten(1).clone()
        return output

    # Targets, for the states; with caches, all layers from the lowest target on; and layers below a
    # target that hand on more than states.
    watched = {*targets, *(range(targets[0], len(layers)) if with_caches else ())}
    watched |= {index for index in f.handing_on if index < max(targets, default=0)}
    watches = ((layers[index], partial(watch, index)) for index in watched)
    with replaced_forwards(*f.compiled(layers), *watches):
        final = states_of(f.base(input_ids=running(f.model, input_ids), use_cache=False))
    final_hidden = final[0, before:]
    if len(layers) - 1 in leaving:
        leaving[len(layers) - 1] = final_hidden
    return UnmaskedPass(
        input_ids, prompt_length, scope, final_hidden, entering, leaving, shared, beside,
        attention_masks, caches,
    )  # fmt: skip


def running(model: PreTrainedModel, input_ids: Int[Tensor, " tokens"]) -> Int[Tensor, "1 N"]:
    """All tokens but the last, which predicts nothing, where the model takes them."""
    return input_ids[None, :-1].to(execution_device(model.get_input_embeddings()))


def _added(before: dict[str, KeysAndValues], shared: Any) -> dict[str, KeysAndValues]:
    """Keys and values that a layer added; those before may be in other tuples now."""
    tensors = {id(each) for pair in before.values() for each in pair}
    return {kind: pair for kind, pair in shared.items() if id(pair[0]) not in tensors}


def states_of(output: Any) -> Tensor:
    """The states in the output of a base model or a layer: its first tensor."""
    states = first_tensor(output)
    if states is None:
        raise RuntimeError(f"expected a pass to return a tensor, got {type(output).__name__}")
    return states


def states_name(layer: nn.Module) -> str:
    """Name of the argument of a layer that holds its hidden states."""
    return parameters_of(type(layer).forward)[0]


def row_axis(states: Tensor) -> int:
    """The axis of rows in the states of one row; the axis of positions comes next.

    Some models have several streams of states: (4, 1, N, D) in Gemma 3n, (1, N, 4, D) in HY 4.
    """
    return states.shape.index(1)


def _in_rows(rows: int, tensor: Tensor, axis: int = 0) -> Tensor:
    """One row several times, without a copy."""
    return tensor.expand(*tensor.shape[:axis], rows, *tensor.shape[axis + 1 :])


def _each_in_rows(rows: int, parts: Iterable[Any]) -> tuple[Any, ...]:
    """Several parts; those that are tensors of one row get more rows."""
    return tuple(
        _in_rows(rows, part) if isinstance(part, Tensor) and part.shape[:1] == (1,) else part
        for part in parts
    )


def _without_first(number: int, states: Tensor, rows: int) -> Tensor:
    """States without those at the first positions, whose axis comes after that of rows."""
    return states.narrow(rows + 1, number, states.shape[rows + 1] - number)


def by_head(heads: Tensor, mask: Shaped[Tensor, "B n H"], rows: int) -> Float[Tensor, "B N W"]:
    """Concatenated head outputs of some rows, each head times its mask."""
    split = heads.reshape(rows, -1, mask.shape[-1], heads.shape[-1] // mask.shape[-1])
    return (split * mask[..., None].to(heads)).flatten(2)


def heads_masked(
    f: MaskedModel, layer: int, mask: Shaped[Tensor, "B n H"], one_row: bool = False
) -> Replacement:
    """What masks heads at a layer.

    Args:
        mask: 1 keeps a head. (B, 1, H): a mask for each row. (1, n, H): one row, with a mask for
            each of its positions.
        one_row: the model runs one row for B masks, so attention runs once. Its output is copied
            for each mask, masked, and then projected: B rows go on.
    """

    def project(real: Forward, heads: Tensor, *args: Any, **kwargs: Any) -> Any:
        masked = by_head(heads, mask, 1 if one_row else len(mask))
        return real(masked if one_row else masked.reshape(heads.shape), *args, **kwargs)

    return f.projection(layer), project


SharedHere = Callable[[int, KeysAndValues], KeysAndValues]
"""Index of a layer, and keys and values that it shared in the unmasked pass -> those of a masked
pass."""


def starting_at(
    f: MaskedModel, unmasked: UnmaskedPass, layer: int, given: dict[str, Any],
    shared_here: SharedHere, beside: Sequence[Any] = (), copies: int = 1,
) -> Iterator[Replacement]:  # fmt: skip
    """What lets a pass start at a layer: it gets the arguments `given`, such as its states, and all
    layers below return at once.

    The rest is for models whose layers hand more than states to layers above:

    Args:
        shared_here: see `SharedHere`.
        beside: what the layer right below returns beside its states.
        copies: rows that leave the layer for each row that enters: B where its projection gets one
            row for B masks, else 1. What it hands on is copied as often.
    """
    target, returns = f.layers[layer], f.structure.returns
    returns_tensor = returns[layer] == 0  # else a tuple

    def share(index: int, received: dict[str, Any]) -> None:
        kept = unmasked.shared[index]
        received[SHARED].update({kind: shared_here(index, pair) for kind, pair in kept.items()})

    def enter(real: Forward, *args: Any, **kwargs: Any) -> Any:
        received = arguments(target, args, kwargs) | given
        output = real(**received)
        if shared := received.get(SHARED):
            shared.update({kind: _each_in_rows(copies, pair) for kind, pair in shared.items()})
        return output if returns_tensor else (output[0], *_each_in_rows(copies, output[1:]))

    yield target, enter
    for index in range(layer):
        act = partial(share, index) if index in unmasked.shared else None
        others = beside if index == layer - 1 else ()
        yield returning(f.layers[index], returns[index], others, act)


def returning(
    layer: nn.Module,
    length: int,
    beside: Sequence[Any] = (),
    act: Callable[[dict[str, Any]], object] | None = None,
) -> Replacement:
    """A layer that returns the states it gets, and computes nothing.

    `length`: of the tuple that it returns; 0: the states alone. `beside`: the rest of that tuple,
    else None. `act`: is called with the layer's arguments before.
    """
    name, others = states_name(layer), beside or [None] * (length - 1)

    def forward(_: Forward, *args: Any, **kwargs: Any) -> Any:
        if act is not None:
            act(arguments(layer, args, kwargs))
        states = args[0] if args else kwargs[name]
        return (states, *others) if length else states

    return layer, forward


def suffix(
    f: MaskedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    one_row: bool = True,
) -> Float[Tensor, "B T D"]:
    """Heads masked at every position. One row runs up to the projection, whose input is copied for
    each of B masks and masked. The residual stream, still one row, is added to each: B rows.

    `one_row`: False for layers that compare the sizes of their arguments: B rows from the start.
    """
    rows, copies = (1, len(masks)) if one_row else (len(masks), 1)
    ids, states = unmasked.tokens(f.model).expand(rows, -1), unmasked.entering[layer]
    last, layers = f.structure.num_layers - 1, f.layers
    predicting_only = partial(_only_at, unmasked.predicting, ids.shape[1])
    after_attention = _after_last_attention(f) if one_row and layer < last else []
    entering = {states_name(layers[layer]): _in_rows(rows, states, row_axis(states))}
    beside = _each_in_rows(rows, unmasked.beside.get(layer - 1, ()))

    def in_rows(_: int, pair: KeysAndValues) -> KeysAndValues:
        return _each_in_rows(rows, pair)

    replaced: list[Replacement] = [
        *f.compiled(layers[layer + 1 : last]),
        *((module, predicting_only) for module in after_attention),
        heads_masked(f, layer, masks[:, None], one_row),
        *starting_at(f, unmasked, layer, entering, in_rows, beside, copies),
    ]
    with replaced_forwards(*replaced):
        states = states_of(f.base(input_ids=ids, use_cache=False))
    return _expect_rows(states, len(masks))[:, unmasked.predicting]


def _after_last_attention(f: MaskedModel) -> list[nn.Module]:
    """What follows attention in the last layer. Only its output at the positions that predict the
    response is read, so it runs there alone."""
    last = f.structure.num_layers - 1
    modules = [f.projection(last)] if last in f.structure.projections else []
    mlp = getattr(f.layers[last], "mlp", None)
    return [*modules, mlp] if isinstance(mlp, nn.Module) else modules


def _only_at(
    positions: slice, total: int, real: Forward, states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """A module that returns a tensor runs only at some of all positions; others are zeros."""
    if states.ndim != 3 or states.shape[1] != total:
        return real(states, *args, **kwargs)
    found = real(states[:, positions].contiguous(), *args, **kwargs)
    if not isinstance(found, Tensor):
        return real(states, *args, **kwargs)
    padded = found.new_zeros(*states.shape[:2], found.shape[-1])
    padded[:, positions] = found
    return padded


def full_passes(
    f: MaskedModel, unmasked: UnmaskedPass, layer: int, masks: Shaped[Tensor, "B H"]
) -> Float[Tensor, "B T D"]:
    """One full pass after the other, in either scope: the truth that other passes are compared
    with."""
    ids, states = unmasked.tokens(f.model), []
    for mask in masks:
        by_position = mask.repeat(1, ids.shape[1], 1)
        if unmasked.scope == "response":
            by_position[:, : unmasked.before] = 1
        with replaced_forwards(heads_masked(f, layer, by_position)):
            found = states_of(f.base(input_ids=ids, use_cache=False))
        states.append(found[:, unmasked.predicting])
    return torch.cat(states)


def packed(
    f: MaskedModel, unmasked: UnmaskedPass, layer: int, masks: Shaped[Tensor, "B H"]
) -> Float[Tensor, "B T D"]:
    """Heads masked where the response is predicted, from the last prompt token on: one sequence, of
    which the B subnetworks are parts.

    They follow the keys and values of the prompt, which the unmasked pass kept, and do not attend
    to each other.
    """
    copies, before = len(masks), unmasked.before
    length, layers = len(unmasked.final_hidden), f.layers
    caches = {index: kept.first(before) for index, kept in unmasked.caches.items()}
    # A layer that takes the keys and values of another keeps none.
    if any(each.keys is None and i not in f.handing_on for i, each in caches.items()):
        raise NotImplementedError("a layer kept no keys and values")
    states, axis = unmasked.entering[layer], row_axis(unmasked.entering[layer])
    entering = torch.cat([_without_first(before, states, axis)] * copies, axis + 1)
    # Many layers share one attention mask.
    by_id = {id(given): given for given in unmasked.attention_masks.values()}
    packed_attention = {
        key: _packed_attention_mask(given, before, length, copies, entering.device)
        for key, given in by_id.items()
    }

    def own_keys(index: int) -> dict[str, Any]:
        """Arguments by which each response attends to the prompt and to itself."""
        attention_mask = packed_attention[id(unmasked.attention_masks[index])]
        return {"attention_mask": attention_mask} | caches[index].argument(layers[index])

    def attend_to_own(index: int, real: Forward, *args: Any, **kwargs: Any) -> Any:
        return real(**arguments(layers[index], args, kwargs) | own_keys(index))

    def after_prompt(_: int, pair: KeysAndValues) -> KeysAndValues:
        responses = [torch.cat([each[..., before:, :]] * copies, -2) for each in pair]
        return OneLayerCache(*pair).first(before).update(*responses)

    head_mask = masks.repeat_interleave(length, 0)[None]
    ids = unmasked.tokens(f.model)[:, before:].repeat(1, copies)
    positions = torch.arange(before, before + length, device=ids.device).repeat(copies)[None]
    of_target, above = own_keys(layer), range(layer + 1, len(layers))
    given = {states_name(layers[layer]): entering} | of_target
    replaced: list[Replacement] = [
        *f.compiled(layers[layer + 1 :]),
        *((layers[index], partial(attend_to_own, index)) for index in above),
        heads_masked(f, layer, head_mask),
        # Nothing beside states is handed on: `classes.csv` lists no class as packed that needs it.
        *starting_at(f, unmasked, layer, given, after_prompt),
    ]
    # An attention mask is passed because the model would build one, which takes longer than a
    # layer.
    inputs = {"position_ids": positions, "attention_mask": of_target["attention_mask"]}
    with replaced_forwards(*replaced):
        states = states_of(f.base(input_ids=ids, **inputs, use_cache=False))
    return states.reshape(copies, length, -1)


def _packed_attention_mask(
    given: Tensor | None, before: int, length: int, copies: int, device: torch.device
) -> Tensor:
    """Attention mask of `copies` responses after one prompt, each of which attends to the prompt
    and to itself as `given` says; in its form, boolean or added to the scores."""
    total = before + length
    if given is None:
        rows = torch.ones(total, total, dtype=torch.bool, device=device).tril()[before:]
    else:
        rows = given[0, 0, before:]
    allowed = rows if rows.dtype == torch.bool else rows == 0
    prompt, own = allowed[:, :before], allowed[:, before:]
    parts = [prompt.repeat(copies, 1), torch.block_diag(*[own] * copies)]
    mask = torch.cat(parts, dim=1)[None, None].to(torch.bool)
    if rows.dtype == torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=rows.dtype).masked_fill(~mask, torch.finfo(rows.dtype).min)


def rows_after_prompt(
    f: MaskedModel, unmasked: UnmaskedPass, layer: int, masks: Shaped[Tensor, "B H"]
) -> Float[Tensor, "B T D"]:
    """Heads masked where the response is predicted: rows of a batch, each after a copy of the
    model's own cache of the prompt (keys and values, recurrent states)."""
    base, ids, before = f.base, unmasked.tokens(f.model), unmasked.before
    cache = _prompt_cache(f, unmasked, len(masks)) if before else None

    def after_prompt(index: int, pair: KeysAndValues) -> KeysAndValues:
        responses = [_in_rows(len(masks), each[..., before:, :]) for each in pair]
        return tuple(responses) if cache is None else cache.update(*responses, index)

    rows, states = ids[:, before:].expand(len(masks), -1), unmasked.entering[layer]
    axis = row_axis(states)
    entering = _in_rows(len(masks), _without_first(before, states, axis), axis)
    parts = unmasked.beside.get(layer - 1, ())
    of_response = [part[:, before:] if isinstance(part, Tensor) else part for part in parts]
    beside = _each_in_rows(len(masks), of_response)
    given = {states_name(f.layers[layer]): entering}
    started = starting_at(f, unmasked, layer, given, after_prompt, beside)
    with replaced_forwards(heads_masked(f, layer, masks[:, None]), *started):
        states = states_of(base(input_ids=rows, **with_cache(base, cache), use_cache=True))
    return _expect_rows(states, len(masks))


def _prompt_cache(f: MaskedModel, unmasked: UnmaskedPass, rows: int) -> Any:
    """A copy of the model's own cache of the positions before the response, in so many rows."""
    if not unmasked.prompt_caches:
        kinds = [str(vars(module).get("rope_type")) for module in f.model.modules()]
        if any("dynamic" in kind or "longrope" in kind for kind in kinds):
            raise NotImplementedError("its rotary angles depend on the length")
        prompt = unmasked.tokens(f.model)[:, : unmasked.before]
        unmasked.prompt_caches.append(cache_of(f.base(input_ids=prompt, use_cache=True)))
    if unmasked.prompt_caches[0] is None:
        raise NotImplementedError("the model keeps no cache")
    cache = copy.deepcopy(unmasked.prompt_caches[0])
    # Row 0, as often as there are rows.
    cache.reorder_cache(torch.zeros(rows, dtype=torch.long, device=unmasked.final_hidden.device))
    return cache


def _expect_rows(states: Tensor, number: int) -> Tensor:
    """States of so many rows; RuntimeError for another number."""
    if len(states) != number:
        raise RuntimeError(f"expected states of {number} rows, got {len(states)}")
    return states
