"""The perturbation controls: what masks change instead of heads. One file each.

A file defines `PERTURBATION`, a `Perturbation` with the name of the file. Its `edit` fulfils the
contract `model.perturbation.Edit`; draws are those of `experiments.draws`. A config names this
module as `asmi.perturbation_builder`, or another one with `load_perturbation` and, for scales,
`matched_scale`.
"""

from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from lm_polygraph_asmi.experiments.scales import matched_scale
from lm_polygraph_asmi.model.perturbation import WITHOUT_HEADS, Perturbation
from lm_polygraph_asmi.validation import check_one_of

__all__ = ["NAMES", "load_perturbation", "matched_scale"]

NAMES = (WITHOUT_HEADS.name, *sorted(file.name for file in iter_modules(__path__)))
"""ASMI's own, then the controls."""


def load_perturbation(name: str, scale: float | None = None, seed: int = 0) -> Perturbation:
    """A perturbation by its name, of `NAMES`.

    Args:
        scale: factor of the change of the layer's output; None: 1.
        seed: base seed of its draws; an engine uses its own.

    Example:
        >>> load_perturbation("mlp", 1.5).kind
        ('mlp', 'False', 'without_groups')
    """
    check_one_of("perturbation", name, NAMES)
    if name == WITHOUT_HEADS.name:
        return replace(WITHOUT_HEADS, scale=scale, seed=seed)
    control: Perturbation = import_module(f"{__name__}.{name}").PERTURBATION
    return replace(control, scale=scale, seed=seed)
