"""The paper's tables and figures from finished runs: loads results, never a model.

`exhibits` computes one table or figure each with `lm_polygraph_asmi.analysis` from the cells that
`saved.cells` reads, `figures` draws, `writing` turns them into files.
"""

import lazy_loader

from lm_polygraph_asmi.saved.cells import Cell, load_cells

# Imported on first use: a table in a terminal needs no figures.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"exhibit": ["Exhibit", "Gap"], "writing": ["build_report"]}
)
__all__ += ["Cell", "load_cells"]
