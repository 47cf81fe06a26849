"""The type checker behind `--jaxtyping-packages`: tensor shapes, and int where a float is due."""

import gc
import sys
from typing import Any

from beartype import BeartypeConf, beartype

if "pytest" in sys.modules:
    gc.disable()  # until all is imported, see conftest: nothing of it is garbage

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Any) -> Any:
    """Outside the core, only what has shapes. Other functions may be given anything, which they
    refuse by its name.

    Inner functions are not checked: each call of the outer one would compile the check anew.
    """
    core = function.__module__.startswith("lm_polygraph_asmi.core")
    shapes = "jaxtyping" in repr(getattr(function, "__annotations__", None))
    inner = "<locals>" in function.__qualname__
    return _check(function) if (core or shapes) and not inner else function
