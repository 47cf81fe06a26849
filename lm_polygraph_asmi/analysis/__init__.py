"""Evidence from a finished run: starts from saved results, never from a model."""

from lm_polygraph_asmi.analysis.prr import PRR, normalised_prr, prr_with_error
from lm_polygraph_asmi.analysis.results import Run, load_run

__all__ = ["PRR", "Run", "load_run", "normalised_prr", "prr_with_error"]
