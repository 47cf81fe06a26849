"""What is remembered of a model while it lives: its lock, its structure, what was checked of it.

Nothing here keeps a model alive, and nothing is written onto one.
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PretrainedConfig


@dataclass
class ModelCache:
    """What is remembered of one model.

    Attributes:
        found: facts that hold as long as `state` is the model's own, by name.
        state: `model_state` when `found` was begun.
        attention: the model's own attention implementation while a session is open, else None.
        switches: how each attention implementation is put into force: what its configurations say.
    """

    found: dict[Hashable, Any] = field(default_factory=dict)
    state: int | None = None
    attention: str | None = None
    switches: dict[str, Any] = field(default_factory=dict)


_CACHES: "WeakKeyDictionary[nn.Module, ModelCache]" = WeakKeyDictionary()
_LOCKS: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()
_GUARD = threading.Lock()
_COUNT = count(1)
_SERIALS: dict[int, tuple[Any, int]] = {}
"""By `id`, a weak reference to what has a number, and the number."""
_STORAGES: dict[int, tuple[StorageWeakRef, int]] = {}
"""The same of tensors' storages, by their address, which no other gets while it stands here."""
_NO_MATTER = {"training", "gradient_checkpointing", "hf_device_map", "warnings_issued"}
_NO_MATTER |= {name for name in vars(nn.Module()) if name[0] == "_"} | {"name_or_path"}
_NOTHING: frozenset[str] = frozenset()
_PLAIN = {bool, int, float, str, type(None)}
_COLLECTIONS = {dict, list, tuple, set, frozenset}
_FUNCTIONS = {FunctionType, BuiltinFunctionType, partial}
_METHODS = ("forward", "_old_forward")
_RENEWED = ("inv_freq", "max_seq_len_cached", "attention_scaling")


def model_cache_of(model: nn.Module) -> ModelCache:
    """The cache of a model, made when there is none."""
    with _GUARD:
        return _CACHES.setdefault(model, ModelCache())


def model_lock(model: nn.Module) -> Any:
    """The lock that whoever scores a model holds; a context manager, for one thread nestable.

    Model objects that share their modules share it: it is that of the input embedding.

    Example:
        >>> with model_lock(model):  # no other thread scores it meanwhile
        ...     model.num_parameters() > 0
        True
    """
    try:
        shared = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        shared = None
    with _GUARD:
        return _LOCKS.setdefault(model if shared is None else shared, threading.RLock())


def model_cache(model: nn.Module) -> dict[Hashable, Any]:
    """Facts about the model as it is now; forgotten once its modules or weights change.

    Inside `scoring_session` nothing is to change, and is not looked for.
    """
    cache = model_cache_of(model)
    if cache.attention is not None and cache.state is not None:
        return cache.found
    state = model_state(model)
    if cache.state != state:
        cache.found, cache.state = {}, state
    return cache.found


def state_in_session(model: nn.Module) -> int:
    """`model_state`; inside `scoring_session` as it was at its beginning.

    Example:
        >>> from lm_polygraph_asmi.model import scoring_session
        >>> before = model_state(model)
        >>> with scoring_session(model):
        ...     state_in_session(model) == before
        True
    """
    model_cache(model)
    state = model_cache_of(model).state
    assert state is not None
    return state


