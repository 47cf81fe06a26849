"""Import the public names of a package on first use, so that importing the package is quick."""

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def attach_imports(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, for names imported on first use.

    The names are those that the package imports from its modules below `if TYPE_CHECKING`, so that
    type checkers and programs read the same list. Only names imported as `NAME as NAME` are public:
    strict type checkers reject all others, so they are left out here, too.
    """
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    module_of = {
        alias.name: str(node.module)
        for node in imports
        for alias in node.names
        if alias.asname == alias.name
    }

    def imported(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return imported, lambda: list(module_of), sorted(module_of)
