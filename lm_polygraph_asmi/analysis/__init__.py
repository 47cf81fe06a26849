"""Statistics of scores, errors and tokens, on arrays: functions that need no models or files.

`lm_polygraph_asmi.results` loads finished runs; `lm_polygraph_asmi.report` makes tables and figures
from both.
"""

import lazy_loader

# Names of the stub file are imported on first use: few statistics need scikit-learn and scipy.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
