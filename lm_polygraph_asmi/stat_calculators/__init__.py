"""Calculators for LM-Polygraph; each module is also its builder (`load_stat_calculator`)."""

from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from lm_polygraph_asmi.stat_calculators.response_diversity import ResponseDiversityCalculator

__all__ = ["MaskedHeadsCalculator", "ResponseDiversityCalculator"]
