"""Statistics of experiments on arrays, as in `lm_polygraph_asmi.analysis`."""

import lazy_loader

# Names of the stub file are imported on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
