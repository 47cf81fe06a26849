"""Attention-path fragility as uncertainty estimators for LM-Polygraph.

ASMI masks attention heads at one layer, scores the same answer under each mask, and measures how
far the resulting next-token distributions disagree.
"""

import lazy_loader

__version__ = "0.1.0"

# What the stub beside this file names is imported on first use, and with it torch or LM-Polygraph.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]
