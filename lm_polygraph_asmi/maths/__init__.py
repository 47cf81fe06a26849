"""The formulas of ASMI on plain tensors, without a model, tokenizer or LM-Polygraph.

In the order of the paper's method section: `masks` samples S head masks (`operating_point`: how
many, how often a head is masked), the model answers under each, `support` reduces the next-token
distributions, `information` measures their disagreement MI_t, `agreement` how alike the tokens are
that they choose, `gate` how far the answer's paraphrases allow that discount, and `scores` turns
these into u_t and the score of the answer.

Each axis has one letter throughout: S head masks (subnetworks), T response positions, H query
heads, V vocabulary, K tokens kept per distribution, U tokens in the union of the S kept sets,
D width of the output projection, N sampled responses. All entropies are in nats.
"""

import lazy_loader

# Names in the stub file are imported on first use: p and S need no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
