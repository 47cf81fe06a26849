"""Whether a model is still as it was, what was found about it as long as it is, and its lock.

All of this is kept beside the models: it does not keep a model alive, and nothing is written to it.
"""

import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count
from operator import is_, itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn


class Seen(NamedTuple):
    """A model as it was seen, without buffers that it computes itself."""

    # Modules, tensors and forward methods; `Record.seen` has weak references to them.
    objects: list[Any]
    trains: bool  # whether a module is in training mode; compared apart, not part of the state
    values: list[Hashable]  # versions and addresses of tensors, hooks, adapters, configuration
    traced: bool  # whether PyTorch counts every write to its tensors
    sums: list[int]  # of the weights read, see `watch`


@dataclass
class Record:
    """What is kept beside one model."""

    seen: Seen | None = None  # the model, when `model_state` was last found
    state: int = 0  # and its `model_state` then
    watched: list[Any] = field(default_factory=list)  # weak references to tensors, see `watch`
    findings: dict[Hashable, Any] = field(default_factory=dict)  # about the model in that state
    in_session: bool = False
    own_attention: str | None = None  # in a session: the implementation before it


_RECORDS: "WeakKeyDictionary[nn.Module, Record]" = WeakKeyDictionary()
_LOCKS: "WeakKeyDictionary[nn.Module, Any]" = WeakKeyDictionary()
_GUARD = threading.Lock()
_COUNT = count(1)
_PLAIN = (nn.Parameter, Tensor)
_CHANGES: dict[int, tuple[int, list[Callable[[], object]]]] = {}
"""Of each `changes` that is open: its thread, and what undoes it."""


def record_of(model: nn.Module) -> Record:
    """What is kept beside a model, created if there is nothing."""
    with _GUARD:
        return _RECORDS.setdefault(model, Record())


