"""The three ASMI estimators, one file each, so that configs can name the module.

The examples use these statistics of one answer of two tokens, as the calculators return them:

>>> import numpy as np
>>> from lm_polygraph_asmi.config import ASMIConfig
>>> settings = ASMIConfig(num_masks=50, mask_rate=0.2).to_dict() | {"num_heads": 9}
>>> mi = np.array([0.4, 0.2])  # nats
>>> stats = {
...     "asmi": [{0.6: {"mi": mi, "agreement": np.array([0.5, 1.0]), "settings": settings}}],
...     "asmi_diversity_second_last": [0.3],
...     "asmi_closing": [True],
... }
"""

from lm_polygraph_asmi.estimators.adapt_asmi import AdaptASMI
from lm_polygraph_asmi.estimators.asmi import ASMI
from lm_polygraph_asmi.estimators.sem_asmi import SemASMI

__all__ = ["ASMI", "AdaptASMI", "SemASMI"]
