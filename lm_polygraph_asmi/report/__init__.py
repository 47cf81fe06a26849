"""The paper's tables and figures from finished runs: loads results, never a model.

`report_items` computes one table or figure each with `lm_polygraph_asmi.analysis` from the settings
that `results.run_groups` loads, `figures` draws, `writing` turns them into files.
"""

from lm_polygraph_asmi.lazy import attach
from lm_polygraph_asmi.results.run_groups import RunGroup, load_run_groups

# Imported on first use: a table in a terminal needs no figures.
__getattr__, __dir__, __all__ = attach(
    __name__, {"item": "ReportItem MissingItem", "writing": "build_report"}
)
__all__ += ["RunGroup", "load_run_groups"]
