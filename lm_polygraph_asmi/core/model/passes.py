"""The passes: the model runs itself, with layers below the target bypassed and heads masked.

`run_unmasked` runs the model once and keeps the states that enter each target layer. A masked pass
calls the model again: layers below the target return at once, the target gets the kept state, and
the outputs of masked heads are zero before its output projection. The others are not rescaled.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.core.model.devices import execution_device
from lm_polygraph_asmi.core.model.forwards import (
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


@dataclass(frozen=True)
class UnmaskedPass:
    """The unmasked pass of one example; the last token, which predicts nothing, does not run."""

    input_ids: Int[Tensor, " tokens"]  # prompt and response, N + 1
    prompt_length: int  # T = N + 1 - prompt_length
    scope: str
    final_hidden: Float[Tensor, "T D"]  # after the final norm, where the response is predicted
    entering: dict[int, Float[Tensor, "1 N D"]]  # each target layer
    after: dict[int, Float[Tensor, "T D"]]  # each target layer; the last one's after the norm
    # For scope "response":
    # From the lowest target layer on:
    attention_masks: dict[int, Tensor | None] = field(default_factory=dict)
    caches: dict[int, OneLayerCache] = field(default_factory=dict)  # of all positions, if kept
    prompt_caches: list[Any] = field(default_factory=list)  # the model's own, on first use

    @property
    def before(self) -> int:
        """Number of positions before those that predict the response."""
        return self.prompt_length - 1

    @property
    def predicting(self) -> slice:
        """Positions whose output distribution predicts the response tokens, the last T of N."""
        return slice(self.before, len(self.input_ids) - 1)

    def tokens(self, model: PreTrainedModel) -> Int[Tensor, "1 N"]:
        """The token ids that run, where the model takes them."""
        device = execution_device(model.get_input_embeddings())
        return self.input_ids[None, :-1].to(device)


def validate_tokens(model: PreTrainedModel, input_ids: Tensor, prompt_length: int) -> None:
    """Raise ValueError unless token ids with a prompt are valid and fit the context window."""
    if input_ids.ndim != 1:
        raise ValueError(
            f"input_ids must be one unpadded sequence of shape (N,), got {tuple(input_ids.shape)}"
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
    input_ids: Tensor,  # (tokens,), which is checked here
    prompt_length: int,
    target_layers: Iterable[int],
    scope: str = "all",
    keep_cache: bool = True,
) -> UnmaskedPass:
    """Run the model once, in a session; keep what masked passes from `target_layers` need.

    `keep_cache`: in scope "response", also keys and values.

    Raises ValueError: no prompt, an empty response, a sequence beyond the context window, or a
    layer without heads.
    """
    validate_tokens(f.model, input_ids, prompt_length)
    if prompt_length >= len(input_ids):
        raise ValueError(f"the response is empty: all {len(input_ids)} tokens are prompt")
    targets = sorted(set(target_layers))
    for layer in targets:
        f.projection(layer)  # raises for a layer without heads
    packing = scope == "response" and keep_cache and bool(targets)
    layers = f.layers
    entering: dict[int, Tensor] = {}
    after: dict[int, Tensor] = {}
    attention_masks: dict[int, Tensor | None] = {}
    caches: dict[int, OneLayerCache] = {}

    def watch(index: int, real: Forward, *args: Any, **kwargs: Any) -> Any:
        given = arguments(layers[index], args, kwargs)
        if packing:
            caches[index] = OneLayerCache()
            given |= caches[index].argument(layers[index])
            attention_masks[index] = given.get("attention_mask")
        output = real(**given) if packing else real(*args, **kwargs)
        if index in targets:
            entering[index] = given[states_name(layers[index])]
            # A copy: the states at the other positions need not be kept.
            after[index] = states_of(output)[0, prompt_length - 1 :].clone()
        return output

    ids = input_ids[None, :-1].to(execution_device(f.model.get_input_embeddings()))
    watched = range(targets[0], len(layers)) if packing else targets
    watches = ((layers[index], partial(watch, index)) for index in watched)
    with replaced_forwards(*f.compiled(layers), *watches):
        final = states_of(f.base(input_ids=ids, use_cache=False))
    final_hidden = final[0, prompt_length - 1 :]
    if len(layers) - 1 in after:
        after[len(layers) - 1] = final_hidden
    return UnmaskedPass(
        input_ids, prompt_length, scope, final_hidden, entering, after, attention_masks, caches
    )


def states_of(output: Any) -> Tensor:
    """The final states in a base model's output: its first tensor."""
    states = first_tensor(output)
    if states is None:
        raise RuntimeError(f"expected a pass to return a tensor, got {type(output).__name__}")
    return states


