"""Tables and figures of the pages of evidence: what cells are worth, and where it comes from."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from cells import (
    AGAIN,
    CELLS,
    CHANGED,
    CLOSED,
    DEEPER,
    FEWEST,
    FIRST,
    JUDGES,
    MODELS,
    OWN_ANSWERS,
    SETTINGS,
    WAYS,
    Evidence,
    added_text,
    correlation,
    judged,
    others,
    p_text,
    plain,
    share,
    signed,
    table,
    z_text,
)
from heads import (
    arms_added_table,
    arms_table,
    concentration_table,
    probe_table,
    verdict_table,
)
from matplotlib import rc_context
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis import (
    AddedInformation,
    Interval,
    adds_over_cells,
    auroc,
    auroc_by_judge,
    confident_but_fragile,
    error_separation,
    holm,
    prr_draws,
    prr_intervals,
    rank_signals,
    stacked_gain,
    strata,
)
from lm_polygraph_asmi.analysis.clusters import percentile_interval, two_sided
from lm_polygraph_asmi.analysis.judge import THRESHOLDS
from lm_polygraph_asmi.analysis.prr import normalised_prr
from lm_polygraph_asmi.report import figures

RESAMPLES, REFITS = 2000, 500
DEPTHS = (60, 70, 80, 90)
TRIAL = Path(__file__).parents[2] / "docs/evidence/qwen15-trial.csv"


@dataclass(frozen=True)
class PlannedTests:
    """The tests of docs/evidence/source-plan.md and depth-plan.md, of one cell by one judge.

    Attributes:
        own, beside, difference: PRR of a score, of the one beside it, and of the first less it.
        p_own, p_difference: that these are zero.
        statistic, p_added: of the score beyond what is free; NaN where errors are too few.
    """

    evidence: Evidence
    own: Interval
    beside: Interval
    difference: Interval
    p_own: float
    p_difference: float
    statistic: float
    p_added: float

    @classmethod
    def of(
        cls, evidence: Evidence, judge: str, own: np.ndarray, beside: np.ndarray
    ) -> "PlannedTests":
        quality = evidence.quality(judge)
        values = [normalised_prr(scores, quality) for scores in (own, beside)]
        drawn = prr_draws([own, beside], quality, evidence.clusters, RESAMPLES).T
        gap = drawn[0] - drawn[1]
        added = evidence.tested(own, judge)
        return cls(
            evidence,
            percentile_interval(values[0], drawn[0]),
            percentile_interval(values[1], drawn[1]),
            percentile_interval(values[0] - values[1], gap),
            two_sided(drawn[0]),
            two_sided(gap),
            *((added.statistic, added.p_value) if added else (np.nan, np.nan)),
        )


PLANNED = {
    ("smollm2", "open-worked"), ("gemma", "open"), ("qwen05", "open"), ("qwen15", "open"),
    *((model, "babi") for model in ("smollm2", "gemma", "qwen05", "qwen15")),
}  # fmt: skip


def source_table(cells: list[Evidence], judge: str, method: str = "Sem-ASMI") -> str:
    planned = [c for c in judged(cells, judge) if (c.model, c.cell) in PLANNED]
    sources = [[e.score(method, source) for source in ("context", "all")] for e in planned]
    tests = [PlannedTests.of(e, judge, *own) for e, own in zip(planned, sources, strict=True)]
    primary = method == "Sem-ASMI"  # the plan adjusts nothing else
    ps = [[getattr(test, p) for test in tests] for p in ("p_own", "p_difference", "p_added")]
    adjusted = [holm(own) if primary else own for own in ps] if tests else []
    how = "Holm" if primary else "unadjusted"
    columns = [
        "cell", "answers / clusters", "wrong", f"PRR of {method}, all", "passage", f"p (1), {how}",
        "passage − all", f"p (2), {how}", "beyond what is free, z", f"p (3), {how}",
    ]  # fmt: skip
    return table(
        columns,
        [
            [
                test.evidence.label,
                test.evidence.size,
                str(int(test.evidence.wrong(judge).sum())),
                signed(test.beside),
                signed(test.own),
                p_text(adjusted[0][i]),
                signed(test.difference),
                p_text(adjusted[1][i]),
                z_text(test.statistic),
                p_text(adjusted[2][i]),
            ]
            for i, test in enumerate(tests)
        ],
    )


def elsewhere_table(cells: list[Evidence], judge: str) -> str:
    """PRR where masked heads lose all, what comes from the passage, or all else; not planned."""
    rows = []
    for e in judged(cells, judge):
        if not e.has_source("elsewhere"):
            continue
        sources = ("all", "context", "elsewhere")
        scores = {source: e.score("Sem-ASMI", source) for source in sources}
        free = {"MSP": e.signals["MSP"], "Perplexity": e.signals["Perplexity"]}
        pairs = [("elsewhere", name) for name in free]
        alone, gaps = prr_intervals(scores | free, e.quality(judge), e.clusters, pairs, RESAMPLES)
        shown = [signed(alone[name]) for name in (*sources, *free)]
        rows.append([e.label, *shown, *(signed(gaps[pair]) for pair in pairs)])
    columns = [
        "cell", "PRR of Sem-ASMI: all", "passage", "elsewhere", "MSP", "Perplexity",
        "elsewhere − MSP", "elsewhere − Perplexity",
    ]  # fmt: skip
    return table(columns, rows)


def contenders_table(cells: list[Evidence], judge: str) -> str:
    """Other ways to ask how much an answer owes to its passage; as scores, higher = more."""
    rows = []
    for e in judged(cells, judge):
        if "asmi_source_kl_d60_context" not in e.answers:
            continue
        alone, _ = prr_intervals(e.owed, e.quality(judge), e.clusters, resamples=RESAMPLES)
        for name, score in e.owed.items():
            rows.append(
                [e.label, name, f"{np.median(score):.3g}", signed(alone[name]),
                 e.beyond_free(score, judge)]
            )  # fmt: skip
    columns = ["cell", "owed to the passage", "median", "PRR", "beyond what is free: z (p)"]
    return table(columns, rows)


def worth_table(
    cells: list[Evidence],
    judge: str,
    raw: tuple[str, ...] = ("ASMI",),
    ours: tuple[str, ...] = ("Sem-ASMI", "Sem-ASMI, sum"),
) -> str:
    """PRR of each signal, what ours have over what is free, and whether they add to it."""
    free = ("MSP", "Perplexity")
    pairs = [(own, other) for own in ours for other in free]
    rows = []
    for e in judged(cells, judge):
        scores = {name: e.signals[name] for name in (*free, *raw, *ours)}
        alone, gaps = prr_intervals(scores, e.quality(judge), e.clusters, pairs, RESAMPLES)
        rows.append(
            [
                e.label,
                e.size,
                share(~e.wrong(judge)),
                *(signed(alone[name]) for name in scores),
                *(signed(gaps[pair]) for pair in pairs),
                *(e.beyond_free(scores[name], judge) for name in (*raw, *ours)),
            ]
        )
    columns = [
        "cell", "answers / clusters", "right", "PRR: MSP", "Perplexity", *raw, *ours,
        *(f"{own} − {other}" for own, other in pairs),
        *(f"beyond what is free, {name}: z (p)" for name in (*raw, *ours)),
    ]  # fmt: skip
    return table(columns, rows)


def trial_table(cells: list[Evidence], judge: str) -> str:
    """A cell with questions of a trial (docs/concepts/guarantee.md), by whether it had them."""
    trial = set(pd.read_csv(TRIAL)["id"])
    rows = []
    for e in cells:
        if (e.model, e.cell, e.run) == ("qwen15", "open-worked", "sources"):
            asked = e.answers["id"].isin(trial).to_numpy()
            rows += [
                e.among(asked, "asked in the trial"),
                e.among(~asked, "not asked in the trial"),
            ]
    return worth_table(rows, judge, raw=(), ours=("Sem-ASMI",))


def together_table(cells: list[Evidence], judge: str) -> str:
    """Beyond what is free, over all cells that have a passage; and over those of each data set,
    without empty answers, and at other depths."""

    def tested(
        chosen: Iterable[Evidence], method: str = "Sem-ASMI", **how: Any
    ) -> dict[Evidence, AddedInformation]:
        found = {e: e.tested(e.score(method, **how), judge) for e in chosen}
        return {e: one for e, one in found.items() if one}

    read = [e for e in judged(cells, judge) if e.cell not in CLOSED]
    deeper = [e for e in deeper_cells(cells) if e.ranked(judge)]
    sem = tested(read)
    asked = {
        "ASMI": tested(read, "ASMI"),
        "Sem-ASMI": sem,
        **{
            f"Sem-ASMI, {name} alone": {e: one for e, one in sem.items() if e.data_set == name}
            for name in dict.fromkeys(e.data_set for e in sem)
        },
        "Sem-ASMI, without empty answers": tested(e.among(~e.empty) for e in read),
        "Sem-ASMI, sum": tested(read, aggregation="sum"),
        "Sem-ASMI, first token": tested(read, aggregation=FIRST),
        **{
            f"Sem-ASMI at {d} %": tested((e for e in deeper if e.has_depth(d)), depth=d)
            for d in DEPTHS
        },
    }
    rows = []
    for name, tests in asked.items():
        if not tests:
            continue
        found = list(tests.values())
        whole, z = adds_over_cells(found), [one.statistic for one in found]
        rows.append(
            [name, str(len(found)), f"{whole.n} / {whole.clusters}",
             f"{z_text(min(z))} to {z_text(max(z))}", str(sum(own < 0 for own in z)),
             added_text(whole)]
        )  # fmt: skip
    columns = [
        "score", "cells", "answers / clusters", "z of a cell", "of them negative",
        "together: z (p)",
    ]  # fmt: skip
    return table(columns, rows)


def measures_table(cells: list[Evidence], judge: str) -> str:
    rows = []
    for e in judged(cells, judge):
        wrong = e.wrong(judge)
        if wrong.all() or not wrong.any():
            continue
        found = rank_signals(e.signals, wrong, e.clusters, resamples=RESAMPLES)
        for name, signal in found.items():
            stacked = ["", "", ""]
            if name.startswith(("ASMI", "Sem")):
                try:
                    gain = stacked_gain(e.signals[name], e.controls, wrong, e.clusters,
                                        e.quality(judge), REFITS)  # fmt: skip
                    stacked = [signed(one) for one in (gain.log_loss, gain.auroc, gain.prr)]
                except ValueError:
                    stacked = ["too few errors"] * 3
            rows.append([e.label, name, plain(signal.auroc), plain(signal.augrc, 3), *stacked])
    columns = [
        "cell", "score", "AUROC", "AUGRC, lower is better", "gain of a stack: log-loss", "AUROC",
        "PRR",
    ]  # fmt: skip
    return table(columns, rows)


def aggregation_table(cells: list[Evidence], judge: str) -> str:
    rows = []
    for e in judged(cells, judge):
        for method in ("ASMI", "Sem-ASMI", "surprisal", "entropy"):
            scores = {way: e.score(method, aggregation=way) for way in WAYS}
            alone, _ = prr_intervals(scores, e.quality(judge), e.clusters, (), RESAMPLES)
            along = " / ".join(correlation(own, e.length) for own in scores.values())
            rows.append([e.label, method, *(signed(alone[way]) for way in WAYS), along])
    columns = ["cell", "per token", *(f"PRR, {way}" for way in WAYS), "ρ with length, the same"]
    return table(columns, rows)


def quadrants_table(cells: list[Evidence], judge: str) -> str:
    rows = []
    for e in judged(cells, judge):
        for name in ("Perplexity", "Sem-ASMI", "Sem-ASMI, sum"):  # does what is free do as much?
            found = confident_but_fragile(
                e.signals["MSP"], e.signals[name], e.wrong(judge), e.clusters, RESAMPLES
            )
            halves = zip(found.error_rate.ravel(), found.count.ravel(), strict=True)
            shown = [f"{rate:.0%} of {count}" if count else "none" for rate, count in halves]
            rows.append([e.label, name, *shown, signed(found.gap)])
    columns = [
        "cell", "score", "wrong: confident, robust", "confident, fragile", "unsure, robust",
        "unsure, fragile", "confident: fragile − robust",
    ]  # fmt: skip
    return table(columns, rows)


def strata_table(cells: list[Evidence], judge: str) -> str:
    """Within thirds by length, and without empty answers."""
    rows = []
    for e in judged(cells, judge):
        part = strata(e.length)
        chosen = {}
        for number in range(part.max() + 1):
            own = e.length[part == number]
            chosen[f"{own.min()} to {own.max()} tokens"] = part == number
        if e.empty.any():
            chosen["not empty"] = ~e.empty
            chosen["empty"] = e.empty
        for name, inside in chosen.items():
            one = e.among(inside)
            scores = {**one.signals, "length": one.length}
            alone, gaps = prr_intervals(
                scores, one.quality(judge), one.clusters, [("Sem-ASMI", "MSP")], RESAMPLES
            )
            rows.append(
                [e.label, name, str(int(inside.sum())), share(one.wrong(judge)),
                 *(signed(alone[score]) for score in scores),
                 signed(gaps["Sem-ASMI", "MSP"])]
            )  # fmt: skip
    columns = [
        "cell", "answers", "number", "wrong", "PRR: MSP", "Perplexity", "ASMI", "Sem-ASMI",
        "Sem-ASMI, sum", "length", "Sem-ASMI − MSP",
    ]  # fmt: skip
    return table(columns, rows)


def answered_table(cells: list[Evidence], judge: str) -> str:
    """Where many answers are empty, what other tables say of the cell without these."""
    ours = ("Sem-ASMI", "Sem-ASMI, sum")
    named = ("ASMI", *ours, "first", "passage")
    rows = []
    for e in judged(cells, judge):
        if e.empty.sum() < FEWEST:
            continue
        one = e.among(~e.empty)
        scores = {name: one.signals[name] for name in ("ASMI", *ours)}
        scores["first"] = one.score("Sem-ASMI", aggregation=FIRST)
        if one.has_source("context"):
            scores["passage"] = one.score("Sem-ASMI", "context")
        alone, _ = prr_intervals(scores, one.quality(judge), one.clusters, resamples=RESAMPLES)
        (coupled,) = couplings([one], judge)
        fragile = [
            confident_but_fragile(
                one.signals["MSP"], one.signals[name], one.wrong(judge), one.clusters, RESAMPLES
            )
            for name in ("Perplexity", *ours)
        ]
        rows.append(
            [e.label, str(int(e.empty.sum())), one.size, str(int(one.wrong(judge).sum())),
             *(signed(alone[name]) if name in alone else "" for name in named),
             plain(coupled.mean), plain(coupled.total), *(signed(found.gap) for found in fragile)]
        )  # fmt: skip
    columns = [
        "cell", "empty", "others / clusters", "wrong", "PRR: ASMI", "Sem-ASMI", "Sem-ASMI, sum",
        "Sem-ASMI, first token", "Sem-ASMI, passage", "AUROC of MI, mean", "sum",
        "confident: fragile − robust, Perplexity", "Sem-ASMI", "Sem-ASMI, sum",
    ]  # fmt: skip
    return table(columns, rows)


def sentences_table(cells: list[Evidence], judge: str) -> str:
    """Where many answers go on after their first sentence, the cell as if they had ended there."""
    ours = ("Sem-ASMI", "Sem-ASMI, sum")
    pairs = [(own, "Perplexity") for own in ours]
    rows = []
    for e in judged(cells, judge):
        if e.cut.sum() < FEWEST:
            continue
        for one in (e, e.first_sentences()):
            alone, gaps = prr_intervals(
                one.signals, one.quality(judge), one.clusters, pairs, RESAMPLES
            )
            rows.append(
                [one.label, one.size, str(int(e.cut.sum())), share(~one.wrong(judge)),
                 *(signed(alone[name]) for name in one.signals),
                 *(signed(gaps[pair]) for pair in pairs),
                 *(one.beyond_free(one.signals[name], judge) for name in ours)]
            )  # fmt: skip
    columns = [
        "cell", "answers / clusters", "of more than one sentence", "right", "PRR: MSP",
        "Perplexity", "ASMI", "Sem-ASMI", "Sem-ASMI, sum", *(f"{a} − {b}" for a, b in pairs),
        "beyond what is free, Sem-ASMI: z (p)", "sum",
    ]  # fmt: skip
    return table(columns, rows)


def judges_table(cells: list[Evidence]) -> str:
    """AUROC under every judge at every threshold; a judge of yes and no has one row."""
    rows = []
    for e in [e for e in cells if e.run in OWN_ANSWERS]:
        qualities = {judge: e.quality(judge) for judge in JUDGES if e.ranked(judge)}
        before: tuple[Any, ...] = ()
        for (judge, threshold), found in auroc_by_judge(e.signals, qualities).items():
            wrong = qualities[judge] < threshold
            seen = (judge, *wrong)
            if seen == before:
                continue
            before = seen
            values = [f"{value:.2f}" for value in found.values()]
            rows.append([e.label, JUDGES[judge][1], f"{threshold:g}", share(wrong), *values])
    columns = [
        "cell", "judge", f"right from (of {', '.join(f'{t:g}' for t in THRESHOLDS)})", "wrong",
        "AUROC: MSP", "Perplexity", "ASMI", "Sem-ASMI", "Sem-ASMI, sum",
    ]  # fmt: skip
    return table(columns, rows)


class Coupling(NamedTuple):
    """How MI goes with errors in a cell: AUROC above .5 is the paper's direction."""

    evidence: Evidence
    mean: Interval
    total: Interval
    tokens: float
    right: float
    wrong: float


