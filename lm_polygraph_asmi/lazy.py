"""Names of a package that are imported on first use, so that importing the package is quick."""

import ast
import inspect
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
    return _attached(package, module_of)


def _attached(
    package: str, module_of: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    def imported(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    public = sorted(module_of)
    return imported, lambda: list(public), public


def attach_imports(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`attach` for the names that a package imports from its modules below `if TYPE_CHECKING`.

    So type checkers and programs read the same list. Names for others are imported as `NAME as
    NAME`: strict type checkers refuse the rest to users, so they are left out here, too.
    """
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    blocks = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    names: dict[str, str] = {}
    for node in imports:
        public = [alias.name for alias in node.names if alias.asname == alias.name]
        names |= dict.fromkeys(public, str(node.module))
    return _attached(package, names)
