"""Statistics of scores, errors and tokens, on arrays: functions that need no models or files.

Unless said otherwise, arrays are (n,), one finite value an answer. Scores, signals and
uncertainties: higher = more uncertain; quality: higher = better; wrong: correctness labels, 1 or
True = wrong. `answers` is a `Labelled`: labels and clusters, checked once, with the number and seed
of resamples. Functions of several arrays raise ValueError for unequal lengths, no answer, values
that are not finite, and labels other than 0 and 1.

`lm_polygraph_asmi.results` loads finished runs; `lm_polygraph_asmi.report` makes tables and figures
from both.
"""

import lazy_loader

# Names of the stub file are imported on first use: few statistics need scikit-learn and scipy.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
