"""The type checker behind `--jaxtyping-packages`: tensor shapes, and int where a float is due."""

import gc
import sys
from functools import partial, wraps
from typing import Any

import jaxtyping
from beartype import BeartypeConf, beartype

if "pytest" in sys.modules:
    gc.disable()  # until all is imported, see conftest: nothing of it is garbage

_check = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=jaxtyping.TypeCheckError))


def check(function: Any) -> Any:
    """Outside the core, only what has shapes. Other functions may be given anything, which they
    refuse by its name.

    Inner functions are not checked: each call of the outer one would compile the check anew. Nor
    are names in quotes, of classes that are not there yet, or never.
    """
    core, told = function.__module__.startswith("lm_polygraph_asmi.core"), function.__annotations__
    hints = {name: hint for name, hint in told.items() if not isinstance(hint, str)}
    shapes = {name: hint for name, hint in hints.items() if "jaxtyping" in repr(hint)}
    if "<locals>" in function.__qualname__ or not (core or shapes):
        return function
    function.__annotations__ = hints if core or shapes.keys() - {"return"} else shapes
    checked = _check(function)
    function.__annotations__ = told
    return checked


def _decorated(made: Any, typechecker: Any, jaxtyped: Any = jaxtyping.jaxtyped) -> Any:
    """In the place of what the hook decorates with, which binds the arguments of every call,
    checked or not, and checks them twice: a tenth of the time of all tests, or more."""
    if not hasattr(made, "__code__"):
        return jaxtyped(made, typechecker=typechecker)
    checked = check(made)

    @wraps(made)
    def in_context(*arguments: Any, **named: Any) -> Any:
        with jaxtyped("context"):  # in which a letter is one number
            return checked(*arguments, **named)

    return made if checked is made else in_context


jaxtyping.jaxtyped = lambda typechecker: partial(_decorated, typechecker=typechecker)
