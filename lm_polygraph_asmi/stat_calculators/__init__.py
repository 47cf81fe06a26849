"""Calculators for LM-Polygraph. Each module also has its builder, `load_stat_calculator`."""

from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from lm_polygraph_asmi.stat_calculators.response_diversity import ResponseDiversityCalculator

__all__ = ["MaskedHeadsCalculator", "ResponseDiversityCalculator"]
