"""The paper's tables and figures from finished runs: loads results, never a model.

`cells` reads runs, `exhibits` computes one table or figure each with `lm_polygraph_asmi.analysis`,
`figures` draws, `writing` turns them into files.
"""

from lm_polygraph_asmi.report.exhibit import Exhibit, Gap
from lm_polygraph_asmi.report.writing import build_report
from lm_polygraph_asmi.saved.cells import Cell, load_cells

__all__ = ["Cell", "Exhibit", "Gap", "build_report", "load_cells"]
