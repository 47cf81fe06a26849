"""Uncertainty estimators for LM-Polygraph from random masks of attention heads.

ASMI masks attention heads at one layer, scores the same answer under each mask, and measures how
far the resulting next-token distributions disagree.
"""

import lazy_loader

__version__ = "0.2.0"

# Names in the stub file are imported on first use; only then torch or LM-Polygraph is imported.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
