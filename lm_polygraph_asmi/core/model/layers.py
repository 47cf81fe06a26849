"""What layers take and return: names of arguments, states and their axes, keys and values."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

CACHES = ("past_key_values", "cache", "layer_past", "past_key_value")
"""Names of the argument with which layers take keys and values."""
SHARED = "shared_kv_states"
"""Name of the argument with which layers take, and share, keys and values of layers below."""


@lru_cache(maxsize=256)
def parameters_of(forward: Callable[..., Any]) -> list[str]:
    """Names of a method's parameters, without `self`."""
    return list(inspect.signature(forward).parameters)[1:]


def arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; the first are the hidden states."""
    return dict(zip(parameters_of(type(module).forward), args, strict=False)) | kwargs


def first_tensor(output: Any) -> Tensor | None:
    """The first tensor in a module's output."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = tuple(output.values())
    if isinstance(output, Sequence) and not isinstance(output, str):
        return next((x for part in output if (x := first_tensor(part)) is not None), None)
    return None


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
    """The axis of rows (of a batch) in the states of one row; the axis of positions comes next.

    Some models have several streams of states: (4, 1, N, D) in Gemma 3n, (1, N, 4, D) in HY 4.
    """
    return states.shape.index(1)


def in_rows(rows: int, tensor: Tensor, axis: int = 0) -> Tensor:
    """One row several times, without a copy."""
    return tensor.expand(*tensor.shape[:axis], rows, *tensor.shape[axis + 1 :])


def each_in_rows(rows: int, parts: Iterable[Any]) -> tuple[Any, ...]:
    """Several parts; those that are tensors of one row get more rows."""
    return tuple(
        in_rows(rows, part) if isinstance(part, Tensor) and part.shape[:1] == (1,) else part
        for part in parts
    )


def without_first(number: int, states: Tensor, axis: int) -> Tensor:
    """States without those at the first positions. `axis`: that of rows; positions come next."""
    return states.narrow(axis + 1, number, states.shape[axis + 1] - number)


KeysAndValues = tuple[Tensor, ...]


class OneLayerCache:
    """What a layer sees as the model's cache: it appends its keys and values to those given here.

    Nothing is appended by a layer that attends to the keys and values of another.
    """

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        self.keys, self.values = keys, values

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """As that of transformers' caches."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=-2)
            values = torch.cat([self.values, values], dim=-2)
        self.keys, self.values = keys, values
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def first(self, number: int) -> "OneLayerCache":
        """Those of the first positions, if there are any."""
        if self.keys is None or self.values is None:
            return OneLayerCache()
        return OneLayerCache(self.keys[..., :number, :], self.values[..., :number, :])

    def argument(self, layer: nn.Module) -> dict[str, Any]:
        """The argument with which a layer takes it."""
        names = [name for name in parameters_of(type(layer).forward) if name in CACHES]
        return dict.fromkeys(names, self)


def with_cache(module: nn.Module, cache: Any) -> dict[str, Any]:
    """The argument with which a model takes a cache; transformers 5.24 renamed it."""
    renamed = "cache" in parameters_of(type(module).forward)
    return {"cache" if renamed else "past_key_values": cache}


def cache_of(output: Any) -> Any:
    """The cache of a model's output; None if it keeps none."""
    cache = getattr(output, "cache", None)
    return getattr(output, "past_key_values", None) if cache is None else cache
