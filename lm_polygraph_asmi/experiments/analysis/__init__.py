"""Statistics of experiments, on arrays as those of `lm_polygraph_asmi.analysis`."""

import lazy_loader

# What the stub beside this file names is imported on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
