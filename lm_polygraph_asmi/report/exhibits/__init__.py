"""One function per item of the report, and what a reader must see first."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.mechanism import OVER_ROBUST, masking_response
from lm_polygraph_asmi.analysis.verdict import MARGIN
from lm_polygraph_asmi.report.exhibit import Items
from lm_polygraph_asmi.report.exhibits.benchmark import (
    adjusted_comparisons,
    benchmark,
    count_outcomes,
    datasets,
    depths,
    head_to_head,
    intervals_of,
    stability,
)
from lm_polygraph_asmi.report.exhibits.boundary import boundary, coverage, truncation
from lm_polygraph_asmi.report.exhibits.claims import head_claims
from lm_polygraph_asmi.report.exhibits.curves import rejection, reliable
from lm_polygraph_asmi.report.exhibits.falsifier import (
    dissociation,
    falsifier,
    falsifier_added,
    falsifier_verdicts,
    reproduced,
)
from lm_polygraph_asmi.report.exhibits.heads import head_concentration, head_coupling, head_errors
from lm_polygraph_asmi.report.exhibits.judge import audit, judges, length, noise
from lm_polygraph_asmi.report.exhibits.mechanism import case_study, cosines, cost, mechanism, screen
from lm_polygraph_asmi.report.exhibits.probe import causal_differences, causal_probe
from lm_polygraph_asmi.report.exhibits.signal import (
    confident_fragile,
    distinct,
    ensemble_mean,
    flags,
    payoff,
    selector,
    stacked,
    verdicts_of,
)
from lm_polygraph_asmi.report.exhibits.sources import sources
from lm_polygraph_asmi.saved.cells import (
    FEW,
    Cell,
    one_per_question_set,
)

EXHIBITS: tuple[Callable[[Sequence[Cell]], Items], ...] = (
    benchmark, datasets, head_to_head, depths, screen, distinct, stacked, ensemble_mean,
    flags, confident_fragile, payoff, selector, rejection, reliable, boundary, truncation,
    coverage, stability, sources, mechanism, cosines, case_study, head_claims,
    head_concentration, head_coupling, head_errors, causal_probe, causal_differences,
    falsifier_verdicts, falsifier, falsifier_added, dissociation,
    judges, noise, length, audit, cost,
)  # fmt: skip
"""In the order of the report; each returns tables and figures, or why there are none."""


def findings(cells: Sequence[Cell]) -> list[str]:
    """First lines of the report: whether any ASMI score is known to rank errors, and what misleads.

    Before all, grounded cells whose signal something else than heads reproduces; counts, then
    scores that rank errors the wrong way, then what weakens the rest.
    """
    parts = (reproduced, _known, _wrong_way, _against_best, _added, _weak, _judges, _others)
    return [line for part in parts for line in part(cells)]


def _scores(cells: Sequence[Cell]) -> list[tuple[Cell, str, Interval]]:
    """ASMI's scores with their PRR intervals."""
    return [
        (cell, method, intervals_of(cell)[0][method]) for cell in cells for method in cell.methods
    ]


def _known(cells: Sequence[Cell]) -> list[str]:
    """How many scores are known to rank errors, and how many to rank them the wrong way.

    Cells too small for their intervals leave theirs undecided, whatever the intervals say.
    """
    scores = _scores(cells)
    if not scores:
        return ["These runs hold no ASMI score."]
    said, undefined = [], [f"{m} on {c.label}" for c, m, found in scores if np.isnan(found.low)]
    defined = [(cell, found) for cell, _, found in scores if not np.isnan(found.low)]
    if defined:
        above, below = _sides(found for cell, found in defined if not cell.too_small)
        few = [found for cell, found in defined if cell.too_small]
        by_themselves = ", ".join(
            f"{n} {side}" for n, side in zip(_sides(few), ("above", "below"), strict=True)
        )
        said.append(
            f"**Known to rank errors here: {above} of {len(defined)} ASMI scores** (PRR interval "
            f"above zero, each by itself). Wrong way round (interval below zero): {below}. "
            f"Undecided: {len(defined) - above - below}"
            + (
                f", of which {len(few)} because their cells are too small (intervals by "
                f"themselves: {by_themselves} zero)."
                if few
                else "."
            )
        )
    if undefined:
        said.append(
            f"**Nothing to say of {'; '.join(undefined)}**: PRR or its interval is undefined."
        )
    return said


def _sides(found: Iterable[Interval]) -> tuple[int, int]:
    """How many intervals lie above zero, and how many below it."""
    every = list(found)
    return sum(i.low > 0 for i in every), sum(i.high < 0 for i in every)


