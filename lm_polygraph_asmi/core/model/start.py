"""How a masked pass starts at a layer: what is replaced while the model runs.

Layers below the target return at once, the target gets the states that the unmasked pass kept, and
the outputs of masked heads are zero before its output projection. The others are not rescaled. What
layers below the target handed to layers above in the unmasked pass, they hand on again.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor, nn

from lm_polygraph_asmi.core.model.forwards import Forward, Replacement
from lm_polygraph_asmi.core.model.layers import (
    SHARED,
    KeysAndValues,
    arguments,
    each_in_rows,
    states_name,
)
from lm_polygraph_asmi.core.model.masked import MaskedModel
from lm_polygraph_asmi.core.model.unmasked import UnmaskedPass


def by_head(heads: Tensor, mask: Shaped[Tensor, "B n H"], rows: int) -> Float[Tensor, "B N W"]:
    """Concatenated head outputs of some rows, each head times its mask.

    `rows`: of `heads`. One row times the masks (B, 1, H) gives B rows.
    """
    split = heads.reshape(rows, -1, mask.shape[-1], heads.shape[-1] // mask.shape[-1])
    return (split * mask[..., None].to(heads)).flatten(2)


def heads_masked(
    f: MaskedModel, layer: int, mask: Shaped[Tensor, "B n H"], copied: bool = False
) -> Replacement:
    """What masks heads at a layer.

    Args:
        mask: 1 keeps a head. (B, 1, H): a mask for each row. (1, n, H): one row, with a mask for
            each of its positions.
        copied: one row enters for B masks (B, 1, H), so attention runs once. Its output is copied
            for each mask, masked, and then projected: B rows go on.
    """

    def project(real: Forward, heads: Tensor, *args: Any, **kwargs: Any) -> Any:
        masked = by_head(heads, mask, 1 if copied else len(mask))
        # Some models flatten rows and positions before they project.
        return real(masked if copied else masked.reshape(heads.shape), *args, **kwargs)

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
        copies: B if one row enters the layer and B leave it (`copied` of `heads_masked`), else 1.
            What the layer hands on gets as many rows.
    """
    target, returns = f.layers[layer], f.structure.returns

    def share(index: int, received: dict[str, Any]) -> None:
        kept = unmasked.shared[index]
        received[SHARED].update({kind: shared_here(index, pair) for kind, pair in kept.items()})

    def enter(real: Forward, *args: Any, **kwargs: Any) -> Any:
        received = arguments(target, args, kwargs) | given
        output = real(**received)
        if shared := received.get(SHARED):
            shared.update({kind: each_in_rows(copies, pair) for kind, pair in shared.items()})
        return (output[0], *each_in_rows(copies, output[1:])) if returns[layer] else output

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
