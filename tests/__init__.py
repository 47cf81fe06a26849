"""The type checker behind `--jaxtyping-packages`: tensor shapes, and int where a float is due."""

import gc
import sys

from beartype import BeartypeConf, beartype

if "pytest" in sys.modules:
    gc.disable()  # until all is imported, see conftest: nothing of it is garbage

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
