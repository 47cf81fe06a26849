"""Forward methods of modules, replaced for a while and for one thread.

No hook is registered: other threads may call the model meanwhile, and get what they get alone.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import get_ident
from typing import Any

from torch import Tensor, nn

Forward = Callable[..., Any]


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[[Forward], Forward]) -> Iterator[None]:
    """Replace the forward method of a module; its hooks still run.

    Args:
        forward: makes the new method from the old one, which it must call in other threads.
    """
    previous = vars(module).get("forward")  # set if accelerate wrapped the class's method
    module.forward = forward(module.forward)
    try:
        yield
    finally:
        if previous is None:
            del module.forward
        else:
            module.forward = previous


def in_this_thread(forward: Forward) -> Callable[[Forward], Forward]:
    """What `replaced_forward` takes: `forward` here, the old method in other threads."""
    owner = get_ident()

    def replace(real: Forward) -> Forward:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            return (forward if get_ident() == owner else real)(*args, **kwargs)

        return guarded

    return replace


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


def with_cache(module: nn.Module, cache: Any) -> dict[str, Any]:
    """The argument with which a model takes a cache; transformers 5.24 renamed it."""
    renamed = "cache" in parameters_of(type(module).forward)
    return {"cache" if renamed else "past_key_values": cache}


def cache_of(output: Any) -> Any:
    """The cache of a model's output; None if it keeps none."""
    cache = getattr(output, "cache", None)
    return getattr(output, "past_key_values", None) if cache is None else cache