def model_state(model: nn.Module) -> int:
    """A number that changes when what a model computes with is exchanged or written to.

    It costs microseconds a module, since no value is read: it is made of every module, of the
    identity, storage and version counter of every parameter and buffer, of the plain values that
    modules and configurations hold (`plain_values`), of PEFT's active adapters, and of the hooks
    and forward methods that others have set. Unlike a key made of values it means nothing in
    another process. Writing through `.data` or into memory that NumPy shares moves no counter and
    is not seen. Parameters made in inference mode have no counter, so the state of a model that was
    loaded in it is another one every time.

    Example:
        >>> before = model_state(model)
        >>> before == model_state(model)
        True
        >>> _ = model.lm_head.weight.requires_grad_(False).mul_(1)  # written to: a new state
        >>> before == model_state(model)
        False
    """
    parts: list[Hashable] = []
    configs: dict[int, PretrainedConfig] = {}
    for module in model.modules():
        own = vars(module)
        parts.append((_serial(module), type(module)))
        if hasattr(type(module), "_disable_adapters"):  # a layer of PEFT: which adapters act?
            parts.append((module._disable_adapters, str(module._active_adapter)))
        parts += plain_values(module)
        parts += [_serial(code) for code in foreign_code(module)]
        renewed = renewed_names(module)
        for kind in ("_parameters", "_buffers"):
            for name, tensor in own[kind].items():
                if tensor is not None and name not in renewed:
                    parts.append(_place(tensor))
        config = own.get("config")
        if isinstance(config, PretrainedConfig):
            configs[id(config)] = config
    for config in configs.values():
        parts += _configured(config)
    return hash(tuple(parts))


def plain_values(module: nn.Module) -> list[str]:
    """The numbers, texts, collections of them and functions among a module's attributes, by name.

    Such as the scaling of attention or of an adapter, or an activation. Left out is what changes no
    result: where a model lies, whether it is being trained, what is no number among the names that
    begin with an underscore. Functions without a name of their own are `foreign_code`.
    """
    own, renewed, found = vars(module), renewed_names(module), []
    for name in [name for name in own if name not in _NO_MATTER]:
        value = own[name]
        kind = type(value)
        # Where recurrent layers begin with None, a pass puts a tensor.
        if value is None or name in renewed or (name[0] == "_" and kind not in (int, float)):
            continue
        if kind in _PLAIN:
            found.append(f"{name}={value!r}")
        elif kind in _COLLECTIONS:
            found.append(f"{name}={_text(value)}")
        elif kind in _FUNCTIONS and name not in _METHODS:
            found.append(f"{name}={_named(value)}")
    return found


