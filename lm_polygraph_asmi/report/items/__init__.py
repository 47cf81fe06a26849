"""One function per item of the report, and the findings at its top."""

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from types import ModuleType

import numpy as np

from lm_polygraph_asmi.analysis.clusters import FEW, Interval
from lm_polygraph_asmi.analysis.mechanism import OVER_ROBUST, masking_response
from lm_polygraph_asmi.report.item import Items, MissingItem
from lm_polygraph_asmi.report.items.benchmark import (
    benchmark,
    compared_on,
    datasets,
    depths,
    head_to_head,
    intervals_of,
    stability,
)
from lm_polygraph_asmi.report.items.boundary import boundary, coverage, truncation
from lm_polygraph_asmi.report.items.curves import rejection
from lm_polygraph_asmi.report.items.measured import MEASURES
from lm_polygraph_asmi.report.items.mechanism import case_study, cosines, cost, mechanism, screen
from lm_polygraph_asmi.report.items.reproduction import (
    Compared,
    compare,
    reproduced,
    reproduction,
)
from lm_polygraph_asmi.report.items.signal import (
    confident_fragile,
    distinct,
    ensemble_mean,
    flags,
    payoff,
    selector,
)
from lm_polygraph_asmi.results.run_groups import RunGroup, once, one_per_question_set

Make = Callable[[Sequence[RunGroup]], Items]


@once
def _compared(*groups: RunGroup) -> list[Compared]:
    """The paper's numbers beside those of the settings.

    Raises:
        ValueError: the file of the paper's numbers is damaged.
    """
    of_experiments = [module.MEASURES for module in _experiment_modules()]
    measures = {name: m for known in (MEASURES, *of_experiments) for name, m in known.items()}
    return compare(groups, measures)


def papers_numbers(groups: Sequence[RunGroup]) -> Items:
    """Every number of the paper beside the runs', with a verdict."""
    try:
        return reproduction(_compared(*groups), groups)
    except ValueError as error:  # nothing is compared with a damaged file
        return [MissingItem("The paper's numbers", str(error))]


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


def findings(groups: Sequence[RunGroup]) -> list[str]:
    """First lines of the report: how many ASMI scores rank errors, and caveats.

    Order: rows that are missing, the paper's numbers, counts, scores of negative
    PRR, limits of the settings.
    """
    general = [_rank_errors, _negative_prr, _against_best, _weak, _labels, _other_depths]
    first = (_missing_rows, _reproduced)
    return [line for find in (*first, *general) for line in find(groups)]


def _missing_rows(groups: Sequence[RunGroup]) -> list[str]:
    """Rows that were planned and are in no number of this report."""
    return [f"**{group.label}: {note}**" for group in groups for note in group.run.missing_rows]


def _reproduced(groups: Sequence[RunGroup]) -> list[str]:
    try:
        return reproduced(_compared(*groups))
    except ValueError as error:
        return [f"**Nothing was compared with the paper: {error}.**"]


def _scores(groups: Sequence[RunGroup]) -> list[tuple[RunGroup, str, Interval]]:
    """ASMI's scores with their PRR intervals."""
    return [
        (group, method, intervals_of(group)[0][method])
        for group in groups
        for method in group.methods
    ]


def _rank_errors(groups: Sequence[RunGroup]) -> list[str]:
    """How many scores have a PRR interval above 0, and how many below.

    Scores of settings too small for their intervals are inconclusive.
    """
    scores = _scores(groups)
    if not scores:
        return ["These runs have no ASMI score."]
    lines, undefined = [], [f"{m} on {g.label}" for g, m, prr in scores if np.isnan(prr.low)]
    defined = [(group, prr) for group, _, prr in scores if not np.isnan(prr.low)]
    if defined:
        above, below = _count_sides(prr for group, prr in defined if not group.too_small)
        small = sum(group.too_small for group, _ in defined)
        lines.append(
            f"**Rank errors: {above} of {len(defined)} ASMI scores** (PRR interval above 0, "
            f"uncorrected). Negative PRR (interval below 0): {below}. Inconclusive: "
            f"{len(defined) - above - below}"
            + (f", {small} of them because their settings are too small." if small else ".")
        )
    if undefined:
        lines.append(f"**PRR or its interval is undefined: {'; '.join(undefined)}.**")
    return lines


