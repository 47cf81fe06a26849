"""Names of a package that are imported on first use, so that importing the package is quick."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(
    package: str, names: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        names: module, below the package, or after a dot beside it -> its names, by blanks.
    """
    module_of = {name: f".{m}" for m, listed in names.items() for name in listed.split()}

    def imported(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    public = sorted(module_of)
    return imported, lambda: list(public), public
