"""Read and write files: strict JSON, complete files, one writer at a time.

This module imports nothing heavy.
"""

import json
import logging
import math
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from lm_polygraph_asmi.validation import check_new, check_text

log = logging.getLogger("lm_polygraph")


DEPTH = 200
"""Most levels of nested lists and objects. Python's own limit depends on the caller's stack."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text, read strictly, so that any other reader finds the same value.

    Raises:
        ValueError: the text is not JSON, or readers differ in how they read it: NaN or Infinity; a
            number beyond the range of floats; a field twice in one object; half of a surrogate
            pair; or more than `DEPTH` levels of lists and objects.

    Example:
        >>> parse_json('{"correct": true, "correct": false}')
        Traceback (most recent call last):
        ValueError: the field 'correct' occurs twice in one object: keep one
    """
    twice: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = Counter(name for name, _ in pairs)
        twice.extend(name for name in names if names[name] > 1)
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError("not JSON: nested too deeply") from error
    except ValueError as error:  # also if the text is not UTF-8
        long = "set_int_max_str_digits" in str(error)
        reason = "a number of thousands of digits" if long else error
        raise ValueError(f"not JSON: {reason}") from error
    if twice:
        raise ValueError(f"the field {twice[0]!r} occurs twice in one object: keep one")
    _check_strict(value)
    return value


def read_json(path: str | Path) -> Any:
    """The value of a JSON file, read strictly.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: as in `parse_json`. The message does not name the file.
    """
    return parse_json(Path(path).read_bytes())


def to_json(
    value: Any, default: Callable[[Any], Any] | None = None, indent: int | None = None
) -> str:
    """A JSON text that `parse_json` can read.

    Args:
        value: may contain numbers and arrays of NumPy, which are written as plain ones.
        default: converts values of other types.

    Raises:
        TypeError: a value has another type, and there is no `default`.
        ValueError: NaN, Infinity, or half of a surrogate pair (the message names the field); or
            more than `DEPTH` levels of lists and objects.
    """

    def converted(item: Any) -> Any:
        if hasattr(item, "tolist"):
            item = item.tolist()
        elif default is not None:
            item = default(item)
        else:
            raise TypeError(f"expected a value that JSON has, got a {type(item).__name__}")
        _check_strict(item)
        return item

    _check_strict(value)
    return json.dumps(value, default=converted, indent=indent, allow_nan=False)


def _check_strict(value: Any, path: str = "", depth: int = 0) -> None:
    """Raise ValueError, which names the field, if a part of a value cannot be written as JSON."""
    if depth >= DEPTH and isinstance(value, Mapping | list | tuple):
        raise ValueError(f"expected at most {DEPTH} nested lists and objects, got more: flatten it")
    place = f"the field {path!r}: " if path else ""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(
                f"{place}expected a finite number, got {float(value)!r}, which JSON does not have: "
                "write null, or remove the row if this is its label"
            )
    elif isinstance(value, str):
        check_text(place, value)
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if isinstance(name, str):
                check_text(place, name)
            _check_strict(part, f"{path}.{name}" if path else str(name), depth + 1)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            if not isinstance(part, int):
                _check_strict(part, f"{path}[{number}]", depth + 1)


@contextmanager
def locked(output: str | Path) -> Iterator[None]:
    """Lock an output for one writer until the block ends or the process dies.

    The lock is the file OUTPUT.lock. If the file system has no locks, a warning is logged and
    nothing is locked. Raises ValueError: another writer, perhaps in this process, has the lock.
    """
    lock = FileLock(f"{output}.lock", blocking=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise ValueError(
            f"{output} is being written by another program, or by another call in this one: wait "
            "until it has ended, or name another file. If there is no other writer, remove "
            f"{lock.lock_file}"
        ) from error
    except NotImplementedError as error:
        log.warning("%s cannot be locked (%s): do not write it from two programs", output, error)
    try:
        yield
    finally:
        with suppress(OSError):  # Windows does not remove an open file
            Path(lock.lock_file).unlink()
        lock.release()


@contextmanager
def writing(out: str | Path, replace: bool = False) -> Iterator[Path]:
    """Write a file completely or not at all: OUT.partial becomes OUT when the block ends.

    OUT is locked meanwhile. If the block raises, OUT.partial keeps what was written.

    Args:
        out: the file.
        replace: whether to replace OUT if it exists.

    Raises:
        ValueError: OUT exists, or another writer has the lock.
    """
    partial = partial_of(out)
    with locked(out):
        try:
            if not replace:
                check_new(out)
            yield partial
            if not replace:
                check_new(out, f"the result is in {partial}")
            partial.replace(out)
        finally:
            with suppress(FileNotFoundError):
                if not partial.stat().st_size:
                    partial.unlink()


def partial_of(out: str | Path) -> Path:
    """The file in which an output is written until it is complete."""
    return Path(f"{out}.partial")


def write_whole(path: str | Path, text: str) -> None:
    """Write or replace a text file (UTF-8), so that no reader sees half of it.

    Raises:
        ValueError: another writer has the lock.
    """
    with writing(path, replace=True) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Inside the block, SIGTERM, which clusters and service managers send, acts as Ctrl-C.

    The KeyboardInterrupt has the signal's number. A handler that a launcher has set stays.
    """

    def interrupt(number: int, _: Any) -> None:
        raise KeyboardInterrupt(number)

    main = threading.current_thread() is threading.main_thread()  # only it may set handlers
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
