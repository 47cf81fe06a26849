"""Masked groups of inputs of the MLP's down projection are zero."""

from lm_polygraph_asmi.experiments.draws import without_groups
from lm_polygraph_asmi.model.perturbation import MLP, Perturbation

PERTURBATION = Perturbation("mlp", without_groups, MLP)
