"""What is known of a model: its lock, its structure, its checks, as long as it stays the same.

It does not keep a model alive, and nothing is written to the model.
"""

import threading
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from operator import itemgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from transformers import PretrainedConfig


@dataclass
class Known:
    """What is known of one model.

    Attributes:
        values: by name, valid as long as the model's state is `state`.
        state: `model_state` when `values` was created.
        attention: the model's own attention implementation while a session is open, else None.
        switches: by attention implementation, the settings of the configurations that select it.
        named: the setting `structure`, see `heads.name_modules`.
        compiles: whether the session compiles layers.
    """

    values: dict[Hashable, Any] = field(default_factory=dict)
    state: int | None = None
    attention: str | None = None
    switches: dict[str, Any] = field(default_factory=dict)
    named: str | None = None
    compiles: bool = False

    def values_at(self, state: int) -> dict[Hashable, Any]:
        """The values, emptied if they are those of another state."""
        if self.state != state:
            self.values, self.state = {}, state
        return self.values


_KNOWN: "WeakKeyDictionary[nn.Module, Known]" = WeakKeyDictionary()
_LOCKS: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()
_GUARD = threading.Lock()
_NUMBERS: dict[int, tuple[Any, int]] = {}
"""By `id`, a weak reference to an object, and a number that, unlike its `id`, is never reused."""
_COUNT = count(1)
_IGNORED = {"training", "gradient_checkpointing", "hf_device_map", "warnings_issued"}
_IGNORED |= {name for name in vars(nn.Module()) if name[0] == "_"} | {"name_or_path"}
_SCALARS = {bool, int, float, str, type(None)}
_COLLECTIONS = {dict, list, tuple, set, frozenset}
_FUNCTIONS = {FunctionType, BuiltinFunctionType, partial}
_PLAIN = (nn.Parameter, Tensor)
_NO_NAMES: frozenset[str] = frozenset()
_METHODS = ("forward", "_old_forward")
_RENEWED = ("inv_freq", "max_seq_len_cached", "attention_scaling")


def known_of(model: nn.Module) -> Known:
    """What is known of a model, created if there is nothing."""
    with _GUARD:
        return _KNOWN.setdefault(model, Known())


def model_lock(model: nn.Module) -> Any:
    """The lock that is held while a model is scored; a context manager that one thread may nest.

    Model objects with the same input embedding share one lock.

    Example:
        >>> with model_lock(model):  # no other thread scores the model in this block
        ...     model.num_parameters() > 0
        True
    """
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
    """A number that changes when modules, weights or settings of a model are replaced or changed.

    It covers all modules; identity, place and version of every parameter and buffer; plain values
    of modules and configurations; active PEFT adapters; foreign hooks and forward methods. No
    weight is read. It is valid only in this process; inside `scoring_session` it is that of the
    beginning. Writes through `.data` or into memory shared with NumPy are not detected, and a model
    loaded in inference mode has a new state at every call.

    Example:
        >>> before = model_state(model)
        >>> before == model_state(model)
        True
        >>> _ = model.lm_head.weight.requires_grad_(False).mul_(1)  # written to: a new state
        >>> before == model_state(model)
        False
    """
    known = known_of(model)
    if known.attention is not None and known.state is not None:
        return known.state
    parts: list[Hashable] = []
    configs: dict[int, PretrainedConfig] = {}
    # One loop that calls no function of ours, since it runs for every answer.
    for module in model.modules():
        attributes = vars(module)
        renewed = renewed_names(module) if "rope_type" in attributes else _NO_NAMES
        tensors = [*attributes["_parameters"].items(), *attributes["_buffers"].items()]
        for name, value in [("", module), *tensors]:
            if value is None or name in renewed:
                continue
            entry = _NUMBERS.get(id(value))
            parts.append(entry[1] if entry and entry[0]() is value else _number(value))
            if name:
                parts += (
                    _written(value)
                    if type(value) not in _PLAIN or value.is_meta or value.is_inference()
                    else (value._version, value.data_ptr())
                )
        for hooks in (attributes["_forward_hooks"], attributes["_forward_pre_hooks"]):
            parts += map(id, hooks.values())
        for name, value in attributes.items():
            kind = type(value)
            # In recurrent layers a pass replaces None by a tensor.
            if value is None or name in _IGNORED or name in renewed:
                continue
            if kind in _SCALARS and (name[0] != "_" or kind in (int, float)):
                parts.append((name, value))
            elif kind in _COLLECTIONS and name[0] != "_":
                parts.append((name, repr(value)))
            elif kind in _FUNCTIONS or name in _METHODS:
                parts.append((name, id(value)))
            elif isinstance(value, PretrainedConfig):
                configs[id(value)] = value
        if hasattr(type(module), "_disable_adapters"):  # a PEFT layer: its active adapters
            parts.append((type(module), module._disable_adapters, str(module._active_adapter)))
    for config in configs.values():
        public = {name: value for name, value in vars(config).items() if name[0] != "_"}
        parts.append(repr(sorted(public.items(), key=itemgetter(0))))
    return hash(tuple(parts))


