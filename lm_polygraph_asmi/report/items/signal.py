"""Items on the signal: does it add to confidence, and does it help a user who abstains?"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis import comparison, selective
from lm_polygraph_asmi.analysis.clusters import PRR_RESAMPLES, cluster_band
from lm_polygraph_asmi.analysis.distinct import AGGREGATIONS, distinct_signal, residual_auroc
from lm_polygraph_asmi.analysis.stability import rank_correlation
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import Items, leading, per_setting
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, once

ABSTAIN = np.linspace(0, 0.9, 19)
AREA = "AUROC, 95 % over clusters"
FEWEST = 10
"""An error rate is drawn only if it is over at least this many answers."""


def _signal_and_controls(group: RunGroup) -> tuple[np.ndarray, np.ndarray]:
    """The signal u_sem (n,), and the controls MSP and H (n, 2).

    Raises Unavailable: one of them is missing, or all answers are right, or all are wrong.
    """
    group.need_errors()
    u_sem, msp, entropy = group.need("u_sem", "msp", "entropy")
    return u_sem, np.column_stack([msp, entropy])


def _distinct_figure(table: pd.DataFrame) -> Figure:
    main = table[table["signal"] == "u_sem, mean"].drop_duplicates("setting")
    columns = {"u_sem beyond MSP and H": "residual AUROC"}
    return figures.by_setting(main, columns, f"residual {AREA}", chance=0.5)


@per_setting(
    "distinct_signal",
    "A distinct signal: error detection beyond confidence",
    "Not a test: a skewed signal, or one whose spread grows with the controls, is detected "
    "although it adds nothing. Computed out of fold (5 folds of whole clusters). Residual: the "
    "signal minus its linear fit on the controls. Paper's criterion: yes if the interval of the "
    "residual AUROC is above 0.5; negative if it is below, which means that the residual is "
    "higher for right answers. Incremental: AUROC of a logistic model with the signal minus that "
    "of one without. LR: likelihood ratio, of models fitted on all answers. It assumes "
    "independent answers, so its p is nominal. All uncorrected.",
    "With the controls H(p̄) and mean H(p), whose difference is MI, only the contribution of the "
    "semantic kernel is left.",
    figure=_distinct_figure,
    digits=3,
    signed=("incremental AUROC",),
)
def distinct(group: RunGroup) -> list[dict[str, Any]]:
    """Table "app-distinct" of the paper, also for other aggregations, raw MI, and the kernel."""
    u_sem, controls = _signal_and_controls(group)
    if np.ptp(u_sem) == 0:
        raise Unavailable("u_sem is the same for all answers")
    rows = [
        _distinct_row(group, signal, "MSP, H", values, controls)
        for signal, values in _signals(group, u_sem).items()
        if np.ptp(values) > 0
    ]
    if group.entropy_of_mean is not None and group.mean_entropy is not None:
        entropies = np.column_stack([group.entropy_of_mean, group.mean_entropy])
        rows.append(_distinct_row(group, "u_sem, mean", "H(p̄), mean H(p)", u_sem, entropies))
    return rows


def _signals(group: RunGroup, u_sem: np.ndarray) -> dict[str, np.ndarray]:
    """The signals tested on a setting, by name."""
    signals = {}
    for name, mean, tokens in (
        ("u_sem", u_sem, group.u_tokens),
        ("MI", group.mi, group.mi_tokens),
    ):
        if mean is not None:
            signals[f"{name}, mean"] = mean
        for aggregation, aggregate in AGGREGATIONS.items():
            if aggregation != "mean" and tokens is not None:
                signals[f"{name}, {aggregation}"] = np.array([aggregate(mi) for mi in tokens])
    operating = group.variants.values()
    others = (m for m, c in group.methods.items() if c.method == "sem" and m not in operating)
    return signals | {method: group.score(method) for method in others}


def _distinct_row(
    group: RunGroup, signal: str, controls: str, values: np.ndarray, table: np.ndarray
) -> dict[str, Any]:
    result = distinct_signal(values, table, group.answers)
    direction = "yes" if result.residual_auroc.value > 0.5 else "negative"
    return {
        "setting": group.label,
        "signal": signal,
        "controls": controls,
        "residual AUROC": result.residual_auroc,
        "incremental AUROC": result.incremental_auroc,
        "LR": result.likelihood_ratio,
        "p (nominal)": result.p_value,
        "paper's criterion": direction if result.detected else "no",
        "errors": result.errors,
    }


@per_setting(
    "ensemble_mean",
    "Ensemble-mean entropy alone",
    "Differences of PRR with paired 95 % intervals over clusters.",
    digits=3,
    signed=("u_sem Δ H(p̄)", "MI Δ H(p̄)"),
    resamples=PRR_RESAMPLES,
)
def ensemble_mean(group: RunGroup) -> dict[str, Any]:
    """Appendix "Ensemble-mean entropy alone": does averaging over masks explain the gain?"""
    group.need_errors()
    average, entropy, u_sem, mi = group.need("entropy_of_mean", "entropy", "u_sem", "mi")
    scores = {"H": entropy, "H(p̄)": average, "MI": mi, "u_sem": u_sem}
    pairs = [("u_sem", "H(p̄)"), ("MI", "H(p̄)")]
    intervals, paired = comparison.prr_intervals(scores, group.answers, pairs)
    return {
        "setting": group.label,
        "Spearman with H": rank_correlation(average, entropy),
        **{f"PRR of {name}": intervals[name] for name in scores},
        "highest": max(scores, key=lambda name: intervals[name].value),
        **{f"{first} Δ {second}": paired[first, second] for first, second in pairs},
    }


@per_setting(
    "matched_flags",
    "Errors flagged by u_sem and by entropy at a matched rate",
    "Each score flags as many answers as there are errors. With ties, counts are means over all "
    "choices. The exact test assumes independent answers.",
    digits=3,
)
def flags(group: RunGroup) -> dict[str, Any]:
    """McNemar's test at a matched flag rate: appendix "The Distinct-Signal Analysis"."""
    group.need_errors()
    u_sem, entropy = group.need("u_sem", "entropy")
    test = comparison.mcnemar(u_sem, entropy, group.wrong, int(group.wrong.sum()))
    return {
        "setting": group.label,
        "flagged by each": test.flagged,
        "errors by both": _count(test.both),
        "only by u_sem": _count(test.only_first),
        "only by entropy": _count(test.only_second),
        "McNemar p": test.p_value,
    }


