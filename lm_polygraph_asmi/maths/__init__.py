"""The formulas of ASMI on plain tensors, without a model, tokenizer or LM-Polygraph.

Each axis has one letter throughout: S head masks (subnetworks), T response positions, H query
heads, V vocabulary, K tokens kept per distribution, U tokens in the union of the S kept sets,
D width of the output projection, N sampled responses. All entropies are in nats.
"""

import lazy_loader

# Names in the stub file are imported on first use: p and S need no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
