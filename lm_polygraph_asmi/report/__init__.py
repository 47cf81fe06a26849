"""The paper's tables and figures from finished runs: loads results, never a model.

`items` has a function for each table or figure, which computes it with `lm_polygraph_asmi.analysis`
from the settings that `results.run_groups` loads. `figures` draws, and `writing` makes files of
both.
"""

from typing import TYPE_CHECKING

from lm_polygraph_asmi.lazy import attach_imports
from lm_polygraph_asmi.results.run_groups import RunGroup, load_run_groups

if TYPE_CHECKING:
    from lm_polygraph_asmi.report.item import MissingItem as MissingItem, ReportItem as ReportItem
    from lm_polygraph_asmi.report.writing import build_report as build_report
else:  # on first use: a table in a terminal needs no figures
    __getattr__, __dir__, __all__ = attach_imports(__name__)
    __all__ += ["RunGroup", "load_run_groups"]