def model_lock(model: nn.Module) -> Any:
    """The lock that is held while a model is scored; a context manager that one thread may nest.
    Model objects with the same input embedding share one."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        embedding = None
    with _GUARD:
        return _LOCKS.setdefault(model if embedding is None else embedding, threading.RLock())


@contextmanager
def changes() -> Iterator[list[Callable[[], object]]]:
    """A list of undo steps: whoever changes a model for a while appends a step before the change.

    The steps run at the end, the last first. They also run in a fork of the process by another
    thread, where nobody else would undo the change. So a step may run twice, and before its change
    was made.
    """
    undo: list[Callable[[], object]] = []
    _CHANGES[id(undo)] = threading.get_ident(), undo
    try:
        yield undo
    finally:
        for each in reversed(undo):
            each()
        del _CHANGES[id(undo)]


def _in_fork() -> None:
    """Only the thread that forked lives on: what others hold is free, what they changed undone.

    PyTorch's threads do not live on either: with GNU's OpenMP, a pass that waits for them hangs.
    """
    global _GUARD
    _GUARD = threading.Lock()
    if _RECORDS:  # the parent has run a model
        torch.set_num_threads(1)
    for owner, lock in list(_LOCKS.items()):
        if lock.acquire(blocking=False):  # free, or held by this thread
            lock.release()
        else:
            _LOCKS[owner] = threading.RLock()
    for key, (thread, undo) in reversed(list(_CHANGES.items())):
        if thread != threading.get_ident():
            for each in reversed(undo):
                each()
            del _CHANGES[key]


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_fork)


def findings(model: nn.Module) -> dict[Hashable, Any]:
    """What was found about the model in its present state, by name; empty in a new state."""
    model_state(model)  # forgets what was found in another state
    return record_of(model).findings


def model_state(model: nn.Module) -> int:
    """A number that changes when modules, weights or the configuration of a model are replaced or
    written to, another PEFT adapter acts, or a hook of other code than transformers' comes or goes;
    in this process only.

    Writes through `.data` or into memory shared with NumPy are detected in every 16th row of one
    weight in each layer, the output projection of the heads, and in no other weight. No writes are
    detected in buffers that no checkpoint has, nor changes of numbers that are attributes of a
    module. Inside `scoring_session` it is that of the beginning.
    """
    record = record_of(model)
    if record.in_session:
        return record.state  # which `scoring_session` has set at its beginning
    now = _look(model, record)
    if not (now.traced and _is_as_seen(record.seen, now)):
        record.seen = now._replace(objects=[*map(ref, now.objects)])
        record.state, record.findings = next(_COUNT), {}
    return record.state


def changes_since(model: nn.Module) -> list[str]:
    """What is not as it was when `model_state` was last found, in evaluation mode; in words."""
    record = record_of(model)
    now = _look(model, record)
    found = ["modules are in training mode"] if now.trains else []
    if not _is_as_seen(record.seen, now):
        found.append("weights, modules, hooks, adapters or its configuration are others")
    return found


def watch(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """From now on, read the first matrix of these modules, one of a layer, at each look."""
    record = record_of(model)
    tensors = ([*module.parameters(), *module.buffers()] for module in modules)
    matrices = ([t for t in part if type(t) in _PLAIN and t.ndim > 1][:1] for part in tensors)
    record.watched = [ref(tensor) for tensor in chain(*matrices) if not tensor.is_meta]
    if record.seen is not None:
        record.seen = record.seen._replace(sums=_sums(record))


def _is_as_seen(seen: Seen | None, now: Seen) -> bool:
    return (
        seen is not None
        and (seen.values, seen.traced, seen.sums) == (now.values, now.traced, now.sums)
        and len(seen.objects) == len(now.objects)
        and all(map(is_, [one() for one in seen.objects], now.objects))
    )


def _look(model: nn.Module, record: Record) -> Seen:
    objects: list[Any] = []
    values: list[Hashable] = []
    traced, trains = True, False
    modules: list[Any] = [model]
    # One loop that calls almost no function of ours, since it runs twice for every answer.
    while modules:
        if (module := modules.pop()) is None:
            continue
        own = vars(module)
        modules += own["_modules"].values()
        objects.append(module)
        trains |= own.get("training", False)  # compiled modules have none
        for hooks in (own["_forward_hooks"], own["_forward_pre_hooks"]):
            if hooks:  # transformers leaves some at a first pass, which record
                values += [number for number, hook in hooks.items() if not _of_library(hook)]
        for name in ("forward", "_old_forward"):
            # Older transformers set other methods for a pass, which record; afterwards the class's
            # method is left as an attribute.
            if name in own and getattr(own[name], "__func__", None) is not type(module).forward:
                objects.append(own[name])
        if hasattr(type(module), "_disable_adapters"):  # a PEFT layer: its active adapters
            values += [module._disable_adapters, str(module._active_adapter)]
            values += [str(own.get("scaling")), str(own.get("merged_adapters"))]
        computed = own["_non_persistent_buffers_set"]  # such as rotary angles, for longer texts
        for name, tensor in chain(own["_parameters"].items(), own["_buffers"].items()):
            if tensor is None or name in computed or tensor.is_meta:
                continue
            if tensor.is_inference():
                traced = False  # writes leave no trace, so it counts as written to
            elif type(tensor) not in _PLAIN:
                # No weak reference: with one, PyTorch cannot move such tensors by swapping.
                values += [id(tensor), tensor._version]
            else:
                objects.append(tensor)
                values += [tensor._version, tensor.data_ptr()]
    config: Any = getattr(model, "config", None)
    for settings in () if config is None else (config, config.get_text_config()):
        public = {name: value for name, value in vars(settings).items() if name[0] != "_"}
        values.append(repr(sorted(public.items(), key=itemgetter(0))))
    return Seen(objects, trains, values, traced, _sums(record))


def _sums(record: Record) -> list[int]:
    """Sums modulo 2^64 of the bits of every 16th row, one for each matrix watched."""
    sums: list[Tensor] = []
    for each in record.watched:
        if (tensor := each()) is not None:
            rows = tensor.data[::16]
            try:
                total = rows.view(torch.int64).sum()
            except RuntimeError:  # rows of an odd number of bytes, or in another order
                total = rows.contiguous().view(torch.uint8).sum()
            sums.append(total.to(sums[0].device) if sums else total)
    return torch.stack(sums).tolist() if sums else []


def foreign_modules(model: nn.Module) -> list[str]:
    """Paths of modules that have hooks, or a forward method of their own, of other code than
    transformers and accelerate, which only record or fetch weights, and of this package."""
    paths = []
    for path, module in model.named_modules():
        code = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            code.append(module.forward)
        if not all(map(_of_library, code)):
            paths.append(path)
    return paths


def _of_library(code: Any) -> bool:
    while isinstance(code, partial):
        code = code.func
    module = getattr(code, "__module__", None) or type(code).__module__
    return module.partition(".")[0] in ("transformers", "accelerate", __package__.partition(".")[0])