def held_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors among a module's attributes and buffers, by name: not its parameters, nor what
    is made anew for each sequence."""
    renewed = renewed_names(module)
    return {
        name: value
        for name, value in (*vars(module).items(), *vars(module)["_buffers"].items())
        if isinstance(value, Tensor) and name not in renewed
    }


def _named(function: Any) -> str | None:
    """What a function is called, with what is bound to it; None where that tells not all of it."""
    if isinstance(function, partial):
        name, bound = _named(function.func), (*function.args, *function.keywords.values())
        if name is None or any(type(value) not in _PLAIN for value in bound):
            return None
        return f"{name}{function.args}{function.keywords}"
    if "<" in function.__qualname__ or getattr(function, "__closure__", None):
        return None
    return f"{function.__module__}.{function.__qualname__}"


def renewed_names(module: nn.Module) -> Set[str]:
    """Attributes that rotary embeddings make anew for each sequence, by its length."""
    own = vars(module)
    if "rope_type" not in own:
        return _NOTHING
    kinds = own["rope_type"]
    kinds = kinds.values() if isinstance(kinds, dict) else [kinds]
    if not any("dynamic" in str(kind) or kind == "longrope" for kind in kinds):
        return _NOTHING
    names = (name for name in (*own, *own["_buffers"]) if "original" not in name)
    return {name for name in names if name.endswith(_RENEWED)}


def foreign_code(module: nn.Module) -> list[Any]:
    """Hooks, nameless functions, and a forward method of its own, that others have set on a module.

    What they compute cannot be told. Those of transformers and accelerate are not among them: they
    record, or fetch weights. Nor are those set here, which come and go within a pass.
    """
    own = vars(module)
    found = []
    for kind in ("_forward_pre_hooks", "_forward_hooks"):
        if own[kind]:
            found += own[kind].values()
    # Where accelerate has wrapped the forward method, what it has wrapped counts.
    for name in _METHODS:
        if name in own and getattr(own[name], "__func__", None) is not type(module).forward:
            found.append(own[name])
    found += [
        value
        for name, value in own.items()
        if type(value) in _FUNCTIONS and name != "forward" and name[0] != "_" and not _named(value)
    ]
    return [code for code in found if not _of_library(code)] if found else found


def has_foreign_code(model: nn.Module) -> bool:
    """Whether there is any in a model. It may do another thing at each position and for each text,
    so that nothing but full forward passes is known to run it as the model does."""
    facts = model_cache(model)
    if "foreign code" not in facts:
        facts["foreign code"] = any(foreign_code(module) for module in model.modules())
    return bool(facts["foreign code"])


def _of_library(code: Any) -> bool:
    while isinstance(code, partial):
        code = code.func
    home = getattr(code, "__module__", None) or type(code).__module__
    return home.partition(".")[0] in ("transformers", "accelerate", __package__.partition(".")[0])


def _text(value: Any) -> str | None:
    """A plain value as it would be typed, sets in order; None for anything else."""
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, Mapping):
        parts = [(_text(key), _text(of_key)) for key, of_key in value.items()]
        return repr([(key, of_key) for key, of_key in parts if key and of_key])
    if type(value) in _COLLECTIONS:
        texts = [text for part in value if (text := _text(part)) is not None]
        return repr(sorted(texts) if isinstance(value, set | frozenset) else texts)
    return None


def _configured(config: PretrainedConfig) -> Iterator[str]:
    for name, value in vars(config).items():
        if name[0] == "_":
            continue
        if isinstance(value, PretrainedConfig):
            yield from _configured(value)
        elif (text := _text(value)) is not None:
            yield f"{name}={text}"


def _serial(thing: Any) -> int:
    """A number for as long as something lives; unlike its `id` no later one gets it again."""
    place = id(thing)
    kept = _SERIALS.get(place)
    if kept is not None and kept[0]() is thing:
        return kept[1]
    number = next(_COUNT)
    try:
        _SERIALS[place] = ref(thing, lambda gone: _forget(place, gone)), number
    except TypeError:  # of a kind that nothing weak can refer to
        return place
    return number


def _forget(place: int, gone: Any) -> None:
    if _SERIALS.get(place, (None, 0))[0] is gone:
        del _SERIALS[place]


def _place(tensor: Tensor) -> tuple[int, ...]:
    if tensor.is_meta:  # offloaded: accelerate puts another stand-in there after every call
        return hash(tensor.shape), -1, -1
    # Tensors made in inference mode count no versions, those of some quantisations have no place.
    version = -1 if tensor.is_inference() else tensor._version
    if version < 0 and isinstance(tensor, nn.Parameter):
        version = next(_COUNT)  # whether it was written to nobody can tell: it counts as if
    # PyTorch moves tensors that wrap others by exchanging them, which weak references forbid.
    usual = type(tensor) in (nn.Parameter, Tensor) or not is_traceable_wrapper_subclass(tensor)
    number = _serial(tensor) if usual else id(tensor)
    try:
        return number, tensor.data_ptr(), version, _storage_serial(tensor)
    except (RuntimeError, NotImplementedError):
        return number, -1, version, -1


def _storage_serial(tensor: Tensor) -> int:
    """A number for the memory a tensor lies in, which a later tensor may get at the same place."""
    storage = tensor.untyped_storage()
    kept = _STORAGES.get(storage._cdata)
    if kept is not None:
        return kept[1]
    if not len(_STORAGES) & (len(_STORAGES) - 1):  # doubled: a time to forget what is gone
        for place, (of, _) in list(_STORAGES.items()):
            if of.expired():
                del _STORAGES[place]
    number = next(_COUNT)
    _STORAGES[storage._cdata] = StorageWeakRef(storage), number
    return number
