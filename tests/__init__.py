"""The type checker behind `--jaxtyping-packages`: tensor shapes, and int where a float is due."""

import gc
import sys
from typing import Any

from beartype import BeartypeConf, beartype

if "pytest" in sys.modules:
    gc.disable()  # until all is imported, see conftest: nothing of it is garbage

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Any) -> Any:
    """Inner functions are not checked: each call of the outer one would compile the check anew."""
    return function if "<locals>" in function.__qualname__ else _check(function)