def _count(mean: float) -> float | int:
    """A whole number as int; a mean over ties stays a float."""
    return int(mean) if float(mean).is_integer() else mean


@per_setting(
    "confident_fragile",
    "Confident but fragile",
    "Error rates after splitting answers at the medians of MSP and u_sem. An answer at a median "
    "counts as confident or robust, so with ties the confident share is above one half. Gap: "
    "confident-fragile minus confident-robust, 95 % over clusters. Differences in confidence "
    "within the halves can explain a gap: see the residual AUROC. Tokens: tokens of confident "
    "answers, with the label of their answer; the paper finds no effect for tokens.",
    figure=figures.quadrants,
    signed=("gap", "token gap"),
)
def confident_fragile(group: RunGroup) -> tuple[dict[str, Any], dict[str, selective.Quadrants]]:
    """Figure "confident-fragile" (a) of the paper, and the same for tokens."""
    quadrants = _quadrants(group)
    rates = quadrants.error_rate
    row = {
        "setting": group.label,
        "confident share": float(quadrants.count[0].sum() / len(group)),
        "confident, robust": float(rates[0, 0]),
        "confident, fragile": float(rates[0, 1]),
        "unconfident, robust": float(rates[1, 0]),
        "unconfident, fragile": float(rates[1, 1]),
        "gap": quadrants.gap,
    }
    if group.u_tokens is not None and group.msp is not None:
        null = selective.token_null(group.msp, group.u_tokens, group.answers)
        row |= {"token gap": null.gap, "token AUROC": null.auroc}
    return row, {group.label: quadrants}


@once
def _quadrants(group: RunGroup) -> selective.Quadrants:
    group.need_errors()
    msp, u_sem = group.need("msp", "u_sem")
    return selective.confident_but_fragile(msp, u_sem, group.answers)


REGIMES = {True: "context", False: "memory", None: "not recorded"}


def _regimes_figure(table: pd.DataFrame) -> Figure:
    panels = {
        f"answers expected from: {regime}": dict(
            zip(rows["setting"], rows["residual AUROC"], strict=True)
        )
        for regime, rows in table.groupby("answers expected from", sort=False)
    }
    return figures.forest(panels, f"u_sem beyond MSP and H: residual {AREA}", chance=0.5)


@per_setting(
    "confident_fragile_by_regime",
    "Confident but fragile, by regime",
    "Gap: error rate of confident-fragile minus confident-robust answers. A high error rate "
    "inflates it, so compare regimes by the residual AUROC, as in the figure; 0.5 = chance.",
    figure=_regimes_figure,
    digits=3,
    signed=("gap",),
)
def _of_regime(group: RunGroup) -> dict[str, Any]:
    return {
        "answers expected from": REGIMES[group.grounded],
        "setting": group.label,
        "gap": _quadrants(group).gap,
        "residual AUROC": residual_auroc(*_signal_and_controls(group), group.answers),
    }