def couplings(cells: list[Evidence], judge: str) -> list[Coupling]:
    found = []
    for e in judged(cells, judge):
        scores = {way: e.score("ASMI", aggregation=way) for way in ("mean", "sum")}
        apart = error_separation(e.tokens("ASMI"), scores, e.wrong(judge), e.clusters, RESAMPLES)
        mean, total = apart.auroc["mean"], apart.auroc["sum"]
        found.append(Coupling(e, mean, total, apart.mean, apart.right, apart.wrong))
    return found


def coupling_table(cells: list[Evidence], judge: str) -> str:
    columns = [
        "cell", "billion parameters", "MI of a token, nats", "in right answers", "in wrong ones",
        "AUROC of MI, mean", "sum",
    ]  # fmt: skip
    return table(
        columns,
        [
            [
                one.evidence.label,
                f"{MODELS[one.evidence.model].billions:g}",
                *(f"{value:.4f}" for value in (one.tokens, one.right, one.wrong)),
                plain(one.mean),
                plain(one.total),
            ]
            for one in couplings(cells, judge)
        ],
    )


PLACES: dict[str, Callable[[np.ndarray], float]] = {
    "first": lambda tokens: tokens[0],
    "between": lambda tokens: tokens[1:-1].mean(),
    "closing": lambda tokens: tokens[-1],
}
"""Places in an answer that ended by itself, and what stands for their tokens."""


