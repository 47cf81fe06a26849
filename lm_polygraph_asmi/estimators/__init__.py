"""The three estimators and a baseline: one file each, so that a config can name its module."""

from lm_polygraph_asmi.estimators.adapt_asmi import AdaptASMI
from lm_polygraph_asmi.estimators.asmi import ASMI
from lm_polygraph_asmi.estimators.grounded_align_score import GroundedAlignScore
from lm_polygraph_asmi.estimators.sem_asmi import SemASMI

__all__ = ["ASMI", "AdaptASMI", "GroundedAlignScore", "SemASMI"]
