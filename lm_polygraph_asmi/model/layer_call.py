"""Calls a decoder layer again: as the model called it, or at some positions over cached keys.

Code that depends on how transformers calls its layers is in this module.
`tests/model/test_decoders.py` checks it on every family and fails when a release changes it.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, (B, key-value heads, positions, head width) each, rotated."""

MASKABLE = ("eager", "sdpa")
"""Attention implementations that take an explicit (queries, keys) mask."""


class KeyValueTap(DynamicCache):
    """A cache that stores no keys and values: a function of each layer's new ones replaces them.

    Attributes:
        length: number of positions that it reports to hold.
        length_read: whether that number was read.
    """

    def __init__(
        self,
        update: Callable[[Tensor, Tensor, int], KeysValues],
        config: PretrainedConfig | None = None,
    ) -> None:
        # With a config, the cache also holds states of layers without keys and values.
        super().__init__(config=config) if config is not None else super().__init__()
        self._update = update
        self.length = 0
        self.length_read = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.length_read = True
        return self.length

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        if not self.length:
            return super().get_mask_sizes(query_length, layer_idx)
        # Older releases pass the positions themselves.
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.length + new, 0  # all earlier positions are kept, also beyond windows

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> KeysValues:
        return self._update(key_states, value_states, layer_idx)


