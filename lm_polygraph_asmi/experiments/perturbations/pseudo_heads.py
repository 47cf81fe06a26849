"""Pseudo-heads: as many inputs of the output projection as a head has, grouped across heads."""

from lm_polygraph_asmi.experiments.draws import without_groups
from lm_polygraph_asmi.model.perturbation import HEADS, Perturbation

PERTURBATION = Perturbation("pseudo_heads", without_groups, HEADS)
