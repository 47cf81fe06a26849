"""Whether code of others in a model acts on each position alike, as norms and activations do.

Kernels of transformers (`use_kernels=True`), Liger kernels and hooks replace what modules compute.
Fast passes run the same positions at other places and in other rows. So what a module inside the
base model computes for a position must not depend on its place or row. This is tried here; then the
self-check compares fast passes with full ones, as for any model.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lm_polygraph_asmi.core.model.forwards import Forward, replaced_forwards
from lm_polygraph_asmi.core.model.masked import MaskedModel
from lm_polygraph_asmi.core.model.rounding import MODULE
from lm_polygraph_asmi.core.model.state import foreign_modules
from lm_polygraph_asmi.core.model.structure import TOKENS, ordinary_tokens

TIMES = 64
"""So many times a short text is repeated: a module that depends on the place gives itself away."""


def depends_on_place(f: MaskedModel) -> list[str]:
    """Paths of modules with code of others that does not act on each position and row alike."""
    key, inside = "depends on place", f"{f.structure.base_model}."
    if key not in f.kept:
        modules = {
            path: f.model.get_submodule(path)
            for path in foreign_modules(f.model)
            if f"{path}.".startswith(inside)
        }
        calls: dict[str, tuple[Any, Any]] = {}

        def watch(path: str, real: Forward, *args: Any, **kwargs: Any) -> Any:
            calls.setdefault(path, (args, kwargs))
            return real(*args, **kwargs)

        if modules:
            with replaced_forwards(*((own, partial(watch, at)) for at, own in modules.items())):
                f.base(input_ids=ordinary_tokens(f.model), use_cache=False)
        most = MODULE.of(f.model)
        f.kept[key] = [at for at in calls if not _acts_alike(modules[at], *calls[at], most)]
    return f.kept[key]


def _acts_alike(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], most: float
) -> bool:
    """Whether a text that is repeated, in two rows, gives what the text gives, repeated."""
    repeated = _repeated(args), _repeated(kwargs)  # before a module writes into what it gets
    try:
        once, often = module(*args, **kwargs), module(*repeated[0], **repeated[1])
        pairs = list(zip(tree_leaves(_repeated(once)), tree_leaves(often), strict=True))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # of a module that takes one length alone, or returns a tensor for each row
        return False
    return all(_close(one, other, most) for one, other in pairs if isinstance(one, Tensor))


def _repeated(parts: Any) -> Any:
    def repeat(tensor: Tensor) -> Tensor:
        # The axis of tokens is told by its unusual length.
        times = [TIMES if size == TOKENS else 1 for size in tensor.shape]
        has_rows = tensor.shape[:1] == (1,)  # the text is one row
        return tensor.repeat([2, *times[1:]] if has_rows else times)

    return tree_map_only(Tensor, repeat, parts)


def _close(one: Tensor, other: Tensor, most: float) -> bool:
    if one.shape != other.shape:
        return False
    difference = (one.double() - other.double()).norm(dim=-1)
    return bool((difference <= most * one.double().norm(dim=-1)).all())