def places_table(cells: list[Evidence], judge: str) -> str:
    """Which tokens know of errors, and which way: of MI, of its passage's part, of entropy."""
    rows = []
    for e in judged(cells, judge):
        for place, mean_of in PLACES.items():
            # An answer of two tokens has none between; one that was cut has no closing token.
            has = e.answers["closing"].to_numpy() & (e.length >= (3 if place == "between" else 2))
            one = e.among(has)
            wrong = one.wrong(judge)
            if wrong.all() or not wrong.any():
                continue
            scores = {
                name: np.array([mean_of(own) for own in tokens])
                for name, tokens in one.token_signals.items()
            }
            found = rank_signals(scores, wrong, one.clusters, resamples=RESAMPLES)
            halves = {
                name: f"{np.median(own[~wrong]):.1e} / {np.median(own[wrong]):.1e}"
                for name, own in scores.items()
            }
            areas = {name: plain(signal.auroc) for name, signal in found.items()}
            rows.append(
                [e.label, place, f"{len(wrong)} / {int(wrong.sum())}",
                 *(areas.get(name, "") for name in ("MI", "entropy", "the passage's")),
                 *(halves.get(name, "") for name in ("MI", "the passage's"))]
            )  # fmt: skip
    columns = [
        "cell", "token", "answers / wrong", "AUROC of MI", "of entropy", "of the passage's MI",
        "median MI, right / wrong", "the passage's",
    ]  # fmt: skip
    return table(columns, rows)


