"""What is remembered of a model while it lives: its lock, its structure, what was checked of it.

Nothing here keeps a model alive, and nothing is written onto one.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn


@dataclass
class Notes:
    """What is remembered of one model.

    Attributes:
        lock: held by whoever scores the model; a thread may take it several times.
        found: facts that hold as long as `state` is the model's own, by name.
        state: `model_state` when `found` was begun.
        attention: the model's own attention implementation while a session is open, else None.
        switches: how each attention implementation is put into force: what its configurations say.
    """

    lock: Any = field(default_factory=threading.RLock)
    found: dict[Hashable, Any] = field(default_factory=dict)
    state: int | None = None
    attention: str | None = None
    switches: dict[str, Any] = field(default_factory=dict)


_NOTES: "WeakKeyDictionary[nn.Module, Notes]" = WeakKeyDictionary()
_GUARD = threading.Lock()


def notes_of(model: nn.Module) -> Notes:
    """The notes on a model, begun when there are none."""
    with _GUARD:
        return _NOTES.setdefault(model, Notes())


def model_lock(model: nn.Module) -> Any:
    """The lock that whoever scores a model holds; a context manager, for one thread nestable."""
    return notes_of(model).lock


def known(model: nn.Module) -> dict[Hashable, Any]:
    """Facts about the model as it is now; forgotten once its modules or weights change.

    Inside `scoring_session` nothing is to change, and is not looked for.
    """
    notes = notes_of(model)
    if notes.attention is not None and notes.state is not None:
        return notes.found
    state = model_state(model)
    if notes.state != state:
        notes.found, notes.state = {}, state
    return notes.found


def model_state(model: nn.Module) -> int:
    """A number that changes when modules or weights of a model are exchanged or written to.

    It costs microseconds a tensor, since no value is read: it is made of the identity, storage and
    version counter of every parameter and buffer, the modules, and PEFT's active adapters. Unlike a
    key made of values it means nothing in another process. Writing through `.data` or into memory
    that NumPy shares moves no counter and is not seen.
    """
    parts: list[Hashable] = []
    for module in model.modules():
        parts.append(id(module))
        if hasattr(type(module), "_disable_adapters"):  # a layer of PEFT: which adapters act?
            parts.append((module._disable_adapters, str(module._active_adapter)))
        derived = module._non_persistent_buffers_set  # such as rotary angles, renewed at will
        kept = (tensor for name, tensor in module._buffers.items() if name not in derived)
        for tensor in chain(module._parameters.values(), kept):
            if tensor is not None:
                parts.append(_place(tensor))
    return hash(tuple(parts))


def _place(tensor: Tensor) -> tuple[int, int, int]:
    if tensor.is_meta:  # offloaded: accelerate puts another stand-in there after every call
        return hash(tensor.shape), -1, -1
    # Tensors made in inference mode count no versions, those of some quantisations have no place.
    version = -1 if tensor.is_inference() else tensor._version
    try:
        return id(tensor), tensor.data_ptr(), version
    except RuntimeError:
        return id(tensor), -1, version
