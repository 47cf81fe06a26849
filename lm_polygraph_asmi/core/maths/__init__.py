"""The formulas of ASMI on plain tensors, without a model, tokenizer or LM-Polygraph.

In the order of the paper's method section: `masks` samples S head masks, the model answers under
each, `support` reduces the next-token distributions, `information` measures their disagreement
MI_t, and `agreement` how alike the tokens are that they choose, and how alike sampled answers are.
Beside this folder, `mask_plan` derives how many masks there are and how often each masks a head,
and `scores` turns all of it into the score of the answer.

Letters of axes: S head masks (subnetworks), T response positions, H query heads, V vocabulary,
K tokens kept per distribution, U tokens in the union of the S kept sets, D width of the output
projection, N sampled responses; p is the probability of masking a head.
The algorithm calls `union_support`, `disagreement` and `agreement_on_support`; the functions of
full distributions, `mutual_information` and `semantic_agreement`, are for other callers.
`counts`: how often each mask was drawn, by default once each; with it, the axis S has only the
distinct masks. Logarithms are natural, entropies in nats.
"""

from lm_polygraph_asmi.core.maths.agreement import (
    agreement_on_support,
    cosines,
    response_diversity,
    semantic_agreement,
)
from lm_polygraph_asmi.core.maths.information import (
    Disagreement,
    disagreement,
    mask_weights,
    mutual_information,
)
from lm_polygraph_asmi.core.maths.masks import example_seed, sample_head_masks
from lm_polygraph_asmi.core.maths.support import (
    UnionSupport,
    most_likely,
    ranked,
    top_k_coverage,
    union_support,
)

__all__ = [
    "Disagreement", "UnionSupport", "agreement_on_support", "cosines",
    "disagreement", "example_seed", "mask_weights", "most_likely", "mutual_information", "ranked",
    "response_diversity", "sample_head_masks", "semantic_agreement", "top_k_coverage",
    "union_support",
]  # fmt: skip