def flat(values: Iterable[Any]) -> np.ndarray:
    """Of all answers, what belongs to their tokens between the first and the closing one."""
    return np.concatenate([own[1:-1] for own in values])


def copying_table(cells: list[Evidence], judge: str) -> str:
    """Tokens between the first and the closing one, by whether they go on as the passage does."""
    names = ("MI", "the passage's", "entropy")
    rows = []
    for cell in judged(cells, judge):
        if "copied" not in cell.answers:
            continue
        e = cell.among(cell.answers["closing"].to_numpy())
        as_there = flat(e.answers["copied"]).astype(bool)
        wrong = flat(np.full(n, w) for n, w in zip(e.length, e.wrong(judge), strict=True))
        clusters = flat(np.full(n, c) for n, c in zip(e.length, e.clusters, strict=True))
        signals = {name: flat(tokens) for name, tokens in e.token_signals.items()}
        for place, chosen in (("as in the passage", as_there), ("otherwise", ~as_there)):
            errors = wrong[chosen]
            if errors.all() or not errors.any():
                continue
            own = {name: values[chosen] for name, values in signals.items()}
            found = rank_signals(own, errors, list(clusters[chosen]), resamples=RESAMPLES)
            medians = {name: f"{np.median(values):.1e}" for name, values in own.items()}
            areas = {name: plain(signal.auroc) for name, signal in found.items()}
            rows.append(
                [e.label, place, str(len(errors)), share(errors),
                 *(of.get(name, "") for of in (medians, areas) for name in names)]
            )  # fmt: skip
    columns = [
        "cell", "tokens that go on", "number", "in wrong answers", "median MI", "the passage's",
        "entropy", "AUROC of MI", "of the passage's", "of entropy",
    ]  # fmt: skip
    return table(columns, rows)


