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
from lm_polygraph_asmi.maths.operating_point import (
    OperatingPoint,
    heads_masked_at_once,
    mask_rates,
    masks_for_coverage,
    masks_for_pair_coverage,
    never_masked_heads,
    operating_point,
    tolerated_heads,
)
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
    "heads_masked_at_once",
    "mask_rates",
    "mask_seed",
    "mask_weights",
    "masks_for_coverage",
    "masks_for_pair_coverage",
    "mutual_information",
    "never_masked_heads",
    "operating_point",
    "response_diversity",
    "sample_head_masks",
    "semantic_agreement",
    "tolerated_heads",
    "top_k_coverage",
    "union_support",
]
