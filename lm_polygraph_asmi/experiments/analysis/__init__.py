"""Statistics of experiments on arrays, with the conventions of `lm_polygraph_asmi.analysis`.

`resamples` is the number of bootstrap resamples of clusters or units, `seed` that of their draws.
"""

import lazy_loader

# Names of the stub file are imported on first use.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
