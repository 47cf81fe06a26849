"""Forward methods of modules, replaced for a while and for one thread.

No hook is registered: other threads may call the model meanwhile, and get what they get alone.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from lm_polygraph_asmi.core.model.state import changes

Forward = Callable[..., Any]
Replacement = tuple[nn.Module, Forward]
CACHES = ("past_key_values", "cache", "layer_past", "past_key_value")
"""Names of the argument with which layers take keys and values."""
SHARED = "shared_kv_states"
"""Name of the argument with which layers take, and share, keys and values of layers below."""


@contextmanager
def replaced_forwards(*replacements: Replacement) -> Iterator[None]:
    """Replace forward methods of modules in this thread; hooks of the modules still run.

    Each new one is called with the old one and the arguments; other threads get the old one.
    """
    with changes() as undo:
        for module, forward in replacements:
            # None: the module has only its class's method, not one that accelerate or an outer
            # replacement has set.
            undo.append(partial(_restore, module, vars(module).get("forward")))
            module.forward = partial(_in_thread, get_ident(), forward, module.forward)
        yield


def _restore(module: nn.Module, previous: Forward | None) -> None:
    if previous is None:
        vars(module).pop("forward", None)
    else:
        module.forward = previous


def _in_thread(owner: int, forward: Forward, real: Forward, *args: Any, **kwargs: Any) -> Any:
    return forward(real, *args, **kwargs) if get_ident() == owner else real(*args, **kwargs)


def compiled_layers(layers: Sequence[nn.Module]) -> Iterator[Replacement]:
    """What lets `torch.compile` run layers."""
    for layer in layers:
        if "forward" not in vars(layer):  # neither offloaded nor changed
            run = partial(_compiled_forward(type(layer).forward), layer)
            yield layer, lambda _, *args, run=run, **given: run(*args, **given)


@cache
def _compiled_forward(forward: Forward) -> Forward:
    """One for all layers of a class: shapes are dynamic, weights are arguments."""
    return torch.compile(forward, dynamic=True)


@lru_cache(maxsize=256)
def parameters_of(forward: Forward) -> list[str]:
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


class OneLayerCache:
    """The keys and values that one layer keeps, after those that it is given."""

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
