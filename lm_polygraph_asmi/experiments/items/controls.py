"""Perturbation controls: is the signal special to heads? Other perturbations of the same answers.

The paper names the test but does not run it.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis.added import adds_information
from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.distinct import distinct_signal
from lm_polygraph_asmi.analysis.hypotheses import MARGIN, holm
from lm_polygraph_asmi.analysis.stability import rank_correlation
from lm_polygraph_asmi.experiments.analysis.controls import (
    MUST_BEAT,
    ConditionComparison,
    Verdict,
    condition_comparisons,
    corrected_correlation,
    double_dissociation,
    verdicts,
)
from lm_polygraph_asmi.experiments.conditions import ConditionRun, conditions
from lm_polygraph_asmi.experiments.items.heads import with_lengths
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import Items, frame
from lm_polygraph_asmi.report.items.boundary import twins
from lm_polygraph_asmi.report.items.signal import verdict
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, once, pairs_of_rows

SCORES = ("Sem-ASMI", "ASMI")
OTHERWISE = "every run perturbed only heads: needs asmi_controls"


class Compared(NamedTuple):
    """One score ("ASMI", "Sem-ASMI") of heads on a setting, and that of every condition.

    `heads` is the method's name. Conditions, by a name such as "mlp" or "mlp, by norm", have the
    same masks and settings.
    """

    group: RunGroup
    symbol: str
    heads: str
    conditions: dict[str, ConditionRun]

    @property
    def label(self) -> str:
        return self.group.label

    @property
    def matched(self) -> dict[str, ConditionRun]:
        """Conditions at matched effect, which the verdict uses, by what they perturb."""
        runs = self.conditions.values()
        return {run.condition: run for run in runs if run.matching == "effect" and run.times == 1}

    def score(self, condition: ConditionRun) -> np.ndarray:
        return condition.score(self.group, self.symbol)


def _name(condition: ConditionRun) -> str:
    """Name of a condition in a table."""
    if condition.matching is not None:
        times = "" if condition.times == 1 else f", {condition.times:g} times"
        return f"{condition.condition}, by {condition.matching}{times}"
    if condition.perturbation_scale is not None:
        return f"{condition.condition}, scale {condition.perturbation_scale:.3g}"
    return condition.condition


@once
def comparable(group: RunGroup) -> list[Compared]:
    """Comparisons on a setting: the first run of each condition, and heads with the same masks."""
    by_heads: dict[tuple[str, str], dict[str, ConditionRun]] = {}
    for symbol in SCORES:
        for condition in conditions(group):
            try:
                heads = condition.counterpart(group, symbol)
                condition.score(group, symbol)
            except Unavailable:
                continue
            by_heads.setdefault((symbol, heads), {}).setdefault(_name(condition), condition)
    # Of several mask seeds, the one with the most conditions; others are for seed stability.
    most: dict[str, Compared] = {}
    for (symbol, heads), by_name in by_heads.items():
        if symbol not in most or len(by_name) > len(most[symbol].conditions):
            most[symbol] = Compared(group, symbol, heads, by_name)
    return list(most.values())


def _comparisons(groups: Sequence[RunGroup]) -> Iterator[Compared]:
    return chain.from_iterable(map(comparable, groups))


@once
def _by_condition(group: RunGroup, symbol: str) -> dict[str, ConditionComparison]:
    """Every condition against heads; see `condition_comparisons`."""
    (compared,) = (c for c in comparable(group) if c.symbol == symbol)
    scores = {name: compared.score(condition) for name, condition in compared.conditions.items()}
    heads = group.score(compared.heads)
    return condition_comparisons(heads, scores, group.answers)


def prr_of_heads(compared: Compared) -> Interval:
    """PRR of the score of heads; if its interval includes 0, there is little to reproduce."""
    return next(iter(_by_condition(compared.group, compared.symbol).values())).heads


def verdicts_on(groups: Sequence[RunGroup]) -> list[tuple[Compared, Verdict]]:
    """Verdict per setting with conditions at matched effect, Holm over settings of a score."""
    results = []
    for symbol in SCORES:
        tested, comparisons = [], []
        for compared in _comparisons(groups):
            if compared.symbol != symbol or not compared.matched:
                continue
            try:
                by_name = _by_condition(compared.group, symbol)
            except ValueError:
                continue
            tested.append(compared)
            matched = compared.matched.items()
            comparisons.append({name: by_name[_name(condition)] for name, condition in matched})
        results += list(zip(tested, verdicts(comparisons), strict=True))
    return results


def _counted(table: pd.DataFrame) -> pd.DataFrame:
    """Numbers of questions as integers, with missing values."""
    names = [name for name in table if str(name).startswith("questions")]
    return table.astype(dict.fromkeys(names, "Int64"))


def control_verdicts(groups: Sequence[RunGroup]) -> Items:
    """Special, reproduced or inconclusive, by a rule fixed before the labels were seen."""
    title = "Is the signal special to heads? Verdicts†"
    by_score = {(c.group, c.symbol): result for c, result in verdicts_on(groups)}

    def compute(compared: Compared) -> dict[str, Any]:
        if not compared.matched:
            raise Unavailable(
                "no condition at matched effect: needs perturbation scales (polygraph_asmi "
                "experiments scale)"
            )
        result = by_score[compared.group, compared.symbol]
        missing = [condition for condition in MUST_BEAT if condition not in compared.matched]
        return {
            "setting": compared.group.label,
            "context": {True: "given", False: "none", None: "not known"}[compared.group.grounded],
            "score": compared.symbol,
            "PRR of heads": prr_of_heads(compared),
            "verdict": result.outcome,
            "by": result.condition,
            "p special, Holm": result.p_special,
            "p reproduced, Holm": result.p_reproduced,
            "questions": len(compared.group),
            "questions to decide": result.questions,
            "conditions": ", ".join(compared.matched),
            "not run": ", ".join(missing) or None,
        }

    notes = [
        "The rule was fixed before the labels were seen. Special: the 95 % interval of PRR(heads) "
        f"minus PRR(condition) is above 0 against both {' and '.join(MUST_BEAT)}, at matched "
        "effect. Reproduced (the hypothesis fails here): for some condition, two one-sided tests "
        f"put the difference within {MARGIN}, or the condition is better. Inconclusive: all else; "
        "an interval that includes 0 is not *reproduced*. p-values: Holm over the settings of a "
        "score, not over conditions.",
        "Reproduced means little if the PRR interval of heads includes 0: there is no signal to "
        "reproduce. Questions to decide: with a power of 0.8, if the true differences are those "
        "measured here. †: not in the paper, which names the test without running it.",
    ]
    return frame(
        "control_verdicts", title, _comparisons(groups), compute, notes, digits=3, resamples=10_000,
        p_values=("p special, Holm", "p reproduced, Holm"), finish=_counted,
        otherwise=OTHERWISE,
    )  # fmt: skip


def controls(groups: Sequence[RunGroup]) -> Items:
    """PRR of heads against every condition and scale."""
    title = "Heads against other perturbations of the same layer†"

    def compute(compared: Compared) -> list[dict[str, Any]]:
        return [
            {
                "setting": compared.group.label,
                "score": compared.symbol,
                "condition": name,
                "perturbation_scale": compared.conditions[name].perturbation_scale,
                "PRR of heads": comparison.heads,
                "PRR of condition": comparison.condition,
                "heads minus condition": comparison.difference,
                "p equal": comparison.p_equivalent,
                "SE": comparison.standard_error,
                "questions to differ": comparison.to_differ,
                "questions to be equal": comparison.to_equal,
            }
            for name, comparison in _by_condition(compared.group, compared.symbol).items()
        ]

    def draw(table: pd.DataFrame) -> Figure:
        panels: dict[str, dict[str, Interval | None]] = {}
        for _, row in table.iterrows():
            panel = panels.setdefault(f"{row['setting']}, {row['score']}", {})
            panel[row["condition"]] = row["heads minus condition"]
        return figures.forest(panels, "PRR of heads minus PRR of condition")

    notes = [
        "The same answers, layer, positions, masks and seeds: only what a mask removes differs. "
        f"Paired 95 % intervals over clusters; p equal: of a difference of at least {MARGIN} in "
        "size (two one-sided tests). By norm: the perturbation scale gives the change of the "
        "layer's output the size it has for heads. By effect: it gives the mean divergence from "
        "the unmasked model that size, on other rows and without labels. Norm-matched conditions "
        "change predictions less than heads do, so the verdict uses effect. Questions to differ: "
        "needed to show a difference of this size; to be equal: needed to show equivalence if the "
        "difference is 0. Asterisks and filled markers: uncorrected intervals; the verdict is "
        "corrected. Conditions are not ranked among methods.",
    ]
    return frame(
        "controls", title, _comparisons(groups), compute, notes, draw, digits=3, resamples=10_000,
        signed=("heads minus condition",), p_values=("p equal",), finish=_counted,
        otherwise=OTHERWISE,
    )  # fmt: skip


def controls_added(groups: Sequence[RunGroup]) -> Items:
    """Whether heads add information on errors to a condition, and a condition to heads."""
    title = "Do heads add to another perturbation, and the reverse?†"

    def compute(compared: Compared) -> list[dict[str, Any]]:
        group = compared.group
        group.need_errors()
        msp, entropy = group.need("msp", "entropy")
        rows = []
        for name, condition in compared.conditions.items():
            heads, other = group.score(compared.heads), compared.score(condition)
            rho, corrected = _correlated(compared, condition)
            row: dict[str, Any] = {"setting": group.label, "score": compared.symbol}
            row |= {"condition": name, "ρ": rho, "ρ, corrected": corrected}
            for side, signal, control in (("heads", heads, other), ("condition", other, heads)):
                if np.ptp(signal) == 0:
                    raise Unavailable(f"the score of {side} is the same for all answers")
                controls = np.column_stack([msp, entropy, control])
                added = adds_information(signal, with_lengths(controls, group), group.answers)
                distinct = distinct_signal(signal, controls, group.answers)
                row |= {
                    f"residual AUROC of {side}": distinct.residual_auroc,
                    f"z of {side}": added.statistic,
                    f"p of {side}": added.p_value,
                    f"way of {side}": added.direction,
                }
            rows.append(row)
        return rows

    def finish(table: pd.DataFrame) -> pd.DataFrame:
        for side in ("heads", "condition"):
            adjusted = table.groupby(["score", "condition"])[f"p of {side}"].transform(holm)
            pairs = zip(adjusted, table.pop(f"way of {side}"), strict=True)
            table[f"{side} add"] = [verdict(p, direction) for p, direction in pairs]
        return table

    notes = [
        "Residual (the paper's column): AUROC after a linear fit on MSP, H and the other of the "
        "two. Add: generalised covariance given MSP, H, length and the other, Holm over the "
        "settings of a score and condition. ρ: rank correlation of the two over answers; "
        "corrected for seed stability, so that 1 means identical except for the mask seed (needs "
        "runs of both with another seed).",
    ]
    return frame(
        "controls_added", title, _comparisons(groups), compute, notes, digits=3,
        p_values=("p of heads", "p of condition"), finish=finish,
        otherwise=OTHERWISE,
    )  # fmt: skip


def _correlated(compared: Compared, condition: ConditionRun) -> tuple[Interval, Interval | None]:
    """Rank correlation of heads and a condition; also corrected, if both have another seed."""
    scores = compared.group.score(compared.heads), compared.score(condition)
    other_seed = _resampled(compared, condition)
    if other_seed is None:
        return Interval(rank_correlation(*scores), np.nan, np.nan), None
    return corrected_correlation(scores, other_seed, compared.group.clusters)


def _resampled(compared: Compared, condition: ConditionRun) -> tuple[np.ndarray, np.ndarray] | None:
    """Scores of heads and of a condition with another mask seed; None if one is missing."""
    group = compared.group
    settings = group.methods[compared.heads]
    for other in conditions(group):
        if _name(other) != _name(condition) or other.run is condition.run:
            continue
        try:
            heads = other.counterpart(group, compared.symbol)
            if heads != compared.heads and group.methods[heads].same_but(settings, "seed"):
                return group.score(heads), other.score(group, compared.symbol)
        except Unavailable:
            continue
    return None


def dissociation(groups: Sequence[RunGroup]) -> Items:
    """Whether the advantage of heads over a condition depends on the context."""
    title = "Double dissociation: heads against a condition, with and without the context†"

    def compute(pair: tuple[RunGroup, RunGroup]) -> list[dict[str, Any]]:
        opened, closed = pair
        rows = pairs_of_rows(opened, closed, same_answers=False)
        if not rows:
            raise Unavailable("no question is in both runs")
        opened_rows, closed_rows = (list(column) for column in zip(*rows, strict=True))
        clusters = [opened.clusters[i] for i in opened_rows]
        by_symbol = {compared.symbol: compared for compared in comparable(closed)}
        table = []
        for compared in comparable(opened):
            closed_twin = by_symbol.get(compared.symbol)
            if closed_twin is None:
                continue
            for name in [name for name in compared.conditions if name in closed_twin.conditions]:
                with_context, without = (
                    (
                        side.group.score(side.heads)[chosen],
                        side.score(side.conditions[name])[chosen],
                        side.group.quality[chosen],
                    )
                    for side, chosen in ((compared, opened_rows), (closed_twin, closed_rows))
                )
                difference = double_dissociation(with_context, without, clusters)
                table.append({
                    "open": opened.label, "closed": closed.label, "score": compared.symbol,
                    "condition": name, "questions": len(opened_rows),
                    "heads minus condition, open minus closed": difference,
                })  # fmt: skip
        if not table:
            raise Unavailable("no condition was run both with and without the context")
        return table

    notes = [
        "PRR(heads) minus PRR(condition) with the passage, minus the same closed-book, on the "
        "questions of both runs; passages are resampled once for both. Above 0: the advantage of "
        "heads over the condition depends on the context, as the paper's context routing predicts.",
    ]
    return frame(
        "double_dissociation", title, twins(groups), compute, notes, digits=3, resamples=10_000,
        signed=("heads minus condition, open minus closed",), label=lambda pair: pair[0].label,
        otherwise="no model has runs on the same questions with and without context",
    )  # fmt: skip


def findings(groups: Sequence[RunGroup]) -> list[str]:
    """First lines of the report: settings with a context whose signal is not special to heads."""
    lines = []
    for compared, result in verdicts_on(groups):
        if result.outcome != "reproduced" or compared.group.grounded is False:
            continue
        ranked = prr_of_heads(compared).low > 0
        none = "" if ranked else " There is no evidence that heads rank errors here."
        few = " (few answers, so weak evidence)" if compared.group.too_small else ""
        lines.append(
            f"**Not special to heads: {compared.group.label}.** {result.condition} at matched "
            f"effect reproduces {compared.symbol} or does better (p {result.p_reproduced:.3f}, "
            f"Holm): the paper's hypothesis fails on this setting by its own criterion{few}.{none}"
        )
    return lines