TICKS = (0.1, 0.3, 1, 3, 10)
MARKS = dict(zip([c for c in CELLS if c not in CHANGED], "os^DvP<>XhH*", strict=True))


def draw_coupling(found: list[Coupling], said_by: str) -> Figure:
    """AUROC of MI for errors against the size of the model, a mark a cell."""
    colours = [figures.BLUE, figures.ORANGE, figures.GREEN, figures.PURPLE, figures.AMBER,
               figures.SKY]  # fmt: skip
    with rc_context(figures.STYLE):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        kinds = [cell for cell in CELLS if any(one.evidence.cell == cell for one in found)]
        for ax, way in zip(axes, ("mean", "total"), strict=True):
            ax.axhline(0.5, color=figures.GREY, linewidth=0.8)
            for number, cell in enumerate(kinds):
                own = [one for one in found if one.evidence.cell == cell]
                # Cells of one model side by side.
                apart = 1.06 ** (number - (len(kinds) - 1) / 2)
                sizes = [MODELS[one.evidence.model].billions * apart for one in own]
                values = np.array([getattr(one, way) for one in own], dtype=float)
                reach = np.abs(values[:, 1:] - values[:, :1]).T
                ax.errorbar(sizes, values[:, 0], np.nan_to_num(reach), fmt=MARKS[cell],
                            markersize=4, linewidth=0.8, color=colours[number % len(colours)],
                            label=CELLS[cell])  # fmt: skip
            ax.set_xscale("log")
            ax.set_xlim(0.09, 12)
            ax.set_xticks(TICKS, [f"{size:g}" for size in TICKS])
            ax.minorticks_off()
            ax.set_xlabel("billion parameters")
            ax.set_title({"mean": "mean of MI over tokens", "total": "sum of MI over tokens"}[way])
        low, high = axes[0].get_ylim()
        axes[0].set_ylim(min(low, 0.35), max(high, 0.65))  # chance is always seen
        axes[0].set_ylabel("AUROC of MI for errors")
        figure.suptitle(f"right: {said_by}", fontsize=9)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    return figure


