"""Uncertainty estimators for LM-Polygraph from random masks of attention heads.

ASMI masks attention heads at one layer, scores the same answer under each mask, and measures how
far the resulting next-token distributions disagree.
"""

from lm_polygraph_asmi.lazy import attach

__version__ = "0.4.0"

# Imported on first use: only then torch or LM-Polygraph is imported. The stub has the same names.
__getattr__, __dir__, __all__ = attach(__name__, {
    "config": "ASMIConfig",
    "decisions.calibration": "Calibration",
    "decisions.decider": "Decider decide",
    "decisions.decision": "Decision",
    "estimators": "ASMI AdaptASMI SemASMI",
    "scoring.result": "Score",
    "scoring.scorer": "Scorer score",
    "scoring.output": "score_file",
    "stat_calculators.registration": "available_stat_calculators estimate_uncertainty",
})  # fmt: skip
__all__ += ["__version__"]
