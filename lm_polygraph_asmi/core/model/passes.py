"""The masked passes: the model runs itself under B masks of the heads of one layer.

Scope "all": `suffix`. Scope "response": `packed`, or `rows_after_prompt`. Either: `full_passes`,
one after the other, which run all layers. All return the final states where the response is
predicted.
"""

import copy
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from lm_polygraph_asmi.core.model.forwards import Forward, Replacement, replaced_forwards
from lm_polygraph_asmi.core.model.layers import (
    KeysAndValues,
    OneLayerCache,
    arguments,
    cache_of,
    each_in_rows,
    in_rows,
    row_axis,
    states_name,
    states_of,
    with_cache,
    without_first,
)
from lm_polygraph_asmi.core.model.masked import MaskedModel
from lm_polygraph_asmi.core.model.start import heads_masked, starting_at
from lm_polygraph_asmi.core.model.unmasked import UnmaskedPass


def suffix(
    f: MaskedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "B H"],
    one_row: bool = True,
) -> Float[Tensor, "B T D"]:
    """Heads masked at every position. One row runs up to the projection, whose input is copied for
    each of B masks and masked. The residual stream, still one row, is added to each: B rows.

    `one_row`: False for layers that compare the sizes of their arguments: above the target, states
    have B rows, and masks and positions one. Then B rows run from the start.
    """
    # Rows that enter the target, and rows that leave it for each of them.
    rows, copies = (1, len(masks)) if one_row else (len(masks), 1)
    ids, states = unmasked.tokens(f.model).expand(rows, -1), unmasked.entering[layer]
    last, layers = f.structure.num_layers - 1, f.layers
    predicting_only = partial(_only_at, unmasked.predicting, ids.shape[1])
    # Not in the target itself, whose projection masks heads.
    after_attention = _after_last_attention(f) if one_row and layer < last else []
    entering = {states_name(layers[layer]): in_rows(rows, states, row_axis(states))}
    beside = each_in_rows(rows, unmasked.beside.get(layer - 1, ()))

    def shared_in_rows(_: int, pair: KeysAndValues) -> KeysAndValues:
        return each_in_rows(rows, pair)

    replaced: list[Replacement] = [
        # The last layer is not compiled: modules in it are replaced.
        *f.compiled(layers[layer + 1 : last]),
        *((module, predicting_only) for module in after_attention),
        heads_masked(f, layer, masks[:, None], one_row),
        *starting_at(f, unmasked, layer, entering, shared_in_rows, beside, copies),
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
    # A layer may keep none only if it can attend to those of another.
    if any(each.keys is None and i not in f.handing_on for i, each in caches.items()):
        raise NotImplementedError("a layer kept no keys and values")
    states, axis = unmasked.entering[layer], row_axis(unmasked.entering[layer])
    entering = torch.cat([without_first(before, states, axis)] * copies, axis + 1)
    # Many layers share one attention mask.
    by_id = {id(given): given for given in unmasked.attention_masks.values()}
    packed_attention = {
        key: _packed_attention_mask(given, before, length, copies, entering.device)
        for key, given in by_id.items()
    }

    def attention_arguments(index: int) -> dict[str, Any]:
        """Arguments by which each response attends to the prompt and to itself."""
        attention_mask = packed_attention[id(unmasked.attention_masks[index])]
        return {"attention_mask": attention_mask} | caches[index].argument(layers[index])

    def attend_to_own(index: int, real: Forward, *args: Any, **kwargs: Any) -> Any:
        return real(**arguments(layers[index], args, kwargs) | attention_arguments(index))

    def after_prompt(_: int, pair: KeysAndValues) -> KeysAndValues:
        # Those of the prompt, and then those of the response, once for each mask.
        responses = [torch.cat([each[..., before:, :]] * copies, -2) for each in pair]
        return OneLayerCache(*pair).first(before).update(*responses)

    head_mask = masks.repeat_interleave(length, 0)[None]
    ids = unmasked.tokens(f.model)[:, before:].repeat(1, copies)
    positions = torch.arange(before, before + length, device=ids.device).repeat(copies)[None]
    of_target, above = attention_arguments(layer), range(layer + 1, len(layers))
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
        responses = [in_rows(len(masks), each[..., before:, :]) for each in pair]
        return tuple(responses) if cache is None else cache.update(*responses, index)

    response, states = ids[:, before:].expand(len(masks), -1), unmasked.entering[layer]
    axis = row_axis(states)
    entering = in_rows(len(masks), without_first(before, states, axis), axis)
    parts = unmasked.beside.get(layer - 1, ())
    of_response = [part[:, before:] if isinstance(part, Tensor) else part for part in parts]
    beside = each_in_rows(len(masks), of_response)
    given = {states_name(f.layers[layer]): entering}
    started = starting_at(f, unmasked, layer, given, after_prompt, beside)
    with replaced_forwards(heads_masked(f, layer, masks[:, None]), *started):
        states = states_of(base(input_ids=response, **with_cache(base, cache), use_cache=True))
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