def settings_table(cells: list[Evidence], judge: str) -> str:
    """Other masks, positions and depths, beside MSP and what a cell is judged by, on their rows.

    Of cells that were measured under other settings, too.
    """
    usual = {(e.model, e.cell): e for e in judged(cells, judge)}
    measured = [e for e in cells if e.run in SETTINGS and e.ranked(judge)]
    varied = {(e.model, e.cell) for e in measured if e.run not in OWN_ANSWERS}
    rows = []
    for e in measured:
        if (e.model, e.cell) not in varied:
            continue
        answered = usual.get((e.model, e.cell))
        response = None if answered in (e, None) else answered.shared_with(e).score("Sem-ASMI")
        for depth in filter(e.has_depth, DEPTHS):
            scores = {m: e.score(m, depth=depth) for m in ("ASMI", "Sem-ASMI")}
            scores["MSP"] = e.baseline("MaximumSequenceProbability")
            pairs = [("Sem-ASMI", "MSP")]
            if response is not None:
                pairs.append(("Sem-ASMI", "response"))
            alone, gaps = prr_intervals(
                scores if response is None else scores | {"response": response},
                e.quality(judge), e.clusters, pairs, RESAMPLES,
            )  # fmt: skip
            beside = ["", ""]
            if response is not None:
                beside = [signed(gaps[pairs[1]]), correlation(scores["Sem-ASMI"], response)]
            rows.append(
                [e.label, SETTINGS[e.run], f"{depth} %", e.size,
                 *(signed(alone[name]) for name in scores), signed(gaps[pairs[0]]), *beside,
                 e.beyond_free(scores["Sem-ASMI"], judge)]
            )  # fmt: skip
    columns = [
        "cell", "masks", "depth", "answers / clusters", "PRR: ASMI", "Sem-ASMI", "MSP",
        "Sem-ASMI − MSP", "Sem-ASMI − that of response, derived, 60 %", "ρ of the two",
        "beyond what is free, Sem-ASMI: z (p)",
    ]  # fmt: skip
    return table(columns, rows)


