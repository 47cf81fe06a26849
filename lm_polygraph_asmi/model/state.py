"""What is known of a model: its lock, its structure, its checks, as long as it stays the same.

It does not keep a model alive, and nothing is written to the model.
"""

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


@dataclass
class Known:
    """What is known of one model."""

    values: dict[str | None, Any] = field(default_factory=dict)  # valid in the state `state`
    state: int | None = None  # `model_state` when `values` was created
    attention: str | None = None  # the model's own while a session is open, else None
    named: str | None = None  # the setting `structure`
    compiles: bool = False  # whether the session compiles layers

    def values_at(self, state: int) -> dict[Hashable, Any]:
        """The values of the modules named, emptied if they are those of another state."""
        if self.state != state:
            self.values, self.state = {}, state
        values: dict[Hashable, Any] = self.values.setdefault(self.named, {})
        return values


_KNOWN: "WeakKeyDictionary[nn.Module, Known]" = WeakKeyDictionary()
_LOCKS: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()
_GUARD = threading.Lock()
_NUMBERS = WeakIdKeyDictionary()
"""Numbers of modules and tensors that, unlike their `id`, are never used again."""
_COUNT = count(1)
_PLAIN = (nn.Parameter, Tensor)


def known_of(model: nn.Module) -> Known:
    """What is known of a model, created if there is nothing."""
    with _GUARD:
        return _KNOWN.setdefault(model, Known())


def model_lock(model: nn.Module) -> Any:
    """The lock that is held while a model is scored; a context manager that one thread may nest.
    Model objects with the same input embedding share one."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        embedding = None
    with _GUARD:
        return _LOCKS.setdefault(model if embedding is None else embedding, threading.RLock())


def known_values(model: nn.Module) -> dict[Hashable, Any]:
    """Values known of the model in its present state."""
    return known_of(model).values_at(model_state(model))


def model_state(model: nn.Module) -> int:
    """A number that changes when modules, weights or the configuration of a model are replaced or
    written to, another PEFT adapter acts, or a hook comes or goes; in this process only.

    No weight is read, so writes through `.data` or into memory shared with NumPy are not detected,
    nor are buffers that no checkpoint has, and numbers that stand in a module.
    Inside `scoring_session` it is that of the beginning.
    """
    known = known_of(model)
    if known.attention is not None and known.state is not None:
        return known.state
    parts: list[Hashable] = []
    # One loop that calls no function of ours, since it runs for every answer.
    for module in model.modules():
        own = vars(module)
        parts.append(_NUMBERS.setdefault(module, next(_COUNT)))
        parts += [*own["_forward_hooks"], *own["_forward_pre_hooks"]]  # numbers of their own
        for name in ("forward", "_old_forward"):
            if name in own:
                parts.append(_NUMBERS.setdefault(own[name], next(_COUNT)))
        if hasattr(type(module), "_disable_adapters"):  # a PEFT layer: its active adapters
            parts += [module._disable_adapters, str(module._active_adapter)]
            parts.append(str(own.get("scaling")))
        computed = own["_non_persistent_buffers_set"]  # such as rotary angles, of the length
        for name, tensor in chain(own["_parameters"].items(), own["_buffers"].items()):
            if tensor is None or name in computed or tensor.is_meta:
                continue
            if tensor.is_inference():
                parts.append(next(_COUNT))  # writes leave no trace, so it counts as written to
            elif type(tensor) not in _PLAIN:
                parts += [id(tensor), tensor._version]  # may be moved by swapping: no reference
            else:
                number = _NUMBERS.setdefault(tensor, next(_COUNT))
                parts += [number, tensor._version, tensor.data_ptr()]
    config: Any = getattr(model, "config", None)
    for settings in () if config is None else (config, config.get_text_config()):
        public = {name: value for name, value in vars(settings).items() if name[0] != "_"}
        parts.append(repr(sorted(public.items(), key=itemgetter(0))))
    return hash(tuple(parts))


def has_foreign_code(model: nn.Module) -> bool:
    """Whether a module has hooks, or a forward method of its own, of other code than transformers
    and accelerate, which only record or fetch weights.

    It may act differently at each position and for each text.
    """
    for module in model.modules():
        code = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            code.append(module.forward)
        if not all(map(_of_library, code)):
            return True
    return False


def _of_library(code: Any) -> bool:
    while isinstance(code, partial):
        code = code.func
    module = getattr(code, "__module__", None) or type(code).__module__
    return module.partition(".")[0] in ("transformers", "accelerate", __package__.partition(".")[0])