def with_cache(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Keyword with which a model takes a cache; transformers 5.24 renamed it."""
    renamed = "cache" in inspect.signature(module.forward).parameters
    return {"cache" if renamed else "past_key_values": cache}


def cache_of(output: Any) -> Any:
    """The cache of a model's output; None if it keeps none."""
    cache = getattr(output, "cache", None)
    return getattr(output, "past_key_values", None) if cache is None else cache


class Reached(Exception):
    """Ends a forward pass early and carries tensors out of it."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace the forward method of `module` for a while; its hooks still run.

    The new one has the signature of the old one, by which `LayerCall.split` reads arguments.
    """
    previous = module.__dict__.get("forward")  # set if accelerate wrapped the class's method
    update_wrapper(forward, module.forward, assigned=(), updated=())
    module.forward = forward
    try:
        yield
    finally:
        if previous is None:
            del module.forward
        else:
            module.forward = previous


@lru_cache(maxsize=32)
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """Cached per class: reading it takes longer than running a small layer."""
    return inspect.signature(forward)


def _expand(value: Any, rows: int) -> Any:
    """Expand tensors of one row to `rows` rows."""
    if isinstance(value, tuple):
        return tuple(_expand(part, rows) for part in value)
    if isinstance(value, Tensor) and value.ndim and len(value) == 1:
        return value.expand(rows, *value.shape[1:])
    return value


@dataclass(frozen=True)
class LayerCall:
    """How the model called a decoder layer on N positions, without the hidden states.

    Attributes:
        arguments: all arguments but the hidden states, by name.
        num_positions: number of positions, N.
    """

    arguments: dict[str, Any]
    num_positions: int

    @staticmethod
    def split(layer: nn.Module, args: tuple, kwargs: dict) -> "tuple[Tensor, LayerCall]":
        """The hidden states a layer is being called with, and the rest of the call.

        Raises:
            RuntimeError: a layer that hides its arguments, as compiled ones do.
        """
        # Some families pass arguments by position; their names are the same everywhere.
        if "forward" in vars(layer):
            signature = inspect.signature(layer.forward)
            arguments = signature.bind(*args, **kwargs).arguments
        else:
            signature = _signature(type(layer).forward)
            arguments = signature.bind(layer, *args, **kwargs).arguments
            del arguments[next(iter(arguments))]  # the layer itself
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments |= arguments.pop(parameter.name, {})
        hidden = arguments.pop(next(iter(arguments), ""), None)
        if not isinstance(hidden, Tensor):
            raise RuntimeError(
                f"{type(layer).__name__}: expected hidden states as first argument: pass the model "
                "as transformers loads it, not compiled"
            )
        return hidden, LayerCall(arguments, hidden.shape[1])

    def replay(
        self,
        layer: nn.Module,
        hidden: Tensor,
        positions: slice | None = None,
        per_row: bool = False,
    ) -> Tensor:
        """Call the layer again on hidden states (B, N, D) of any batch size.

        Args:
            positions: those of hidden states (B, n, D), for a layer that does not mix positions.
            per_row: expand the other arguments to B rows; otherwise all rows share one.
        """
        arguments = self.arguments | self._with_cache(None)
        if positions is not None and positions != slice(None):
            arguments |= self._at(positions)
        if per_row:
            arguments = {name: _expand(value, len(hidden)) for name, value in arguments.items()}
        return self._call(layer, hidden, arguments)

    @property
    def keeps_keys(self) -> bool:
        """Whether the layer was called with a cache."""
        return any(isinstance(value, KeyValueTap) for value in self.arguments.values())

    def keys_values(self, layer: nn.Module, hidden: Tensor, positions: slice) -> KeysValues:
        """Keys and values of the layer at n positions with hidden states (B, n, D)."""

        def stop(key: Tensor, value: Tensor, _: int) -> KeysValues:
            raise Reached(key, value)

        arguments = self.arguments | self._at(positions) | self._with_cache(KeyValueTap(stop))
        try:
            self._call(layer, hidden, arguments)
        except Reached as reached:
            key, value = reached.tensors
            return key, value
        raise AssertionError("a decoder layer did not pass its keys and values to the cache")

    def replay_after(
        self,
        layer: nn.Module,
        hidden: Tensor,
        past: KeysValues,
        positions: slice | Tensor,
        allowed: Tensor,
    ) -> Tensor:
        """Call the layer on hidden states (B, n, D) at n positions after cached ones.

        Args:
            past: keys and values of the cached positions, of batch size B.
            positions: index of each of the n among the N; indices may repeat.
            allowed: (n, cached + n), which keys each of the n positions attends to.
        """

        def follow(key: Tensor, value: Tensor, _: int) -> KeysValues:
            return torch.cat([past[0], key], dim=-2), torch.cat([past[1], value], dim=-2)

        tap = KeyValueTap(follow)
        tap.length = positions.start if isinstance(positions, slice) else 0
        mask = {"attention_mask": self._mask(allowed.to(hidden.device))}
        arguments = self.arguments | self._at(positions) | mask | self._with_cache(tap)
        return self._call(layer, hidden, arguments)

    def allowed(self, positions: slice) -> Tensor:
        """(n, N): whether each of the n attends to a position: causal, within the window."""
        mask = self.arguments.get("attention_mask")
        if mask is None:
            keys = torch.arange(self.num_positions)
            return keys <= keys[positions, None]
        rows = mask[0, 0, positions]
        return rows if rows.dtype == torch.bool else rows == 0

    def _mask(self, allowed: Tensor) -> Tensor:
        """`allowed` in the form of the layer's own mask: boolean, or added to the scores."""
        layer_mask = self.arguments.get("attention_mask")
        mask = allowed[None, None]
        if layer_mask is None or layer_mask.dtype == torch.bool:
            return mask
        dtype = layer_mask.dtype
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)

    def _with_cache(self, cache: KeyValueTap | None) -> dict[str, Any]:
        """The arguments that hold a cache, with `cache` in its place."""
        arguments = self.arguments.items()
        return {name: cache for name, value in arguments if isinstance(value, KeyValueTap)}

    def _at(self, positions: slice | Tensor) -> dict[str, Any]:
        """The arguments that hold one entry per position (ids, rotary angles), at `positions`."""

        def pick(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(pick, value))
            if not isinstance(value, Tensor) or value.ndim == 0:
                return value
            axis = 0 if value.ndim == 1 else 1  # (N,), (1, N) or (1, N, head width)
            if value.shape[axis] != self.num_positions:
                return value
            return value[positions] if axis == 0 else value[:, positions]

        return {
            name: pick(value)
            for name, value in self.arguments.items()
            if name != "attention_mask" and not isinstance(value, KeyValueTap)
        }

    @staticmethod
    def _call(layer: nn.Module, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        output = layer(hidden, **arguments)
        return output[0] if isinstance(output, tuple) else output