def depths_again_table(cells: list[Evidence], judge: str) -> str:
    """The planned test of docs/worth-tables.md: other depths against 60 %, on other answers."""
    asked = []
    for e in (e for e in cells if e.run == AGAIN):
        asked.append(e.among(~_looked_at(e, cells, "depths")))
        other = ~_looked_at(e, cells, "depths", by="cluster")
        asked.append(e.among(other, "passages that were not looked at"))
    return _depths_table(asked, judge)


def depths_elsewhere_table(cells: list[Evidence], judge: str) -> str:
    """The tests of docs/evidence/depth-plan.md: 70 and 90 % against 60 %, on the other cells."""
    asked = []
    for e in deeper_cells(cells):
        asked.append(e)
        other = ~_looked_at(e, cells, "depths", AGAIN, by="cluster")
        if not other.all():
            asked.append(e.among(other, "passages that were not looked at"))
        if e.empty.sum() >= FEWEST:
            asked.append(e.among(~e.empty, "without empty answers"))
    return _depths_table(asked, judge)


def deeper_cells(cells: list[Evidence]) -> list[Evidence]:
    """What docs/evidence/depth-plan.md asks, with the same answers' scores at 60 %.

    Raises:
        ValueError: these are not there, or are of other answers.
    """
    found = []
    for e in (e for e in cells if e.run == DEEPER):
        usual = others(e, cells, OWN_ANSWERS)
        if not usual:
            raise ValueError(
                f"{e.model}/{e.cell}.{e.run}.parquet has nothing at 60 % beside it: the cell's own "
                f"answers are missing ({e.cell}.sources.parquet)"
            )
        found.append(usual[0].joined_with(e).among(~_looked_at(e, cells, "depths", AGAIN)))
    return found


def depths_free_table(cells: list[Evidence]) -> str:
    """Rank correlation of scores at each depth with what is free, and what empty answers get."""
    rows = []
    for e in deeper_cells(cells):
        for depth in filter(e.has_depth, DEPTHS):
            found = [
                correlation(e.score(method, depth=depth), e.baseline(free))
                for free in ("MeanTokenEntropy", "Perplexity")
                for method in ("ASMI", "Sem-ASMI")
            ]
            own = e.score("Sem-ASMI", depth=depth)
            above = share(own[e.empty] > np.median(own)) if e.empty.sum() >= FEWEST else ""
            rows.append([e.label, f"{depth} %", e.size, *found, above])
    columns = [
        "cell", "depth", "answers / clusters", "ρ with mean token entropy: ASMI", "Sem-ASMI",
        "ρ with perplexity: ASMI", "Sem-ASMI", "empty answers above the median of Sem-ASMI",
    ]  # fmt: skip
    return table(columns, rows)


def _looked_at(e: Evidence, cells: list[Evidence], *runs: str, by: str = "id") -> np.ndarray:
    """(N,) which of its answers, or clusters, other runs of the cell have scored as deep."""
    seen = [own for one in others(e, cells, runs) for own in one.answers[by]]
    return e.answers[by].isin(seen).to_numpy()


