"""One answer, scored by a call: no benchmark runner, no NLI model, nothing downloaded."""

import lazy_loader

# What the stub beside this file names is imported on first use: the engine needs no pages.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
