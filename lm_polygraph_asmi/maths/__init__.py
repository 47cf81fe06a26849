"""The formulas of ASMI on plain tensors, without a model, tokenizer or LM-Polygraph.

In the order of the paper's method section: `masks` samples S head masks (`operating_point`: how
many, how often a head is masked), the model answers under each, `support` reduces the next-token
distributions, `information` measures their disagreement MI_t, `agreement` how alike the tokens are
that they choose, `gate` how far the answer's paraphrases allow that discount, and `scores` turns
these into u_t and the score of the answer.

Each axis has one letter throughout: S head masks (subnetworks), T response positions, H query
heads, V vocabulary, K tokens kept per distribution, U tokens in the union of the S kept sets,
D width of the output projection, N sampled responses; p is the probability of masking a head.
`counts`: how often each mask was drawn, by default once each. Logarithms are natural, entropies in
nats.
"""

from lm_polygraph_asmi.lazy import attach

# Imported on first use.
__getattr__, __dir__, __all__ = attach(__name__, {
    "agreement": "agreement_on_support cosines semantic_agreement",
    "gate": "adaptive_gate response_diversity",
    "information": "Disagreement disagreement mask_weights mutual_information",
    "mask_plan": (
        "OperatingPoint flops_ratio heads_masked_at_once masks_for_coverage "
        "never_masked_heads operating_point tolerated_heads"
    ),
    "masks": "example_masks example_seed mask_seed sample_head_masks",
    "scores": "aggregate token_scores",
    "support": "UnionSupport most_likely ranked top_k_coverage union_support",
})  # fmt: skip
