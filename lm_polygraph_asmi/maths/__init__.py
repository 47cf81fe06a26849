"""The formulas of ASMI on plain tensors: no model, no tokenizer, no LM-Polygraph.

Axes have one letter each, everywhere: S head masks (subnetworks), T response positions, H query
heads, V vocabulary, K tokens kept per distribution, U tokens in the union of the S kept sets,
D width of the output projection, N sampled responses. All entropies are in nats.
"""

from lm_polygraph_asmi.maths.agreement import agreement_on_support, cosines, semantic_agreement
from lm_polygraph_asmi.maths.gate import adaptive_gate, response_diversity
from lm_polygraph_asmi.maths.information import (
    Disagreement,
    disagreement,
    mask_weights,
    mutual_information,
)
from lm_polygraph_asmi.maths.masks import example_seed, mask_seed, sample_head_masks
from lm_polygraph_asmi.maths.operating_point import OperatingPoint, operating_point
from lm_polygraph_asmi.maths.support import UnionSupport, top_k_coverage, union_support

__all__ = [
    "Disagreement",
    "OperatingPoint",
    "UnionSupport",
    "adaptive_gate",
    "agreement_on_support",
    "cosines",
    "disagreement",
    "example_seed",
    "mask_seed",
    "mask_weights",
    "mutual_information",
    "operating_point",
    "response_diversity",
    "sample_head_masks",
    "semantic_agreement",
    "top_k_coverage",
    "union_support",
]