def _count_sides(intervals: Iterable[Interval]) -> tuple[int, int]:
    """How many intervals are above 0, and how many below."""
    intervals = list(intervals)
    return sum(i.low > 0 for i in intervals), sum(i.high < 0 for i in intervals)


def _against_best(groups: Sequence[RunGroup]) -> list[str]:
    """How often the top variant is better or worse than the best baselines."""
    counted, _ = one_per_question_set(groups)
    sentences = []
    for name, baseline in (
        ("top Δ best single-pass", "best single-pass baseline (no samples, no further question)"),
        ("top Δ best baseline", "best of all baselines"),
    ):
        gaps = {
            group: intervals_of(group)[1][compared_on(group)[name]]
            for group in counted
            if name in compared_on(group)
        }
        defined = {group: gap for group, gap in gaps.items() if not np.isnan(gap.low)}
        if defined:
            above, below = _count_sides(g for group, g in defined.items() if not group.too_small)
            small = sum(group.too_small for group in defined)
            worse = [g.label for g, gap in defined.items() if gap.high < 0 and not g.too_small]
            sentences.append(
                f"**Against the {baseline}: better in {above}, worse in {below} of {len(defined)} "
                f"settings**{_in_brackets(worse)}"
                f"{f', {small} of them too small to test' if small else ''}"
            )
    if not sentences:
        return []
    return [
        ". ".join(sentences)
        + ". PRR of the top ASMI variant, paired interval above or below 0, uncorrected. Variant "
        "and baseline are both chosen on these answers."
    ]


def _in_brackets(names: Sequence[str]) -> str:
    return f" ({'; '.join(names)})" if names else ""


def _negative_prr(groups: Sequence[RunGroup]) -> list[str]:
    return [
        f"**Negative PRR: {group.label}.** {method} ranks errors worse than chance: PRR = "
        f"{prr.value:.2f} [{prr.low:.2f}, {prr.high:.2f}]. Do not use it to decide which of "
        "these answers to trust."
        for group, method, prr in _scores(groups)
        if prr.high < 0 and not group.too_small
    ]


def _weak(groups: Sequence[RunGroup]) -> list[str]:
    """Settings too small, without contrast, or with hardly any masking response."""
    lines, small = [], []
    for group in groups:
        clusters, errors = len(set(group.clusters)), int(group.wrong.sum())
        if not errors or errors == len(group):
            lines.append(
                f"**No contrast: {group.label}.** All {len(group)} answers are "
                f"{'wrong' if errors else 'right'} ({group.metric} at 0.5): statistics that need "
                "right and wrong answers are undefined."
            )
        elif group.too_small:
            small.append(
                f"{group.label} ({clusters} clusters, {errors} wrong of {len(group)} answers)"
            )
        if group.mi_tokens is not None:
            response = masking_response(group.mi_tokens)
            if response.over_robust:
                lines.append(
                    f"**Hardly any masking response: {group.label}.** Mean MI_t "
                    f"{response.mean:.4f} nats, median {response.median:.4f}, below {OVER_ROBUST} "
                    "nats: masking barely changes the predictions, so ASMI may have no signal. A "
                    "candidate screen that needs no labels; the paper supports it with one "
                    f"setting.{_first_variant_prr(group)}"
                )
    if small:
        lines.insert(
            0,
            f"**Too small for reliable intervals: {'; '.join(small)}.** {FEW} Intervals are "
            "widened for few clusters, not for few errors.",
        )
    return lines


def _first_variant_prr(group: RunGroup) -> str:
    """PRR of the setting's first operating variant, to compare with the screen."""
    for method in (m for m in group.variants.values() if m in group.scores):
        prr = intervals_of(group)[0][method]
        if not np.isnan(prr.low):
            return f" Here {method} has PRR = {prr}."
    return ""


def _labels(groups: Sequence[RunGroup]) -> list[str]:
    lines = []
    for metric in dict.fromkeys(group.metric for group in groups):
        if not metric.startswith("AlignScore"):
            tested = "; ".join(group.label for group in groups if group.metric == metric)
            lines.append(
                f"**Correctness labels by {metric}, not AlignScore: {tested}.** Do not compare "
                "these values with the paper's."
            )
    return lines


def _other_depths(groups: Sequence[RunGroup]) -> list[str]:
    return [
        f"**Other depth: {group.label}.** {note[0].upper()}{note[1:]}."
        for group in groups
        for note in group.notes
        if note.startswith("read at depth")
    ]
