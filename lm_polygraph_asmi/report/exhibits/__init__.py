"""One function per item of the report, and what a reader must see first."""

from collections.abc import Callable, Sequence

from lm_polygraph_asmi.report.exhibit import Items
from lm_polygraph_asmi.report.exhibits.benchmark import (
    benchmark,
    datasets,
    depths,
    head_to_head,
    intervals_of,
    stability,
)
from lm_polygraph_asmi.report.exhibits.boundary import boundary, coverage, truncation
from lm_polygraph_asmi.report.exhibits.mechanism import case_study, cosines, cost, mechanism, screen
from lm_polygraph_asmi.report.exhibits.signal import (
    confident_fragile,
    distinct,
    ensemble_mean,
    flags,
    payoff,
    selector,
)
from lm_polygraph_asmi.saved.cells import Cell, variant

EXHIBITS: tuple[Callable[[Sequence[Cell]], Items], ...] = (
    benchmark, datasets, head_to_head, depths, screen, distinct, ensemble_mean, flags,
    confident_fragile, payoff, selector, boundary, truncation, coverage, stability, mechanism,
    cosines, case_study, cost,
)  # fmt: skip
"""In the order of the report; each returns tables and figures, or why there are none."""


def findings(cells: Sequence[Cell]) -> list[str]:
    """First lines of the report: where the signal ranks errors the wrong way, or cannot rank."""
    from lm_polygraph_asmi.analysis.mechanism import OVER_ROBUST, masking_response

    said = []
    for metric in dict.fromkeys(cell.metric for cell in cells):
        if not metric.startswith("AlignScore"):
            judged = "; ".join(cell.label for cell in cells if cell.metric == metric)
            said.append(
                f"**Judged by {metric}, not by AlignScore: {judged}.** Never compare these figures "
                "with the paper's."
            )
    checked, undefined = 0, []
    for cell in cells:
        for method in filter(variant, cell.scores):
            found = intervals_of(cell)[0][method]
            checked += bool(found.low == found.low)
            if found.low != found.low:
                undefined.append(f"{method} on {cell.label}")
            if found.high < 0:
                said.append(
                    f"**Wrong way round: {cell.label}.** {method} ranks errors the wrong way: PRR "
                    f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]. Do not use it to "
                    "decide which of these answers to trust."
                )
        if cell.mi_tokens is not None:
            response = masking_response(cell.mi_tokens)
            if response.over_robust:
                said.append(
                    f"**Hardly any masking response: {cell.label}.** Mean MI_t "
                    f"{response.mean:.4f} nats, median {response.median:.4f}, below "
                    f"{OVER_ROBUST} nats: masking barely moves this model here, so ASMI may have "
                    "nothing to read. A candidate screen, needing no labels; the paper supports "
                    "it with one cell."
                )
        if cell.wrong.all() or not cell.wrong.any():
            kind = "wrong" if cell.wrong.all() else "right"
            said.append(
                f"**No contrast: {cell.label}.** All {len(cell)} answers are {kind} "
                f"({cell.metric} at 0.5): what needs right and wrong answers is undefined."
            )
    if checked and not any("Wrong way round" in line for line in said):
        said.append(f"Of {checked} ASMI scores, none has a PRR interval below zero.")
    if undefined:
        said.append(
            f"**Nothing to say of {'; '.join(undefined)}**: PRR or its interval is undefined."
        )
    if not checked and not undefined:
        said.append("These runs hold no ASMI score.")
    said += [
        f"**Other depth: {cell.label}.** {note[0].upper()}{note[1:]}."
        for cell in cells
        for note in cell.notes
        if note.startswith("read at depth")
    ]
    # What would mislead comes first.
    return sorted(said, key=lambda line: "Wrong way round" not in line)
