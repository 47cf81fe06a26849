"""One function per item of the report."""

from collections.abc import Callable, Sequence
from importlib import import_module

from lm_polygraph_asmi.report.item import Items
from lm_polygraph_asmi.report.items.benchmark import (
    benchmark,
    datasets,
    depths,
    head_to_head,
    minus_msp,
    stability,
)
from lm_polygraph_asmi.report.items.boundary import boundary, coverage, truncation
from lm_polygraph_asmi.report.items.mechanism import cosines, cost, mechanism, screen
from lm_polygraph_asmi.report.items.signal import (
    aurc,
    by_regime,
    confident_fragile,
    distinct,
    ensemble_mean,
    flags,
    payoff,
    selector,
)
from lm_polygraph_asmi.results.run_groups import RunGroup

Make = Callable[[Sequence[RunGroup]], Items]
PAGE: tuple[Make, ...] = (benchmark, minus_msp)
"""Items of every report."""
MAIN: tuple[Make, ...] = (
    mechanism, cosines, datasets, cost, confident_fragile, by_regime, payoff, coverage, truncation,
    boundary, distinct, ensemble_mean, flags, aurc, selector,
)  # fmt: skip
"""Items of the paper, in its order, up to the analysis of heads."""
LAST: tuple[Make, ...] = (depths, screen, head_to_head, stability)
"""Items of the paper after the analysis of heads."""


def every_report_item() -> list[Make]:
    """Functions that make the items of a full report, in its order.

    Each returns items, or `MissingItem` with the reason why data are missing.
    """
    # Imported here to avoid a cycle, since the module imports this package.
    return [*PAGE, *MAIN, *import_module("lm_polygraph_asmi.heads.items").REPORT_ITEMS, *LAST]