def _against_best(cells: Sequence[Cell]) -> list[str]:
    """How often the top variant is better, equivalent or worse than the best of the others."""
    counted, _ = one_per_question_set(cells)
    adjusted = adjusted_comparisons(cells)
    said = []
    for name, which in (
        ("top Δ best free", "best free baseline (no samples, no further question)"),
        ("top Δ best baseline", "best of all baselines"),
    ):
        own = {cell: one for cell, one in adjusted.get(name, {}).items() if cell in counted}
        if own:
            small = sum(cell.too_small for cell in own)
            counts = count_outcomes(own.values())
            counted_as = ", ".join(f"{kind} in {n}" for kind, n in counts.items())
            worse = [cell.label for cell, one in own.items() if one.outcome == "worse"]
            said.append(
                f"**Against the {which}: {counted_as} of {len(own)} cells**{_in_brackets(worse)}"
                f"{f', {small} undecided because too small' if small else ''}"
            )
    if not said:
        return []
    return [
        ". ".join(said)
        + f". PRR of the top ASMI variant, adjusted p; equivalent: within {MARGIN}. "
        "Both sides are the best on these very answers."
    ]


def _added(cells: Sequence[Cell]) -> list[str]:
    """In how many cells the signal adds to what is free."""
    verdicts = verdicts_of(cells)
    if not verdicts:
        return []
    adds, reverses = (
        [cell.label for cell, found in verdicts.items() if found == said]
        for said in ("yes", "wrong way round")
    )
    scored = {cell for cell, _, _ in _scores(cells)}
    untested = len(scored - {*verdicts})
    small = sum(cell.too_small for cell in verdicts)
    besides = [f"{untested} more could not be tested"] if untested else []
    besides += [f"{small} of those tested are too small to find much"] if small else []
    return [
        f"**Adds to MSP, entropy and length: u_sem in {len(adds)} of {len(verdicts)} "
        f"cells**{_in_brackets(adds)}, the wrong way round in {len(reverses)}"
        f"{_in_brackets(reverses)} (generalised covariance, 5 % over all cells; u_sem is that of "
        f"Sem-ASMI{''.join(f'; {one}' for one in besides)})."
    ]


def _in_brackets(names: Sequence[str]) -> str:
    return f" ({'; '.join(names)})" if names else ""


def _wrong_way(cells: Sequence[Cell]) -> list[str]:
    return [
        f"**Wrong way round: {cell.label}.** {method} ranks errors the wrong way: PRR "
        f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]. Do not use it to decide which of "
        "these answers to trust."
        for cell, method, found in _scores(cells)
        if found.high < 0 and not cell.too_small
    ]


def _weak(cells: Sequence[Cell]) -> list[str]:
    """Cells too small, without contrast, or that masking hardly moves."""
    said, small = [], []
    for cell in cells:
        clusters, errors = len(set(cell.clusters)), int(cell.wrong.sum())
        if not errors or errors == len(cell):
            said.append(
                f"**No contrast: {cell.label}.** All {len(cell)} answers are "
                f"{'wrong' if errors else 'right'} ({cell.metric} at 0.5): what needs right and "
                "wrong answers is undefined."
            )
        elif cell.too_small:
            small.append(
                f"**Too small to trust its intervals: {cell.label}.** {clusters} clusters, "
                f"{errors} wrong of {len(cell)} answers."
            )
        if cell.mi_tokens is not None:
            response = masking_response(cell.mi_tokens)
            if response.over_robust:
                said.append(
                    f"**Hardly any masking response: {cell.label}.** Mean MI_t "
                    f"{response.mean:.4f} nats, median {response.median:.4f}, below "
                    f"{OVER_ROBUST} nats: masking barely moves this model here, so ASMI may have "
                    "nothing to read. A candidate screen, needing no labels; the paper supports "
                    f"it with one cell.{_ranked_here(cell)}"
                )
    if small:
        small[-1] += f" {FEW} They are widened for few clusters, not for few errors."
    return [*small, *said]


def _ranked_here(cell: Cell) -> str:
    """What the screen is held against: how the cell's first operating variant ranks errors."""
    for method in (m for m in cell.variants.values() if m in cell.scores):
        found = intervals_of(cell)[0][method]
        if not np.isnan(found.low):
            return f" Here {method} has a PRR of {found}."
    return ""


def _judges(cells: Sequence[Cell]) -> list[str]:
    said = []
    for metric in dict.fromkeys(cell.metric for cell in cells):
        if not metric.startswith("AlignScore"):
            judged = "; ".join(cell.label for cell in cells if cell.metric == metric)
            said.append(
                f"**Judged by {metric}, not by AlignScore: {judged}.** Never compare these figures "
                "with the paper's."
            )
    return said


def _others(cells: Sequence[Cell]) -> list[str]:
    return [
        f"**Other depth: {cell.label}.** {note[0].upper()}{note[1:]}."
        for cell in cells
        for note in cell.notes
        if note.startswith("read at depth")
    ]
