"""Names of a package that are imported on first use, so that importing the package is quick."""

import ast
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def attach_imports(
    package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, for the names that it imports from its
    modules below `if TYPE_CHECKING`.

    So type checkers and programs read the same list. Names for others are imported as `NAME as
    NAME`: strict type checkers refuse the rest to users, so they are left out here, too.
    """
    tree = ast.parse(inspect.getsource(sys.modules[package]))
    blocks = (node for node in tree.body if isinstance(node, ast.If))
    imports = (node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom))
    module_of: dict[str, str] = {}
    for node in imports:
        public = [alias.name for alias in node.names if alias.asname == alias.name]
        module_of |= dict.fromkeys(public, str(node.module))

    def imported(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return imported, lambda: list(module_of), sorted(module_of)
