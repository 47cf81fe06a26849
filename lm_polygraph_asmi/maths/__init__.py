"""The formulas of ASMI on plain tensors: no model, no tokenizer, no LM-Polygraph.

Axes have one letter each, everywhere: S head masks (subnetworks), T response positions, H query
heads, V vocabulary, K tokens kept per distribution, U tokens in the union of the S kept sets,
D width of the output projection, N sampled responses. All entropies are in nats.
"""

import lazy_loader

# What the stub beside this file names is imported on first use: p and S need no torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
