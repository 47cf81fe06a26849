"""One function per item of the report."""

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

from lm_polygraph_asmi.report.item import Items
from lm_polygraph_asmi.report.items.benchmark import (
    benchmark,
    datasets,
    depths,
    head_to_head,
    stability,
)
from lm_polygraph_asmi.report.items.boundary import boundary, coverage, truncation
from lm_polygraph_asmi.report.items.curves import rejection
from lm_polygraph_asmi.report.items.measured import MEASURES
from lm_polygraph_asmi.report.items.mechanism import case_study, cosines, cost, mechanism, screen
from lm_polygraph_asmi.report.items.reproduction import compare
from lm_polygraph_asmi.report.items.signal import (
    confident_fragile,
    distinct,
    ensemble_mean,
    flags,
    payoff,
    selector,
)
from lm_polygraph_asmi.results.run_groups import RunGroup

Make = Callable[[Sequence[RunGroup]], Items]


def papers_numbers(groups: Sequence[RunGroup]) -> Items:
    """Every number of the paper beside the runs'."""
    of_experiments = [module.MEASURES for module in _experiment_modules()]
    measures = {name: m for known in (MEASURES, *of_experiments) for name, m in known.items()}
    return compare(groups, measures)


REPORT_ITEMS: tuple[Make, ...] = (
    papers_numbers, benchmark, datasets, head_to_head, depths, screen, distinct,
    ensemble_mean, flags, confident_fragile, payoff, selector, rejection, boundary,
    truncation, coverage, stability, mechanism, cosines, case_study, cost,
)  # fmt: skip
"""In the order of the report; each returns tables and figures, or the reason for none."""
MORE = ("lm_polygraph_asmi.experiments.items",)
"""Modules whose `REPORT_ITEMS` follow these."""


def _experiment_modules() -> list[ModuleType]:
    return [import_module(name) for name in MORE]


def every_report_item() -> list[Make]:
    """All functions whose items make up the report."""
    return [
        *REPORT_ITEMS,
        *(make for module in _experiment_modules() for make in module.REPORT_ITEMS),
    ]
