"""Make the paper's tables and figures from finished runs. No model is loaded.

`items` has one function for each table or figure, which computes it with
`lm_polygraph_asmi.analysis` from the settings that `results.run_groups` loads. `figures` draws
figures, and `writing` writes the files.
"""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.lazy import attach_imports

if TYPE_CHECKING:
    from lm_polygraph_asmi.report.item import MissingItem as MissingItem, ReportItem as ReportItem
    from lm_polygraph_asmi.report.writing import build_report as build_report
    from lm_polygraph_asmi.results.run_groups import (
        RunGroup as RunGroup,
        load_run_groups as load_run_groups,
    )
else:  # on first use: a table in a terminal needs no figures
    __getattr__, __dir__, __all__ = attach_imports(__name__)