def _depths_table(asked: list[Evidence], judge: str) -> str:
    """Adjusted over whole cells and the depths that were planned."""
    usual, *deeper = DEPTHS
    measured = [(e, d) for e in asked if e.ranked(judge) for d in filter(e.has_depth, deeper)]
    tests = [
        PlannedTests.of(e, judge, e.score("Sem-ASMI", depth=d), e.score("Sem-ASMI", depth=usual))
        for e, d in measured
    ]
    planned = (not e.which and depth in (70, 90) for e, depth in measured)
    pairs = [*zip(tests, planned, strict=True)]
    p_difference = holm([test.p_difference if own else np.nan for test, own in pairs])
    p_added = holm([test.p_added if own else np.nan for test, own in pairs])
    rows = []
    for i, ((e, depth), test) in enumerate(zip(measured, tests, strict=True)):
        scores = {
            "usual": e.score("ASMI", depth=usual),
            "deeper": e.score("ASMI", depth=depth),
            "Sem-ASMI": e.score("Sem-ASMI", depth=depth),
            "MSP": e.baseline("MaximumSequenceProbability"),
            "Perplexity": e.baseline("Perplexity"),
        }
        free = [("Sem-ASMI", name) for name in ("MSP", "Perplexity")]
        alone, gaps = prr_intervals(scores, e.quality(judge), e.clusters, free, RESAMPLES)
        rows.append(
            [e.label, f"{depth} %", e.size, str(int(e.wrong(judge).sum())), signed(alone["usual"]),
             signed(alone["deeper"]), signed(test.beside), signed(test.own), signed(alone["MSP"]),
             signed(alone["Perplexity"]), signed(test.difference), p_text(p_difference[i]),
             *(signed(gaps[pair]) for pair in free),
             z_text(test.statistic), p_text(p_added[i])]
        )  # fmt: skip
    columns = [
        "cell", "depth", "answers / clusters", "wrong", "PRR of ASMI at 60 %", "at that depth",
        "PRR of Sem-ASMI at 60 %", "at that depth", "MSP", "Perplexity",
        "Sem-ASMI − that at 60 %", "p (1), Holm", "Sem-ASMI − MSP", "Sem-ASMI − Perplexity",
        "beyond what is free, z", "p (2), Holm",
    ]  # fmt: skip
    return table(columns, rows)


def baselines_table(cells: list[Evidence], judge: str) -> str:
    """All methods of the runs that have more than ours, each run's on its own rows."""
    rows = []
    for e in cells:
        if e.run not in ("baselines", "sampled", "benchmark") or not e.ranked(judge):
            continue
        names = [name.removeprefix("score ") for name in e.answers if name.startswith("score ")]
        scores = {name: e.baseline(name) for name in names}
        scores.setdefault("MaximumSequenceProbability", e.baseline("MaximumSequenceProbability"))
        usable = {name: own for name, own in scores.items() if np.isfinite(own).all()}
        pairs = [(name, "MaximumSequenceProbability") for name in usable]
        alone, gaps = prr_intervals(usable, e.quality(judge), e.clusters, pairs, RESAMPLES)
        for name in sorted(usable, key=lambda name: -alone[name].value):
            over = "" if name == pairs[0][1] else signed(gaps[name, pairs[0][1]])
            area = f"{auroc(usable[name], e.wrong(judge)):.2f}"
            rows.append([e.label, e.size, name, signed(alone[name]), over, area])
    columns = ["cell", "answers / clusters", "method", "PRR", "− MSP", "AUROC"]
    return table(columns, rows)


TABLES: dict[str, Callable[[list[Evidence]], str]] = {
    "judges": judges_table,
    "depths free": depths_free_table,
    "concentration": concentration_table,
    "probe": probe_table,
    "probe differences": partial(probe_table, kept="causal_differences", sign="+"),
}
FIGURES: dict[str, str] = {}
"""Name of a file beside the evidence -> judge."""
for _judge in JUDGES:
    TABLES[f"source {_judge}"] = partial(source_table, judge=_judge)
    TABLES[f"source raw {_judge}"] = partial(source_table, judge=_judge, method="ASMI")
    TABLES[f"source elsewhere {_judge}"] = partial(elsewhere_table, judge=_judge)
    TABLES[f"trial {_judge}"] = partial(trial_table, judge=_judge)
    TABLES[f"arms {_judge}"] = partial(arms_table, judge=_judge)
    TABLES[f"arms added {_judge}"] = partial(arms_added_table, judge=_judge)
    TABLES[f"falsifier {_judge}"] = partial(verdict_table, judge=_judge)
    TABLES[f"falsifier raw {_judge}"] = partial(verdict_table, judge=_judge, method="ASMI")
    TABLES[f"glance {_judge}"] = partial(worth_table, judge=_judge, raw=(), ours=("Sem-ASMI",))
    FIGURES[f"coupling-{_judge}.png"] = _judge
    for _name, _make in {
        "worth": worth_table, "together": together_table, "measures": measures_table,
        "aggregation": aggregation_table, "places": places_table, "copying": copying_table,
        "quadrants": quadrants_table, "strata": strata_table, "answered": answered_table,
        "sentences": sentences_table, "coupling": coupling_table, "settings": settings_table,
        "baselines": baselines_table, "contenders": contenders_table,
        "depths again": depths_again_table, "depths elsewhere": depths_elsewhere_table,
    }.items():  # fmt: skip
        TABLES[f"{_name} {_judge}"] = partial(_make, judge=_judge)
