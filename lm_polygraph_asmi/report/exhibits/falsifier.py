"""Is it the heads? Perturbations of something else on the same answers, and the verdict.

The paper names the test and does not run it: everything here is an addition to it.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis.added import adds_information
from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.distinct import distinct_signal
from lm_polygraph_asmi.analysis.falsifier import (
    MUST_BEAT,
    ArmComparison,
    Verdict,
    arm_comparisons,
    corrected_correlation,
    double_dissociation,
    verdicts,
)
from lm_polygraph_asmi.analysis.redraws import rank_correlation
from lm_polygraph_asmi.analysis.verdict import MARGIN, holm
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.exhibit import Items, frame
from lm_polygraph_asmi.report.exhibits.boundary import twins
from lm_polygraph_asmi.report.exhibits.signal import verdict
from lm_polygraph_asmi.saved.cells import ArmRun, Cell, Unavailable, pairs_of_rows

SCORES = ("Sem-ASMI", "ASMI")
OTHERWISE = "no run perturbed anything but heads: needs asmi_falsifier"


class Compared(NamedTuple):
    """One score of heads, and that of every arm with the same masks and settings.

    Attributes:
        cell: whose answers.
        symbol: "ASMI" or "Sem-ASMI".
        heads: name of the method.
        arms: what tells the arms apart, such as "mlp" or "mlp, half the dose" -> arm.
    """

    cell: Cell
    symbol: str
    heads: str
    arms: dict[str, ArmRun]

    @property
    def label(self) -> str:
        return self.cell.label

    @property
    def matched(self) -> dict[str, ArmRun]:
        """Arms at matched effect, by what they perturb: those of the verdict."""
        return {a.arm: a for a in self.arms.values() if a.matching == "effect" and a.times == 1}

    def score(self, arm: ArmRun) -> np.ndarray:
        return self.cell.arm_score(arm, self.symbol)


def _name(arm: ArmRun) -> str:
    """What an arm is called in a table."""
    if arm.matching is None:
        return arm.arm if arm.dose is None else f"{arm.arm}, dose {arm.dose:.3g}"
    times = "" if arm.times == 1 else f", {arm.times:g} times"
    return f"{arm.arm}, by {arm.matching}{times}"


@cache
def comparable(cell: Cell) -> list[Compared]:
    """What can be compared on a cell: the first draw of each arm, beside heads with its masks."""
    found: dict[tuple[str, str], dict[str, ArmRun]] = {}
    for symbol in SCORES:
        for arm in cell.arms:
            try:
                heads = cell.counterpart(arm, symbol)
                cell.arm_score(arm, symbol)
            except Unavailable:
                continue
            found.setdefault((symbol, heads), {}).setdefault(_name(arm), arm)
    # Of several draws of the masks, that with the most arms; the others are its redraws.
    most: dict[str, Compared] = {}
    for (symbol, heads), arms in found.items():
        if symbol not in most or len(arms) > len(most[symbol].arms):
            most[symbol] = Compared(cell, symbol, heads, arms)
    return list(most.values())


def _all(cells: Sequence[Cell]) -> Iterator[Compared]:
    for cell in cells:
        yield from comparable(cell)


@cache
def _compared(cell: Cell, symbol: str) -> dict[str, ArmComparison]:
    """Every arm against heads; see `arm_comparisons`."""
    (found,) = (one for one in comparable(cell) if one.symbol == symbol)
    scores = {name: found.score(arm) for name, arm in found.arms.items()}
    return arm_comparisons(cell.score(found.heads), scores, cell.quality, cell.clusters)


def prr_of_heads(one: Compared) -> Interval:
    """PRR of the score under masked heads; where it holds zero there is little to reproduce."""
    return next(iter(_compared(one.cell, one.symbol).values())).heads


def verdicts_on(cells: Sequence[Cell]) -> list[tuple[Compared, Verdict]]:
    """The verdict on every cell with arms at matched effect, Holm over the cells of a score."""
    said = []
    for symbol in SCORES:
        found, comparisons = [], []
        for one in _all(cells):
            if one.symbol != symbol or not one.matched:
                continue
            try:
                by_name = _compared(one.cell, symbol)
            except ValueError:
                continue
            found.append(one)
            comparisons.append({name: by_name[_name(arm)] for name, arm in one.matched.items()})
        said += list(zip(found, verdicts(comparisons), strict=True))
    return said


def _counted(table: pd.DataFrame) -> pd.DataFrame:
    """Numbers of questions as whole numbers, though some are missing."""
    names = [name for name in table if str(name).startswith("questions")]
    return table.astype(dict.fromkeys(names, "Int64"))


def falsifier_verdicts(cells: Sequence[Cell]) -> Items:
    """special, reproduced or undecided, by the rule that was fixed beforehand."""
    title = "Is it the heads? The verdict†"
    said = {(one.cell, one.symbol): found for one, found in verdicts_on(cells)}

    def compute(one: Compared) -> list[dict[str, Any]]:
        if not one.matched:
            raise Unavailable("no arm at matched effect: needs doses (polygraph_asmi dose)")
        found = said[one.cell, one.symbol]
        lacking = [arm for arm in MUST_BEAT if arm not in one.matched]
        return [
            {
                "cell": one.cell.label,
                "context": {True: "given", False: "none", None: "not known"}[one.cell.grounded],
                "score": one.symbol,
                "PRR of heads": prr_of_heads(one),
                "verdict": found.outcome,
                "by": found.arm,
                "p special, Holm": found.p_special,
                "p reproduced, Holm": found.p_reproduced,
                "questions": len(one.cell),
                "questions to decide": found.questions,
                "arms": ", ".join(one.matched),
                "not run": ", ".join(lacking) or None,
            }
        ]

    notes = [
        "The rule, fixed before any label was looked at. Special: the 95 % interval of PRR(heads) "
        f"minus PRR(arm) lies above zero against both {' and '.join(MUST_BEAT)}, at matched "
        "effect. Reproduced (the hypothesis fails here): for some arm two one-sided tests put the "
        f"difference within {MARGIN}, or the arm is better. Undecided: all else; an interval that "
        "holds zero is not *reproduced*. p-values: Holm over the cells of a score, not over arms.",
        "Reproduced says little where heads themselves rank no errors (their PRR interval holds "
        "zero): there is no signal to reproduce. Questions to decide: with a power of 0.8, if the "
        "differences found here are the true ones. †: nothing here is in the paper, which names "
        "the test without running it.",
    ]
    return frame(
        "falsifier_verdicts", title, _all(cells), compute, notes, digits=3, resamples=10_000,
        p_values=("p special, Holm", "p reproduced, Holm"), finish=_counted,
        label=lambda one: one.label, otherwise=OTHERWISE,
    )  # fmt: skip


def falsifier(cells: Sequence[Cell]) -> Items:
    """PRR of heads against every arm and dose."""
    title = "Heads against other perturbations of the same layer†"

    def compute(one: Compared) -> list[dict[str, Any]]:
        return [
            {
                "cell": one.cell.label,
                "score": one.symbol,
                "arm": name,
                "dose": one.arms[name].dose,
                "PRR of heads": found.heads,
                "PRR of arm": found.arm,
                "heads minus arm": found.difference,
                "p equal": found.p_equivalent,
                "SE": found.standard_error,
                "questions to differ": found.to_differ,
                "questions to be equal": found.to_equal,
            }
            for name, found in _compared(one.cell, one.symbol).items()
        ]

    def draw(table: pd.DataFrame) -> Figure:
        panels: dict[str, dict[str, Interval | None]] = {}
        for _, row in table.iterrows():
            panels.setdefault(f"{row['cell']}, {row['score']}", {})[row["arm"]] = row[
                "heads minus arm"
            ]
        return figures.forest(panels, "PRR of heads minus PRR of arm")

    notes = [
        "The same answers, layer, positions, masks and seeds: only what a mask takes away differs. "
        "Paired 95 % intervals over clusters; p equal: of a difference of at least "
        f"{MARGIN} in size (two one-sided tests). By norm: doses at which the change of the "
        "layer's output is as large as that of heads; by effect: at which the mean divergence from "
        "the unmasked model is, found on other rows and without labels. Norm-matched arms move "
        "predictions less than heads do, so the verdict is by effect. Questions to differ: that "
        "would show a difference of this size; to be equal: that would show equivalence if there "
        "is none. Asterisks and filled markers are of single intervals, adjusted for nothing; the "
        "verdict is adjusted. Never competing with methods: an arm is no score.",
    ]
    return frame(
        "falsifier", title, _all(cells), compute, notes, draw, digits=3, resamples=10_000,
        signed=("heads minus arm",), p_values=("p equal",), finish=_counted,
        label=lambda one: one.label, otherwise=OTHERWISE,
    )  # fmt: skip


def falsifier_added(cells: Sequence[Cell]) -> Items:
    """What heads know of errors beyond an arm, and an arm beyond heads."""
    title = "What heads know beyond another perturbation, and the reverse†"

    def compute(one: Compared) -> list[dict[str, Any]]:
        cell = one.cell
        cell.need_errors()
        msp, entropy = cell.need("msp", "entropy")
        rows = []
        for name, arm in one.arms.items():
            heads, other = cell.score(one.heads), one.score(arm)
            plain, corrected = _correlated(one, arm)
            row: dict[str, Any] = {
                "cell": cell.label,
                "score": one.symbol,
                "arm": name,
                "ρ": plain,
                "ρ, corrected": corrected,
            }
            for side, signal, given in (("heads", heads, other), ("arm", other, heads)):
                if np.ptp(signal) == 0:
                    raise Unavailable(f"the score of {side} is the same for all answers")
                controls = np.column_stack([msp, entropy, given])
                beyond = controls
                if cell.lengths is not None:
                    beyond = np.column_stack([controls, cell.lengths])
                added = adds_information(signal, beyond, cell.wrong, cell.clusters)
                found = distinct_signal(signal, controls, cell.wrong, cell.clusters)
                row |= {
                    f"residual AUROC of {side}": found.residual_auroc,
                    f"z of {side}": added.statistic,
                    f"p of {side}": added.p_value,
                    f"way of {side}": added.direction,
                }
            rows.append(row)
        return rows

    def finish(table: pd.DataFrame) -> pd.DataFrame:
        for side in ("heads", "arm"):
            adjusted = table.groupby(["score", "arm"])[f"p of {side}"].transform(holm)
            pairs = zip(adjusted, table.pop(f"way of {side}"), strict=True)
            table[f"{side} add"] = [verdict(p, way) for p, way in pairs]
        return table

    notes = [
        "Residual: of what MSP, H and the other of the two leave linearly, the paper's column. "
        "Add: generalised covariance given MSP, H, length and the other, Holm over the cells of a "
        "score and arm. ρ: rank correlation of the two over answers; corrected: for how alike "
        "redraws of the masks rank answers, so that 1 means the same but for the draw (needs runs "
        "of both with another seed).",
    ]
    return frame(
        "falsifier_added", title, _all(cells), compute, notes, digits=3,
        p_values=("p of heads", "p of arm"), finish=finish, label=lambda one: one.label,
        otherwise=OTHERWISE,
    )  # fmt: skip


def _correlated(one: Compared, arm: ArmRun) -> tuple[Interval, Interval | None]:
    """Rank correlation of heads and an arm, and the corrected one where both were redrawn."""
    scores = one.cell.score(one.heads), one.score(arm)
    again = _redrawn(one, arm)
    if again is None:
        nan = float("nan")
        return Interval(rank_correlation(*scores), nan, nan), None
    return corrected_correlation(scores, again, one.cell.clusters)


def _redrawn(one: Compared, arm: ArmRun) -> tuple[np.ndarray, np.ndarray] | None:
    """Scores of heads and of an arm with masks of another seed; None where one is missing."""

    cell = one.cell
    wanted = cell.methods[one.heads]
    for other in cell.arms:
        if _name(other) != _name(arm) or other is arm:
            continue
        try:
            heads = cell.counterpart(other, one.symbol)
            if heads != one.heads and cell.methods[heads].same_but(wanted, "seed"):
                return cell.score(heads), cell.arm_score(other, one.symbol)
        except Unavailable:
            continue
    return None


def dissociation(cells: Sequence[Cell]) -> Items:
    """Whether what heads have over an arm is bound to the context."""
    title = "Double dissociation: heads against an arm, with and without the context†"

    def compute(pair: tuple[Cell, Cell]) -> list[dict[str, Any]]:
        opened, closed = pair
        rows = pairs_of_rows(opened, closed, same_answers=False)
        if not rows:
            raise Unavailable("no question is in both runs")
        ours, theirs = (list(column) for column in zip(*rows, strict=True))
        clusters = [opened.clusters[i] for i in ours]
        by_symbol = {one.symbol: one for one in comparable(closed)}
        found = []
        for one in comparable(opened):
            other = by_symbol.get(one.symbol)
            for name in one.arms:
                if other is None or name not in other.arms:
                    continue
                sides = [
                    (
                        side.cell.score(side.heads)[chosen],
                        side.score(side.arms[name])[chosen],
                        side.cell.quality[chosen],
                    )
                    for side, chosen in ((one, ours), (other, theirs))
                ]
                found.append(
                    {
                        "open": opened.label,
                        "closed": closed.label,
                        "score": one.symbol,
                        "arm": name,
                        "questions": len(ours),
                        "heads minus arm, open minus closed": double_dissociation(
                            sides[0], sides[1], clusters
                        ),
                    }
                )
        if not found:
            raise Unavailable("no arm was run both with and without the context")
        return found

    notes = [
        "PRR(heads) minus PRR(arm) with the passage minus the same closed book, on the questions "
        "that both asked; passages are resampled once for both. Above zero: what heads have over "
        "the arm is bound to the context, as the paper's account of context routing has it.",
    ]
    return frame(
        "double_dissociation", title, twins(cells), compute, notes, digits=3, resamples=10_000,
        signed=("heads minus arm, open minus closed",), label=lambda pair: pair[0].label,
        otherwise="no model was asked the same questions with and without context",
    )  # fmt: skip


def reproduced(cells: Sequence[Cell]) -> list[str]:
    """First lines of the report: grounded cells whose signal is not special to heads."""
    lines = []
    for one, found in verdicts_on(cells):
        if found.outcome != "reproduced" or one.cell.grounded is False:
            continue
        ranked = prr_of_heads(one).low > 0
        none = "" if ranked else " Heads are not known to rank errors here in the first place."
        few = ", if so few answers may speak" if one.cell.too_small else ""
        lines.append(
            f"**Not special to heads: {one.cell.label}.** {found.arm} at matched effect reproduces "
            f"{one.symbol} or does better (p {found.p_reproduced:.3f}, Holm): the paper's "
            f"hypothesis fails on this cell by its own criterion{few}.{none}"
        )
    return lines
