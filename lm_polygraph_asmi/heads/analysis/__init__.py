"""Statistics of heads on arrays, with the conventions of `lm_polygraph_asmi.analysis`."""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.lazy import attach_imports

if TYPE_CHECKING:
    from lm_polygraph_asmi.heads.analysis.coupling import (
        Coupling as Coupling,
        criticality_coupling as criticality_coupling,
        high_stratum as high_stratum,
        sharpening as sharpening,
    )
    from lm_polygraph_asmi.heads.analysis.heads import (
        PermutationNull as PermutationNull,
        concentration as concentration,
        head_criticality as head_criticality,
        permutation_null as permutation_null,
    )
    from lm_polygraph_asmi.heads.analysis.probe import flip_rates as flip_rates
else:  # on first use
    __getattr__, __dir__, __all__ = attach_imports(__name__)
