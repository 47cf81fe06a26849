"""Statistics of heads on arrays, with the conventions of `lm_polygraph_asmi.analysis`."""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.lazy import attach_imports

# ruff: noqa: F401 (names for others)

if TYPE_CHECKING:
    from lm_polygraph_asmi.heads.analysis.coupling import (
        Coupling,
        criticality_coupling,
        high_stratum,
        sharpening,
    )
    from lm_polygraph_asmi.heads.analysis.heads import (
        PermutationNull,
        concentration,
        head_criticality,
        permutation_null,
    )
    from lm_polygraph_asmi.heads.analysis.probe import flip_rates
else:  # on first use
    __getattr__, __dir__, __all__ = attach_imports(__name__)
