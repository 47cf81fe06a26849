"""Attention-path fragility as uncertainty estimators for LM-Polygraph.

ASMI masks attention heads at one layer, scores the same answer under each mask, and measures how
far the resulting next-token distributions disagree.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lm_polygraph_asmi.estimators import ASMI, AdaptASMI, SemASMI

__version__ = "0.1.0"
__all__ = ["ASMI", "AdaptASMI", "SemASMI", "__version__"]


def __getattr__(name: str) -> Any:
    """Load the estimators, and with them torch and LM-Polygraph, on first use."""
    if name in __all__:
        from lm_polygraph_asmi import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