def by_regime(groups: Sequence[RunGroup]) -> Items:
    """Figure "confident-fragile" (b) of the paper: gap and residual AUROC by regime."""
    return _of_regime(sorted(groups, key=lambda group: REGIMES[group.grounded]))


BANDS = (
    "Figure: pointwise 95 % bands over clusters (200 resamples). Among the first few answers, "
    "curves may exceed the axis limit."
)


@per_setting(
    "payoff",
    "Deployment payoff: filtering confident answers",
    "Error rate of the half of answers most confident by MSP, and after abstaining on half of "
    "these by u_sem or by entropy. Negative difference: u_sem filters better. Confident share "
    "and coverage are the actual shares: one half and one quarter, unless many answers tie at "
    "the median of MSP.",
    f"{BANDS} Curves end where fewer than {FEWEST} answers are left.",
    figure=figures.payoff,
    digits=3,
    signed=("u_sem − entropy",),
)
def payoff(group: RunGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """Table and figure "payoff" of the paper."""
    u_sem, controls = _signal_and_controls(group)
    msp, entropy = controls.T
    filter_result = selective.confident_filter(msp, u_sem, entropy, group.answers)
    confident = round(filter_result.confident * len(group))
    steady = confident * (1 - ABSTAIN) >= FEWEST

    def errors(score: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return selective.filter_curve(msp[rows], score[rows], group.wrong[rows], ABSTAIN)

    curves = {}
    for name, score in (("entropy", entropy), ("u_sem", u_sem)):
        parts = _with_band(group, partial(errors, score), len(ABSTAIN))
        curves[name] = (100 * ABSTAIN, *(np.where(steady, part, np.nan) for part in parts))
    row = {
        "setting": group.label,
        "confident share": filter_result.confident,
        "coverage": filter_result.coverage,
        "confident error": filter_result.confident_error,
        "filter by u_sem": filter_result.by_fragility,
        "filter by entropy": filter_result.by_other,
        "u_sem − entropy": filter_result.difference,
    }
    return row, {f"{group.label}, {confident} confident of {len(group)}": curves}


@per_setting(
    "aurc",
    "Area under the risk-coverage curve",
    "AURC: lower = better. The lowest is bold if the paired 95 % interval (over clusters) of its "
    "difference from the next lowest excludes 0, and italic otherwise. Negative difference: "
    "u_sem is better.",
    BANDS,
    figure=figures.risk_coverage,
    digits=3,
    signed=("u_sem − MSP",),
)
def aurc(group: RunGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """Table "payoff-aurc" of the paper, and its curves."""
    u_sem, controls = _signal_and_controls(group)
    signals = {"MSP": controls[:, 0], "entropy": controls[:, 1], "u_sem": u_sem}
    value = {name: selective.aurc(score, group.wrong) for name, score in signals.items()}
    lowest, next_lowest = sorted(signals, key=lambda name: value[name])[:2]
    ahead = selective.aurc_difference(signals[lowest], signals[next_lowest], group.answers)

    def risk(score: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return selective.risk_coverage(score[rows], group.wrong[rows])

    x = np.arange(1, len(group) + 1) / len(group)
    curves = {n: (x, *_with_band(group, partial(risk, score))) for n, score in signals.items()}
    marked = {name: leading(v, ahead) if name == lowest else v for name, v in value.items()}
    difference = selective.aurc_difference(u_sem, signals["MSP"], group.answers)
    row = {"setting": group.label} | marked | {"u_sem − MSP": difference}
    return row, {f"{group.label}, n = {len(group)}": curves}


def _with_band(
    group: RunGroup, curve: Callable[[np.ndarray], np.ndarray], points: int = 50
) -> tuple[np.ndarray, np.ndarray]:
    """The values of a curve over all rows, and its band."""
    return curve(np.arange(len(group))), cluster_band(curve, group.answers, points)


@per_setting(
    "global_selector",
    "A trained global selector",
    "Error rate of the answers that a logistic selector accepts, fitted out of fold. Negative "
    "difference: u_sem helps.",
    digits=3,
    signed=("with − without",),
)
def selector(group: RunGroup) -> list[dict[str, Any]]:
    """Appendix "A trained global selector"."""
    u_sem, controls = _signal_and_controls(group)
    by_coverage = selective.global_selector(controls, u_sem, group.answers)
    return [
        {
            "setting": group.label,
            "coverage": coverage,
            "error, MSP and H": base,
            "error, with u_sem": full,
            "with − without": difference,
        }
        for coverage, (base, full, difference) in by_coverage.items()
    ]