def by_head(heads: Tensor, mask: Shaped[Tensor, "B n H"], rows: int) -> Float[Tensor, "B N W"]:
    """Concatenated head outputs of some rows, each head times its mask."""
    split = heads.reshape(rows, -1, mask.shape[-1], heads.shape[-1] // mask.shape[-1])
    return (split * mask[..., None].to(heads)).flatten(2)


def suffix_under(
    f: MaskedModel,
    layer: int,
    mask: Shaped[Tensor, "B n H"],
    entering: Float[Tensor, "_ N D"] | None = None,
    one_row: bool = False,
    given: dict[str, Any] | None = None,
) -> list[Replacement]:
    """What masks heads at a layer, which gets other arguments that are `given`.

    `mask`: 1 keeps a head; rows and positions may be 1 for all. `entering`: states that enter the
    layer, while those below return at once; None: the model's own. `one_row`: the model runs one
    row, whose attention runs once; its output is copied for each of the B masks, masked, and then
    projected.
    """
    structure, layers = f.structure, f.layers
    target = layers[layer]
    changed = ({} if entering is None else {states_name(target): entering}) | (given or {})

    def enter(real: Forward, *args: Any, **kwargs: Any) -> Any:
        return real(**arguments(target, args, kwargs) | changed)

    def project(real: Forward, heads: Tensor, *args: Any, **kwargs: Any) -> Any:
        masked = by_head(heads, mask, 1 if one_row else len(mask))
        return real(masked if one_row else masked.reshape(heads.shape), *args, **kwargs)

    below = range(0 if entering is None else layer)
    bypassed = [returning(layers[index], structure.returns[index]) for index in below]
    entered = [(target, enter)] if changed else []
    return [(f.projection(layer), project), *entered, *bypassed]


def returning(layer: nn.Module, length: int, seen: list[Tensor] | None = None) -> Replacement:
    """A layer returns its states, in a tuple of that length or (0) alone; `seen` gets them."""
    name, others = states_name(layer), [None] * (length - 1)

    def forward(_: Forward, *args: Any, **kwargs: Any) -> Any:
        states = args[0] if args else kwargs[name]
        if seen is not None:
            seen.append(states)
        return (states, *others) if length else states

    return layer, forward


def states_name(layer: nn.Module) -> str:
    """Name of the argument of a layer that holds its hidden states."""
    return parameters_of(type(layer).forward)[0]


def suffix(
    f: MaskedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    one_row: bool = True,
) -> Float[Tensor, "B T D"]:
    """Heads masked at every position; one row up to the projection, whose input masks change.

    `one_row`: False for layers that compare the sizes of their arguments: B rows from the start.
    """
    ids, entering = unmasked.tokens(f.model), unmasked.entering[layer]
    last, layers = f.structure.num_layers - 1, f.layers
    if not one_row:
        ids, entering = ids.expand(len(masks), -1), entering.expand(len(masks), -1, -1)
    # Of the last layer, what follows attention is needed only where answers are read.
    parts: list[Any] = [getattr(layers[last], "mlp", None)] if one_row and layer < last else []
    if parts and last in f.structure.projections:
        parts.append(f.projection(last))
    only = partial(_only_at, unmasked.predicting, ids.shape[1])
    replaced: list[Replacement] = [
        *f.compiled(layers[layer + 1 : last]),
        *((part, only) for part in parts if isinstance(part, nn.Module)),
        *suffix_under(f, layer, masks[:, None], entering, one_row),
    ]
    with replaced_forwards(*replaced):
        states = states_of(f.base(input_ids=ids, use_cache=False))
    return _rows(states, len(masks))[:, unmasked.predicting]


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
        with replaced_forwards(*suffix_under(f, layer, by_position)):
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
    entering = unmasked.entering[layer][:, before:].repeat(1, copies, 1)
    masks_by_id = {id(given): given for given in unmasked.attention_masks.values()}  # shared
    packed_masks = {
        key: _packed_mask(given, before, length, copies, entering.device)
        for key, given in masks_by_id.items()
    }

    def given_to(index: int) -> dict[str, Any]:
        own = packed_masks[id(unmasked.attention_masks[index])]
        return {"attention_mask": own} | caches[index].argument(layers[index])

    def see_own_copy(index: int, real: Forward, *args: Any, **kwargs: Any) -> Any:
        return real(**arguments(layers[index], args, kwargs) | given_to(index))

    mask = masks.repeat_interleave(length, 0)[None]
    ids = unmasked.tokens(f.model)[:, before:].repeat(1, copies)
    places = torch.arange(before, before + length, device=ids.device).repeat(copies)[None]
    own, above = given_to(layer), range(layer + 1, len(layers))
    replaced: list[Replacement] = [
        *f.compiled(layers[layer + 1 :]),
        *((layers[index], partial(see_own_copy, index)) for index in above),
        *suffix_under(f, layer, mask, entering, given=own),
    ]
    # A mask is passed because the model would build one, which takes longer than a layer.
    inputs = {"position_ids": places, "attention_mask": own["attention_mask"]}
    with replaced_forwards(*replaced):
        states = states_of(f.base(input_ids=ids, **inputs, use_cache=False))
    return states.reshape(copies, length, -1)


def _packed_mask(
    given: Tensor | None, before: int, length: int, copies: int, device: torch.device
) -> Tensor:
    """Mask of `copies` responses after one prompt, each of which sees the prompt and itself as
    `given` says; in its form, boolean or added to the scores."""
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
    base, ids, before, cache = f.base, unmasked.tokens(f.model), unmasked.before, None
    if before:
        if not unmasked.prompt_caches:
            kinds = [str(vars(module).get("rope_type")) for module in f.model.modules()]
            if any("dynamic" in kind or "longrope" in kind for kind in kinds):
                raise NotImplementedError("its rotary angles depend on the length")
            output = base(input_ids=ids[:, :before], use_cache=True)
            unmasked.prompt_caches.append(cache_of(output))
        if unmasked.prompt_caches[0] is None:
            raise NotImplementedError("the model keeps no cache")
        cache = copy.deepcopy(unmasked.prompt_caches[0])
        cache.reorder_cache(torch.zeros(len(masks), dtype=torch.long, device=ids.device))
    rows = ids[:, before:].expand(len(masks), -1)
    entering = unmasked.entering[layer][:, before:].expand(len(masks), -1, -1)
    with replaced_forwards(*suffix_under(f, layer, masks[:, None], entering)):
        states = states_of(base(input_ids=rows, **with_cache(base, cache), use_cache=True))
    return _rows(states, len(masks))


def _rows(states: Tensor, number: int) -> Tensor:
    if len(states) != number:
        raise RuntimeError(f"expected states of {number} rows, got {len(states)}")
    return states
