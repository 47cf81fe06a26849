"""Caches per model: its lock, its structure, the results of its checks.

They do not keep a model alive, and nothing is written to the model.
"""

import threading
from collections.abc import Hashable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from transformers import PretrainedConfig


@dataclass
class ModelCache:
    """The cache of one model.

    Attributes:
        values: by name, valid as long as the model's state is `state`.
        state: `model_state` when `values` was created.
        attention: the model's own attention implementation while a session is open, else None.
        switches: by attention implementation, the settings of the configurations that select it.
        named: the setting `structure`, see `structure.name_modules`.
    """

    values: dict[Hashable, Any] = field(default_factory=dict)
    state: int | None = None
    attention: str | None = None
    switches: dict[str, Any] = field(default_factory=dict)
    named: str | None = None


_CACHES: "WeakKeyDictionary[nn.Module, ModelCache]" = WeakKeyDictionary()
_LOCKS: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()
_GUARD = threading.Lock()
_COUNT = count(1)
_SERIALS: dict[int, tuple[Any, int]] = {}
"""By `id`, a weak reference to a numbered object, and its number."""
_IGNORED = {"training", "gradient_checkpointing", "hf_device_map", "warnings_issued"}
_IGNORED |= {name for name in vars(nn.Module()) if name[0] == "_"} | {"name_or_path"}
_NO_NAMES: frozenset[str] = frozenset()
_SCALARS = {bool, int, float, str, type(None)}
_COLLECTIONS = {dict, list, tuple, set, frozenset}
_FUNCTIONS = {FunctionType, BuiltinFunctionType, partial}
_METHODS = ("forward", "_old_forward")
_RENEWED = ("inv_freq", "max_seq_len_cached", "attention_scaling")


def model_cache_of(model: nn.Module) -> ModelCache:
    """The cache of a model, created if there is none."""
    with _GUARD:
        return _CACHES.setdefault(model, ModelCache())


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


def model_cache(model: nn.Module) -> dict[Hashable, Any]:
    """Values cached for the model; emptied once its modules or weights change.

    Inside `scoring_session` the model must not change, so changes are not looked for.
    """
    cache, state = model_cache_of(model), model_state(model)
    if cache.state != state:
        cache.values, cache.state = {}, state
    return cache.values


def model_state(model: nn.Module) -> int:
    """A number that changes when modules, weights or settings of a model are replaced or changed.

    It covers all modules; identity, storage and version counter of every parameter and buffer;
    plain values of modules and configurations (`plain_values`); active PEFT adapters; foreign hooks
    and forward methods. It costs microseconds per module, since no weight is read. The number is
    valid only in this process; inside `scoring_session` it is that of the beginning. Writes through
    `.data` or into memory shared with NumPy are not detected. Parameters created in inference mode
    have no version counter, so a model loaded in that mode has a new state at every call.

    Example:
        >>> before = model_state(model)
        >>> before == model_state(model)
        True
        >>> _ = model.lm_head.weight.requires_grad_(False).mul_(1)  # written to: a new state
        >>> before == model_state(model)
        False
    """
    cache = model_cache_of(model)
    if cache.attention is not None and cache.state is not None:
        return cache.state
    return _state(model)


def _state(model: nn.Module) -> int:
    parts: list[Hashable] = [model_cache_of(model).named]
    configs: dict[int, PretrainedConfig] = {}
    for module in model.modules():
        attributes = vars(module)
        parts.append((_serial(module), type(module)))
        if hasattr(type(module), "_disable_adapters"):  # a PEFT layer: its active adapters
            parts.append((module._disable_adapters, str(module._active_adapter)))
        parts += plain_values(module)
        parts += [_serial(code) for code in foreign_code(module)]
        renewed = renewed_names(module)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in attributes[kind].items():
                if tensor is not None and name not in renewed:
                    parts.append(_tensor_key(tensor))
        config = attributes.get("config")
        if isinstance(config, PretrainedConfig):
            configs[id(config)] = config
    for config in configs.values():
        parts += _config_values(config)
    return hash(tuple(parts))


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


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors among a module's attributes and buffers, by name, without parameters and without
    those that are recomputed for each sequence."""
    renewed = renewed_names(module)
    return {
        name: value
        for name, value in (*vars(module).items(), *vars(module)["_buffers"].items())
        if isinstance(value, Tensor) and name not in renewed
    }


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
    cache = model_cache(model)
    if "foreign code" not in cache:
        cache["foreign code"] = any(foreign_code(module) for module in model.modules())
    return bool(cache["foreign code"])


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


def _config_values(config: PretrainedConfig) -> Iterator[str]:
    for name, value in vars(config).items():
        if name[0] == "_":
            continue
        if isinstance(value, PretrainedConfig):
            yield from _config_values(value)
        elif (text := _literal(value)) is not None:
            yield f"{name}={text}"


def _serial(target: Any) -> int:
    """A number for the lifetime of an object; unlike its `id` the number is never reused."""
    address = id(target)
    entry = _SERIALS.get(address)
    if entry is not None and entry[0]() is target:
        return entry[1]
    number = next(_COUNT)
    try:
        _SERIALS[address] = ref(target, lambda reference: _forget(address, reference)), number
    except TypeError:  # its type has no weak references
        return address
    return number


def _forget(address: int, reference: Any) -> None:
    if _SERIALS.get(address, (None, 0))[0] is reference:
        del _SERIALS[address]


def _tensor_key(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_meta:  # offloaded: accelerate sets another meta tensor after every call
        return hash(tensor.shape), -1, -1
    # Tensors made in inference mode have no version, those of some quantisations no address.
    version = -1 if tensor.is_inference() else tensor._version
    if version < 0 and isinstance(tensor, nn.Parameter):
        version = next(_COUNT)  # writes cannot be detected, so it counts as written to
    # PyTorch moves wrapper tensors by swapping them, which fails if they have weak references.
    number = _serial(tensor) if type(tensor) in (nn.Parameter, Tensor) else id(tensor)
    try:
        return number, tensor.data_ptr(), version, _serial(tensor.untyped_storage())
    except (RuntimeError, NotImplementedError):
        return number, -1, version, -1
