"""Statistics on arrays: what scores, errors and tokens say. Knows neither models nor files.

Every statistic is a plain function that returns a small result; `lm_polygraph_asmi.results` reads
finished runs, `lm_polygraph_asmi.report` makes tables and figures of both.
"""

import lazy_loader

# What the stub beside this file names is imported on first use: few statistics need all of
# scikit-learn and scipy.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