def _written(tensor: Tensor) -> tuple[int, ...]:
    """Version and place of a tensor of another type, without a device, or made for inference."""
    if tensor.is_meta:  # offloaded: accelerate sets another meta tensor after every call
        return (-1,)
    if tensor.is_inference():
        return (next(_COUNT),)  # writes cannot be detected, so it counts as written to
    try:
        return tensor._version, tensor.data_ptr()
    except (RuntimeError, NotImplementedError):  # some quantisations have no address
        return (tensor._version,)


def _number(target: Any) -> int:
    """A number for the lifetime of an object."""
    if isinstance(target, Tensor) and (type(target) not in _PLAIN or target.is_meta):
        return 0 if target.is_meta else id(target)  # moved by swapping, which fails with references
    address, number = id(target), next(_COUNT)
    _NUMBERS[address] = ref(target, lambda reference: _forget(address, reference)), number
    return number


def _forget(address: int, reference: Any) -> None:
    if _NUMBERS.get(address, (None, 0))[0] is reference:
        del _NUMBERS[address]


def plain_values(module: nn.Module) -> list[str]:
    """A module's attributes that are numbers, strings, collections of them or functions, as
    "name=value".

    Examples are the scaling of attention or of an adapter, or an activation. Attributes that change
    no result are left out: devices, the training flag, private attributes that are not numbers.
    Functions without a name are `foreign_code`.
    """
    attributes, renewed, values = vars(module), renewed_names(module), []
    for name in [name for name in attributes if name not in _IGNORED]:
        value = attributes[name]
        kind = type(value)
        # In recurrent layers a pass replaces None by a tensor.
        if value is None or name in renewed or (name[0] == "_" and kind not in (int, float)):
            continue
        if kind in _SCALARS:
            values.append(f"{name}={value!r}")
        elif kind in _COLLECTIONS:
            values.append(f"{name}={_literal(value)}")
        elif kind in _FUNCTIONS and name not in _METHODS:
            values.append(f"{name}={_function_name(value)}")
    return values


def _function_name(function: Any) -> str | None:
    """Name of a function, with bound arguments; None if that does not identify the function."""
    if isinstance(function, partial):
        name, bound = _function_name(function.func), (*function.args, *function.keywords.values())
        if name is None or any(type(value) not in _SCALARS for value in bound):
            return None
        return f"{name}{function.args}{function.keywords}"
    if "<" in function.__qualname__ or getattr(function, "__closure__", None):
        return None
    return f"{function.__module__}.{function.__qualname__}"


def renewed_names(module: nn.Module) -> Set[str]:
    """Attributes that rotary embeddings recompute for each sequence, depending on its length."""
    attributes = vars(module)
    if "rope_type" not in attributes:
        return _NO_NAMES
    kinds = attributes["rope_type"]
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    if not any("dynamic" in str(kind) or kind == "longrope" for kind in kinds):
        return _NO_NAMES
    names = (name for name in (*attributes, *attributes["_buffers"]) if "original" not in name)
    return {name for name in names if name.endswith(_RENEWED)}


def foreign_code(module: nn.Module) -> list[Any]:
    """Hooks, nameless functions and a replaced forward method that foreign code set on a module.

    Their computation is unknown. Those of transformers and accelerate are not included: they only
    record, or fetch weights. Those of this package are not included: they exist only during a pass.
    """
    attributes = vars(module)
    code: list[Any] = []
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        code += attributes[kind].values()
    # If accelerate wrapped the forward method, the wrapped method counts.
    methods = [attributes[name] for name in _METHODS if name in attributes]
    forward = type(module).forward
    code += [method for method in methods if getattr(method, "__func__", None) is not forward]
    functions = [name for name, value in attributes.items() if type(value) in _FUNCTIONS]
    public = [attributes[name] for name in functions if name != "forward" and name[0] != "_"]
    code += [function for function in public if not _function_name(function)]
    return [function for function in code if not _of_library(function)]


def has_foreign_code(model: nn.Module) -> bool:
    """Whether any module has `foreign_code`. It may act differently at each position and for each
    text, so only full forward passes are known to run it as the model does."""
    known = known_values(model)
    if "foreign code" not in known:
        known["foreign code"] = any(foreign_code(module) for module in model.modules())
    return bool(known["foreign code"])


def _of_library(code: Any) -> bool:
    while isinstance(code, partial):
        code = code.func
    module = getattr(code, "__module__", None) or type(code).__module__
    return module.partition(".")[0] in ("transformers", "accelerate", __package__.partition(".")[0])


def _literal(value: Any) -> str | None:
    """A plain value as Python source, sets in order; None for anything else."""
    if type(value) in _SCALARS:
        return repr(value)
    if isinstance(value, Mapping):
        parts = [(_literal(key), _literal(of_key)) for key, of_key in value.items()]
        return repr([(key, of_key) for key, of_key in parts if key and of_key])
    if type(value) in _COLLECTIONS:
        texts = [text for part in value if (text := _literal(part)) is not None]
        return repr(sorted(texts) if isinstance(value, set | frozenset) else texts)
    return None
