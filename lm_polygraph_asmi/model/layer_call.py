"""Calling a decoder layer again: as the model called it, or at some positions over known keys.

What leans on how transformers calls its layers stands here; `tests/model/test_families.py` checks
it on every family and fails when a release changes it.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, (B, key-value heads, positions, head width) each, rotated."""

MASKABLE = ("eager", "sdpa")
"""Attention implementations that take an explicit (queries, keys) mask."""


class KeyValueTap(DynamicCache):
    """A cache that stores no keys and values: a function sees each layer's new ones and answers.

    Attributes:
        length: how many positions it says it holds.
        length_read: whether anyone has read it.
    """

    def __init__(
        self,
        answer: Callable[[Tensor, Tensor, int], KeysValues],
        config: PretrainedConfig | None = None,
    ) -> None:
        # With a config, the cache also holds states of layers without keys and values.
        super().__init__(config=config) if config is not None else super().__init__()
        self._answer = answer
        self.length = 0
        self.length_read = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        self.length_read = True
        return self.length

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        if not self.length:
            return super().get_mask_sizes(query_length, layer_idx)
        # Older releases give the positions themselves.
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.length + new, 0  # all that came before is kept, beyond windows too

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> KeysValues:
        return self._answer(key_states, value_states, layer_idx)


def with_cache(module: nn.Module, cache: Any) -> dict[str, Any]:
    """Keyword with which a model takes a cache; transformers 5.24 renamed it."""
    renamed = "cache" in inspect.signature(module.forward).parameters
    return {"cache" if renamed else "past_key_values": cache}


def cache_of(output: Any) -> Any:
    """The cache of a model's output; None if it keeps none."""
    cache = getattr(output, "cache", None)
    return getattr(output, "past_key_values", None) if cache is None else cache


class Reached(Exception):
    """Carries tensors out of a forward pass that need not go on."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let `module` do something else for a while; its hooks still run."""
    own = module.__dict__.get("forward")  # there where accelerate has wrapped the class's
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@lru_cache(maxsize=32)
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """Read once for a class: that takes longer than a small layer."""
    return inspect.signature(forward)


def _spread(value: Any, rows: int) -> Any:
    """Tensors of one row, for so many rows."""
    if isinstance(value, tuple):
        return tuple(_spread(part, rows) for part in value)
    if isinstance(value, Tensor) and value.ndim and len(value) == 1:
        return value.expand(rows, *value.shape[1:])
    return value


@dataclass(frozen=True)
class LayerCall:
    """How the model called a decoder layer on its N positions, hidden states apart.

    Attributes:
        arguments: the other arguments by name.
        num_positions: N.
        before: positions in front of these N, whose keys and values were known.
    """

    arguments: dict[str, Any]
    num_positions: int
    before: int = 0

    @staticmethod
    def split(
        layer: nn.Module, args: tuple, kwargs: dict, before: int = 0
    ) -> "tuple[Tensor, LayerCall]":
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
        return hidden, LayerCall(arguments, hidden.shape[1], before)

    def replay(
        self,
        layer: nn.Module,
        hidden: Tensor,
        positions: slice | None = None,
        spread: bool = False,
    ) -> Tensor:
        """Call the layer again on hidden states (B, N, D) of any batch size.

        Args:
            positions: call it on the hidden states (B, n, D) there, if it mixes no positions.
            spread: give it other arguments for each row too, not one for all of them.
        """
        arguments = self.arguments | self._with_cache(None)
        if positions is not None and positions != slice(None):
            arguments |= self._at(positions)
        if spread:
            arguments = {name: _spread(value, len(hidden)) for name, value in arguments.items()}
        return self._call(layer, hidden, arguments)

    @property
    def keeps_keys(self) -> bool:
        """Whether the layer was handed a cache."""
        return any(isinstance(value, KeyValueTap) for value in self.arguments.values())

    def keys_values(self, layer: nn.Module, hidden: Tensor, positions: slice) -> KeysValues:
        """What the layer attends to at n positions with hidden states (B, n, D); nothing more."""

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
        """Call the layer on hidden states (B, n, D) at n positions that follow known ones.

        Args:
            past: keys and values of the known positions, of batch size B.
            positions: place of each of the n among the N; places may repeat.
            allowed: (n, known + n), which keys each of the n positions attends to.
        """

        def follow(key: Tensor, value: Tensor, _: int) -> KeysValues:
            return torch.cat([past[0], key], dim=-2), torch.cat([past[1], value], dim=-2)

        tap = KeyValueTap(follow)
        tap.length = self.before + positions.start if isinstance(positions, slice) else 0
        arguments = self.at_places(positions, allowed.to(hidden.device)) | self._with_cache(tap)
        return self._call(layer, hidden, arguments)

    def at_places(self, positions: slice | Tensor, allowed: Tensor) -> dict[str, Any]:
        """The arguments for n positions, places among the N, and which keys each attends to."""
        mask = {"attention_mask": self._mask(allowed)}
        return self.arguments | self._at(positions) | mask

    def allowed(self, positions: slice) -> Tensor:
        """(n, before + N): which positions each of the n attends to: causal, and in the layer's
        window."""
        mask = self.arguments.get("attention_mask")
        if mask is None:
            every = torch.arange(self.before + self.num_positions)
            return every <= every[self.before :][positions, None]
        rows = mask[0, 0, positions]
        return rows if rows.dtype == torch.bool else rows == 0

    def _mask(self, allowed: Tensor) -> Tensor:
        """`allowed` in the form this layer was given: boolean, or added to the scores."""
        given = self.arguments.get("attention_mask")
        mask = allowed[None, None]
        if given is None or given.dtype == torch.bool:
            return mask
        return torch.zeros_like(mask, dtype=given.dtype).masked_fill(
            ~mask, torch.finfo(given.dtype).min
        )

    def _with_cache(self, cache: KeyValueTap | None) -> dict[str, Any]:
        """The arguments that hold the cache, with another."""
        given = self.arguments.items()
        return {name: cache for name, value in given if isinstance(value, KeyValueTap)}

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
