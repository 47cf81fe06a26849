"""Statistics of heads on arrays, with the conventions of `lm_polygraph_asmi.analysis`."""

from lm_polygraph_asmi.lazy import attach

# Imported on first use.
__getattr__, __dir__, __all__ = attach(__name__, {
    "coupling": "Coupling criticality_coupling high_stratum sharpening",
    "heads": "PermutationNull concentration head_criticality permutation_null",
    "probe": "flip_rates",
})  # fmt: skip
