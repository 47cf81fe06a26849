"""Attention-path fragility as uncertainty estimators for LM-Polygraph.

ASMI masks attention heads at one layer, scores the same answer under each mask, and measures how
far the resulting next-token distributions disagree.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_polygraph_asmi.estimators import ASMI, AdaptASMI, SemASMI
    from lm_polygraph_asmi.scoring import Reference, Score, score
    from lm_polygraph_asmi.stat_calculators.registration import available_stat_calculators

__version__ = "0.1.0"
__all__ = [
    "ASMI",
    "AdaptASMI",
    "Reference",
    "Score",
    "SemASMI",
    "__version__",
    "available_stat_calculators",
    "score",
]

_HOMES = {
    "Reference": "scoring",
    "Score": "scoring",
    "available_stat_calculators": "stat_calculators.registration",
    "score": "scoring",
}
"""Module of each public name; the estimators' is `estimators`."""


def __getattr__(name: str) -> Any:
    """Load what is asked for, and with it torch and LM-Polygraph, on first use."""
    if name in __all__:
        home = _HOMES.get(name, "estimators")
        return getattr(import_module(f"lm_polygraph_asmi.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
