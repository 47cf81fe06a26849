"""Uncertainty estimators for LM-Polygraph from random masks of attention heads.

ASMI masks attention heads at one layer, scores the same answer under each mask, and measures how
far the resulting next-token distributions disagree.
"""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.lazy import attach_imports

__version__ = "0.4.0"

if TYPE_CHECKING:
    from lm_polygraph_asmi.config import ASMIConfig as ASMIConfig
    from lm_polygraph_asmi.decisions.calibration import Calibration as Calibration
    from lm_polygraph_asmi.decisions.decider import Decider as Decider, decide as decide
    from lm_polygraph_asmi.decisions.decision import Decision as Decision
    from lm_polygraph_asmi.estimators import (
        ASMI as ASMI,
        AdaptASMI as AdaptASMI,
        SemASMI as SemASMI,
    )
    from lm_polygraph_asmi.scoring.output import score_file as score_file
    from lm_polygraph_asmi.scoring.result import Score as Score
    from lm_polygraph_asmi.scoring.scorer import Scorer as Scorer, score as score
    from lm_polygraph_asmi.stat_calculators.registration import (
        available_stat_calculators as available_stat_calculators,
        estimate_uncertainty as estimate_uncertainty,
    )
else:  # torch and LM-Polygraph are imported only when a name is used
    __getattr__, __dir__, __all__ = attach_imports(__name__)
    __all__ += ["__version__"]
