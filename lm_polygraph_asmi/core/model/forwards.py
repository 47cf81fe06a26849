"""Forward methods of modules, replaced for a while and for one thread.

No hook is registered: other threads may call the model meanwhile, and get what they get alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import get_ident
from typing import Any

import torch
from torch import nn

from lm_polygraph_asmi.core.model.state import changes

Forward = Callable[..., Any]
Replacement = tuple[nn.Module, Forward]


@contextmanager
def replaced_forwards(*replacements: Replacement) -> Iterator[None]:
    """Replace forward methods of modules in this thread; hooks of the modules still run.

    Each new one is called with the old one and the arguments; other threads get the old one. Of two
    for one module, the later is called with the earlier one.
    """
    with changes() as undo:
        for module, forward in replacements:
            # None: the module has only its class's method, not one that accelerate or an outer
            # replacement has set.
            undo.append(partial(_restore, module, vars(module).get("forward")))
            module.forward = partial(_in_thread, get_ident(), forward, module.forward)
        yield


def _restore(module: nn.Module, previous: Forward | None) -> None:
    if previous is None:
        vars(module).pop("forward", None)
    else:
        module.forward = previous


def _in_thread(owner: int, forward: Forward, real: Forward, *args: Any, **kwargs: Any) -> Any:
    return forward(real, *args, **kwargs) if get_ident() == owner else real(*args, **kwargs)


@cache
def compiled_forward(forward: Forward) -> Forward:
    """One for all layers of a class: shapes are dynamic, weights are arguments."""
    return torch.compile(forward, dynamic=True)
