"""Tables of the results pages: does the score help, and where does it come from?"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from evidence import (
    ALL_AGGREGATIONS,
    CLOSED,
    CORRECTNESS_LABELS,
    DEEPER,
    FIRST,
    MAIN_RUNS,
    MIN_ANSWERS,
    MODELS,
    PARAMETERS,
    REPEATED,
    Evidence,
    Table,
    added_text,
    correlation,
    labelled,
    p_text,
    runs_like,
    share,
    signed,
    table,
    unsigned,
    z_text,
)
from heads import (
    concentration_table,
    conditions_added_table,
    conditions_table,
    probe_table,
    verdict_table,
)
from stacked import REFITS, stacked_gain

from lm_polygraph_asmi.analysis import (
    AddedInformation,
    Interval,
    Labelled,
    adds_over_settings,
    auroc,
    auroc_by_label,
    confident_but_fragile,
    error_separation,
    holm,
    prr_draws,
    prr_intervals,
    rank_signals,
    strata,
)
from lm_polygraph_asmi.analysis.clusters import percentile_interval, two_sided
from lm_polygraph_asmi.analysis.prr import normalised_prr

RESAMPLES = 2000
DEPTHS = (60, 70, 80, 90)
TRIAL = Path(__file__).parents[2] / "docs/evidence/qwen15-trial.csv"


@dataclass(frozen=True)
class PlannedTests:
    """Tests of docs/evidence/source-plan.md and depth-plan.md on a setting with one label.

    Attributes:
        prr, other_prr, difference: PRR of a score, of another score, and their difference.
        p_prr, p_difference: p-values of `prr` and `difference` against 0.
        statistic, p_added: gain beyond the free baselines; NaN with too few errors.
    """

    evidence: Evidence
    prr: Interval
    other_prr: Interval
    difference: Interval
    p_prr: float
    p_difference: float
    statistic: float
    p_added: float

    @classmethod
    def of(
        cls, evidence: Evidence, correctness: str, scores: np.ndarray, other_scores: np.ndarray
    ) -> "PlannedTests":
        quality = evidence.quality(correctness)
        prr = [normalised_prr(values, quality) for values in (scores, other_scores)]
        draws = prr_draws([scores, other_scores], evidence.labels(correctness, RESAMPLES)).T
        difference = draws[0] - draws[1]
        added = evidence.added(scores, correctness)
        return cls(
            evidence,
            percentile_interval(prr[0], draws[0]),
            percentile_interval(prr[1], draws[1]),
            percentile_interval(prr[0] - prr[1], difference),
            two_sided(draws[0]),
            two_sided(difference),
            *((added.statistic, added.p_value) if added else (np.nan, np.nan)),
        )


PLANNED = {
    ("smollm2", "xquad-few-shot"), ("gemma", "xquad"), ("qwen05", "xquad"), ("qwen15", "xquad"),
    *((model, "babi") for model in ("smollm2", "gemma", "qwen05", "qwen15")),
}  # fmt: skip


def source_table(evidence: list[Evidence], correctness: str, method: str = "Sem-ASMI") -> Table:
    planned = [e for e in labelled(evidence, correctness) if (e.model, e.setting) in PLANNED]
    tests = [
        PlannedTests.of(e, correctness, e.score(method, "context"), e.score(method))
        for e in planned
    ]
    primary = method == "Sem-ASMI"  # the plan corrects no other p-values
    p_values = [[getattr(test, p) for test in tests] for p in ("p_prr", "p_difference", "p_added")]
    adjusted = [holm(values) if primary else values for values in p_values] if tests else []
    correction = "Holm" if primary else "uncorrected"
    columns = [
        "setting",
        "answers / clusters",
        "wrong",
        f"PRR of {method}, all sources",
        f"PRR of {method}, passage",
        f"p of the passage's PRR ({correction})",
        "PRR, passage − all sources",
        f"p of that difference ({correction})",
        "gain beyond free baselines, z",
        f"gain beyond free baselines, p ({correction})",
    ]
    return table(
        columns,
        [
            [
                test.evidence.label,
                test.evidence.size,
                str(int(test.evidence.wrong(correctness).sum())),
                signed(test.other_prr),
                signed(test.prr),
                p_text(adjusted[0][i]),
                signed(test.difference),
                p_text(adjusted[1][i]),
                z_text(test.statistic),
                p_text(adjusted[2][i]),
            ]
            for i, test in enumerate(tests)
        ],
    )


def elsewhere_table(evidence: list[Evidence], correctness: str) -> Table:
    """PRR when masks remove all sources, the passage, or all but the passage; not planned."""
    rows = []
    for e in labelled(evidence, correctness):
        if not e.has_source("elsewhere"):
            continue
        sources = ("all", "context", "elsewhere")
        scores = {source: e.score("Sem-ASMI", source) for source in sources}
        free = {"MSP": e.signals["MSP"], "Perplexity": e.signals["Perplexity"]}
        pairs = [("elsewhere", name) for name in free]
        scores |= free
        prr, gaps = prr_intervals(scores, e.labels(correctness, RESAMPLES), pairs)
        shown = [signed(prr[name]) for name in scores]
        rows.append([e.label, *shown, *(signed(gaps[pair]) for pair in pairs)])
    columns = [
        "setting",
        "PRR of Sem-ASMI, all sources",
        "PRR of Sem-ASMI, passage",
        "PRR of Sem-ASMI, elsewhere",
        "PRR of MSP",
        "PRR of Perplexity",
        "PRR, elsewhere − MSP",
        "PRR, elsewhere − Perplexity",
    ]
    return table(columns, rows)


def contenders_table(evidence: list[Evidence], correctness: str) -> Table:
    """PRR of measures of how much an answer depends on its passage; higher = more."""
    rows = []
    for e in labelled(evidence, correctness):
        if "asmi_source_kl_d60_context" not in e.answers:
            continue
        prr, _ = prr_intervals(e.dependence, e.labels(correctness, RESAMPLES))
        for name, score in e.dependence.items():
            rows.append(
                [e.label, name, f"{np.median(score):.3g}", signed(prr[name]),
                 e.beyond_free(score, correctness)]
            )  # fmt: skip
    columns = [
        "setting",
        "dependence on the passage",
        "median",
        "PRR",
        "gain beyond free baselines: z (p)",
    ]
    return table(columns, rows)


def signals_table(
    evidence: list[Evidence],
    correctness: str,
    raw: tuple[str, ...] = ("ASMI",),
    asmi_methods: tuple[str, ...] = ("Sem-ASMI", "Sem-ASMI, sum"),
) -> Table:
    """PRR of each signal, and gains of ASMI methods over and beyond free baselines."""
    free = ("MSP", "Perplexity")
    pairs = [(method, baseline) for method in asmi_methods for baseline in free]
    rows = []
    for e in labelled(evidence, correctness):
        scores = {name: e.signals[name] for name in (*free, *raw, *asmi_methods)}
        prr, gaps = prr_intervals(scores, e.labels(correctness, RESAMPLES), pairs)
        rows.append(
            [
                e.label,
                e.size,
                share(~e.wrong(correctness)),
                *(signed(prr[name]) for name in scores),
                *(signed(gaps[pair]) for pair in pairs),
                *(e.beyond_free(scores[name], correctness) for name in (*raw, *asmi_methods)),
            ]
        )
    columns = [
        "setting",
        "answers / clusters",
        "correct",
        *(f"PRR of {name}" for name in (*free, *raw, *asmi_methods)),
        *(f"PRR, {method} − {baseline}" for method, baseline in pairs),
        *(f"gain beyond free baselines, {name}: z (p)" for name in (*raw, *asmi_methods)),
    ]
    return table(columns, rows)


def trial_table(evidence: list[Evidence], correctness: str) -> Table:
    """The setting that shares questions with a trial (docs/concepts/guarantee.md), in two parts."""
    trial = set(pd.read_csv(TRIAL)["id"])
    rows = []
    for e in evidence:
        if (e.model, e.setting, e.run) == ("qwen15", "xquad-few-shot", "sources"):
            in_trial = e.answers["id"].isin(trial).to_numpy()
            rows += [
                e.select(in_trial, "asked in the trial"),
                e.select(~in_trial, "not asked in the trial"),
            ]
    return signals_table(rows, correctness, raw=(), asmi_methods=("Sem-ASMI",))


def pooled_table(evidence: list[Evidence], correctness: str) -> Table:
    """Gain beyond the free baselines over all settings with a passage, and over parts of them."""

    def tested(
        settings: Iterable[Evidence], method: str = "Sem-ASMI", **options: Any
    ) -> dict[Evidence, AddedInformation]:
        scores = {e: e.score(method, **options) for e in settings}
        tests = {e: e.added(scores[e], correctness) for e in scores}
        return {e: test for e, test in tests.items() if test}

    with_passage = [e for e in labelled(evidence, correctness) if e.setting not in CLOSED]
    deeper = [e for e in deeper_runs(evidence) if e.ranked(correctness)]
    sem = tested(with_passage)
    tests_by_score = {
        "ASMI": tested(with_passage, "ASMI"),
        "Sem-ASMI": sem,
        **{
            f"Sem-ASMI, {name} only": {e: test for e, test in sem.items() if e.data_set == name}
            for name in dict.fromkeys(e.data_set for e in sem)
        },
        "Sem-ASMI, without empty answers": tested(e.select(~e.empty) for e in with_passage),
        "Sem-ASMI, sum": tested(with_passage, aggregation="sum"),
        "Sem-ASMI, first token": tested(with_passage, aggregation=FIRST),
        **{
            f"Sem-ASMI at {d} %": tested((e for e in deeper if e.has_depth(d)), depth=d)
            for d in DEPTHS
        },
    }
    rows = []
    for name, tests in tests_by_score.items():
        if not tests:
            continue
        pooled = adds_over_settings(list(tests.values()))
        z = [test.statistic for test in tests.values()]
        rows.append(
            [name, str(len(tests)), f"{pooled.n} / {pooled.clusters}",
             f"{z_text(min(z))} to {z_text(max(z))}", str(sum(value < 0 for value in z)),
             added_text(pooled)]
        )  # fmt: skip
    columns = [
        "score", "settings", "answers / clusters", "z of a setting", "settings with negative z",
        "all settings together: z (p)",
    ]  # fmt: skip
    return table(columns, rows)


def measures_table(evidence: list[Evidence], correctness: str) -> Table:
    rows = []
    for e in labelled(evidence, correctness):
        wrong = e.wrong(correctness)
        if wrong.all() or not wrong.any():
            continue
        ranked = rank_signals(e.signals, Labelled(wrong, e.clusters, resamples=RESAMPLES))
        for name, signal in ranked.items():
            stacked = ["", "", ""]
            if name.startswith(("ASMI", "Sem")):
                try:
                    gain = stacked_gain(e.signals[name], e.free_baselines, wrong, e.clusters,
                                        e.quality(correctness), REFITS)  # fmt: skip
                    stacked = [*map(signed, (gain.log_loss, gain.auroc, gain.prr))]
                except ValueError:
                    stacked = ["too few errors"] * 3
            rows.append(
                [e.label, name, unsigned(signal.auroc), unsigned(signal.augrc, 3), *stacked]
            )
    columns = [
        "setting", "score", "AUROC", "AUGRC (lower is better)", "change of log loss in a stack",
        "change of AUROC in a stack", "change of PRR in a stack",
    ]  # fmt: skip
    return table(columns, rows)


def aggregation_table(evidence: list[Evidence], correctness: str) -> Table:
    rows = []
    for e in labelled(evidence, correctness):
        for method in ("ASMI", "Sem-ASMI", "surprisal", "entropy"):
            scores = {name: e.score(method, aggregation=name) for name in ALL_AGGREGATIONS}
            prr, _ = prr_intervals(scores, e.labels(correctness, RESAMPLES))
            with_length = " / ".join(correlation(values, e.length) for values in scores.values())
            rows.append([e.label, method, *(signed(prr[name]) for name in scores), with_length])
    length_column = f"rank correlation with length, {' / '.join(ALL_AGGREGATIONS)}"
    columns = [
        "setting",
        "signal of a token",
        *(f"PRR, {aggregation}" for aggregation in ALL_AGGREGATIONS),
        length_column,
    ]
    return table(columns, rows)


def quadrants_table(evidence: list[Evidence], correctness: str) -> Table:
    rows = []
    for e in labelled(evidence, correctness):
        for name in ("Perplexity", "Sem-ASMI", "Sem-ASMI, sum"):  # is a free baseline as good?
            quadrants = confident_but_fragile(
                e.signals["MSP"],
                e.signals[name],
                e.labels(correctness, RESAMPLES),
            )
            rates = zip(quadrants.error_rate.ravel(), quadrants.count.ravel(), strict=True)
            shown = [f"{rate:.0%} of {count}" if count else "none" for rate, count in rates]
            rows.append([e.label, name, *shown, signed(quadrants.gap)])
    columns = [
        "setting", "score", "wrong if confident and robust", "wrong if confident and fragile",
        "wrong if unsure and robust", "wrong if unsure and fragile",
        "error rate if confident, fragile − robust",
    ]  # fmt: skip
    return table(columns, rows)


def strata_table(evidence: list[Evidence], correctness: str) -> Table:
    """Within thirds by length, and without empty answers."""
    rows, names = [], ()
    for e in labelled(evidence, correctness):
        stratum = strata(e.length)
        subsets = {}
        for number in range(stratum.max() + 1):
            lengths = e.length[stratum == number]
            subsets[f"{lengths.min()} to {lengths.max()} tokens"] = stratum == number
        if e.empty.any():
            subsets["not empty"] = ~e.empty
            subsets["empty"] = e.empty
        for name, selected in subsets.items():
            part = e.select(selected)
            scores = {**part.signals, "length": part.length}
            names = tuple(scores)
            prr, gaps = prr_intervals(
                scores,
                part.labels(correctness, RESAMPLES),
                [("Sem-ASMI", "MSP")],
            )
            rows.append(
                [e.label, name, str(int(selected.sum())), share(part.wrong(correctness)),
                 *(signed(prr[score]) for score in scores),
                 signed(gaps["Sem-ASMI", "MSP"])]
            )  # fmt: skip
    columns = [
        "setting", "which answers", "answers", "wrong", *(f"PRR of {score}" for score in names),
        "PRR, Sem-ASMI − MSP",
    ]  # fmt: skip
    return table(columns, rows)


def answered_table(evidence: list[Evidence], correctness: str) -> Table:
    """Settings with many empty answers: the results without these."""
    asmi_methods = ("Sem-ASMI", "Sem-ASMI, sum")
    named = ("ASMI", *asmi_methods, "first", "passage")
    rows = []
    for e in labelled(evidence, correctness):
        if e.empty.sum() < MIN_ANSWERS:
            continue
        answered = e.select(~e.empty)
        scores = {name: answered.signals[name] for name in ("ASMI", *asmi_methods)}
        scores["first"] = answered.score("Sem-ASMI", aggregation=FIRST)
        if answered.has_source("context"):
            scores["passage"] = answered.score("Sem-ASMI", "context")
        prr, _ = prr_intervals(
            scores,
            answered.labels(correctness, RESAMPLES),
        )
        (coupled,) = couplings([answered], correctness)
        fragile = [
            confident_but_fragile(
                answered.signals["MSP"],
                answered.signals[name],
                answered.labels(correctness, RESAMPLES),
            )
            for name in ("Perplexity", *asmi_methods)
        ]
        rows.append(
            [e.label, str(int(e.empty.sum())), answered.size,
             str(int(answered.wrong(correctness).sum())),
             *(signed(prr[name]) if name in prr else "" for name in named),
             unsigned(coupled.mean), unsigned(coupled.total),
             *(signed(quadrants.gap) for quadrants in fragile)]
        )  # fmt: skip
    columns = [
        "setting", "empty answers", "other answers / clusters", "wrong", "PRR of ASMI",
        "PRR of Sem-ASMI", "PRR of Sem-ASMI, sum", "PRR of Sem-ASMI, first token",
        "PRR of Sem-ASMI, passage", "AUROC of MI, mean", "AUROC of MI, sum",
        *(f"error rate if confident, fragile − robust by {name}"
          for name in ("Perplexity", *asmi_methods)),
    ]  # fmt: skip
    return table(columns, rows)


def sentences_table(evidence: list[Evidence], correctness: str) -> Table:
    """Settings with many answers of several sentences: whole answers, and first sentences only."""
    asmi_methods = ("Sem-ASMI", "Sem-ASMI, sum")
    pairs = [(method, "Perplexity") for method in asmi_methods]
    rows = []
    for e in labelled(evidence, correctness):
        if e.multi_sentence.sum() < MIN_ANSWERS:
            continue
        for part in (e, e.first_sentences()):
            prr, gaps = prr_intervals(part.signals, part.labels(correctness, RESAMPLES), pairs)
            rows.append(
                [part.label, part.size, str(int(e.multi_sentence.sum())),
                 share(~part.wrong(correctness)),
                 *(signed(prr[name]) for name in part.signals),
                 *(signed(gaps[pair]) for pair in pairs),
                 *(part.beyond_free(part.signals[name], correctness) for name in asmi_methods)]
            )  # fmt: skip
    columns = [
        "setting",
        "answers / clusters",
        "answers of more than one sentence",
        "correct",
        "PRR of MSP",
        "PRR of Perplexity",
        "PRR of ASMI",
        "PRR of Sem-ASMI",
        "PRR of Sem-ASMI, sum",
        *(f"PRR, {a} − {b}" for a, b in pairs),
        *(f"gain beyond free baselines, {name}: z (p)" for name in asmi_methods),
    ]
    return table(columns, rows)


def correctness_labels_table(evidence: list[Evidence]) -> Table:
    """AUROC by correctness label and threshold; thresholds that change no label have no row."""
    rows = []
    for e in [e for e in evidence if e.run in MAIN_RUNS]:
        qualities = {
            correctness: e.quality(correctness)
            for correctness in CORRECTNESS_LABELS
            if e.ranked(correctness)
        }
        previous: tuple[Any, ...] = ()
        for (correctness, threshold), areas in auroc_by_label(e.signals, qualities).items():
            wrong = qualities[correctness] < threshold
            current = (correctness, *wrong)
            if current == previous:
                continue
            previous = current
            values = [f"{value:.2f}" for value in areas.values()]
            rows.append(
                [
                    e.label,
                    CORRECTNESS_LABELS[correctness][1],
                    f"{threshold:g}",
                    share(wrong),
                    *values,
                ]
            )
    signals = ("MSP", "Perplexity", "ASMI", "Sem-ASMI", "Sem-ASMI, sum")
    columns = [
        "setting", "correctness label", "correct from", "wrong",
        *(f"AUROC of {name}" for name in signals),
    ]  # fmt: skip
    return table(columns, rows)


class Coupling(NamedTuple):
    """How MI relates to errors in a setting: AUROC above .5 is the paper's direction."""

    evidence: Evidence
    mean: Interval
    total: Interval
    tokens: float
    right: float
    wrong: float


def couplings(evidence: list[Evidence], correctness: str) -> list[Coupling]:
    by_setting = []
    for e in labelled(evidence, correctness):
        scores = {
            aggregation: e.score("ASMI", aggregation=aggregation) for aggregation in ("mean", "sum")
        }
        mi = error_separation(e.tokens("ASMI"), scores, e.labels(correctness, RESAMPLES))
        mean, total = mi.auroc["mean"], mi.auroc["sum"]
        by_setting.append(Coupling(e, mean, total, mi.mean, mi.right, mi.wrong))
    return by_setting


def coupling_table(evidence: list[Evidence], correctness: str) -> Table:
    columns = [
        "setting", "billion parameters", "MI of a token (nats)", "MI in correct answers",
        "MI in wrong answers", "AUROC of MI, mean", "AUROC of MI, sum",
    ]  # fmt: skip
    return table(
        columns,
        [
            [
                coupling.evidence.label,
                f"{MODELS[coupling.evidence.model].billions:g}",
                *(f"{value:.4f}" for value in (coupling.tokens, coupling.right, coupling.wrong)),
                unsigned(coupling.mean),
                unsigned(coupling.total),
            ]
            for coupling in couplings(evidence, correctness)
        ],
    )


PLACES: dict[str, Callable[[np.ndarray], float]] = {
    "first": lambda tokens: tokens[0],
    "between": lambda tokens: tokens[1:-1].mean(),
    "closing": lambda tokens: tokens[-1],
}
"""Position in an answer that ended by itself -> its score, from those of the tokens."""


def places_table(evidence: list[Evidence], correctness: str) -> Table:
    """AUROC of MI, of MI from the passage and of entropy, by token position."""
    rows = []
    for e in labelled(evidence, correctness):
        for place, summarise in PLACES.items():
            # Answers of two tokens have none between; truncated answers have no closing token.
            min_length = 3 if place == "between" else 2
            subset = e.select(e.answers["closing"].to_numpy() & (e.length >= min_length))
            wrong = subset.wrong(correctness)
            if wrong.all() or not wrong.any():
                continue
            scores = {
                name: np.array([summarise(values) for values in tokens])
                for name, tokens in subset.token_signals.items()
            }
            ranked = rank_signals(scores, Labelled(wrong, subset.clusters, resamples=RESAMPLES))
            medians = {
                name: f"{np.median(values[~wrong]):.1e} / {np.median(values[wrong]):.1e}"
                for name, values in scores.items()
            }
            areas = {name: unsigned(signal.auroc) for name, signal in ranked.items()}
            rows.append(
                [e.label, place, f"{len(wrong)} / {int(wrong.sum())}",
                 *(areas.get(name, "") for name in ("MI", "entropy", "the passage's")),
                 *(medians.get(name, "") for name in ("MI", "the passage's"))]
            )  # fmt: skip
    columns = [
        "setting", "token", "answers / wrong", "AUROC of MI", "AUROC of entropy",
        "AUROC of MI from the passage", "median MI, correct / wrong",
        "median MI from the passage, correct / wrong",
    ]  # fmt: skip
    return table(columns, rows)


def flat(values: Iterable[Any]) -> np.ndarray:
    """Values of all answers' tokens, without the first and the closing token."""
    return np.concatenate([tokens[1:-1] for tokens in values])


def copying_table(evidence: list[Evidence], correctness: str) -> Table:
    """Tokens between the first and the closing one, by whether they continue the passage."""
    names = ("MI", "the passage's", "entropy")
    rows = []
    for e in labelled(evidence, correctness):
        if "copied" not in e.answers:
            continue
        e = e.select(e.answers["closing"].to_numpy())
        copied = flat(e.answers["copied"]).astype(bool)
        wrong = flat(np.full(n, w) for n, w in zip(e.length, e.wrong(correctness), strict=True))
        clusters = flat(np.full(n, c) for n, c in zip(e.length, e.clusters, strict=True))
        signals = {name: flat(tokens) for name, tokens in e.token_signals.items()}
        for place, selected in (("as in the passage", copied), ("otherwise", ~copied)):
            errors = wrong[selected]
            if errors.all() or not errors.any():
                continue
            scores = {name: values[selected] for name, values in signals.items()}
            ranked = rank_signals(
                scores, Labelled(errors, list(clusters[selected]), resamples=RESAMPLES)
            )
            medians = {name: f"{np.median(values):.1e}" for name, values in scores.items()}
            areas = {name: unsigned(signal.auroc) for name, signal in ranked.items()}
            rows.append(
                [e.label, place, str(len(errors)), share(errors),
                 *(of.get(name, "") for of in (medians, areas) for name in names)]
            )  # fmt: skip
    columns = [
        "setting", "which tokens", "tokens", "in wrong answers", "median MI",
        "median MI from the passage", "median entropy", "AUROC of MI",
        "AUROC of MI from the passage", "AUROC of entropy",
    ]  # fmt: skip
    return table(columns, rows)


def settings_table(evidence: list[Evidence], correctness: str) -> Table:
    """PRR of other masks, scopes and depths, against MSP and the main run on the same answers."""
    main_runs = {(e.model, e.setting): e for e in labelled(evidence, correctness)}
    measured = [e for e in evidence if e.run in PARAMETERS and e.ranked(correctness)]
    varied = {(e.model, e.setting) for e in measured if e.run not in MAIN_RUNS}
    rows = []
    for e in measured:
        if (e.model, e.setting) not in varied:
            continue
        main_run = main_runs.get((e.model, e.setting))
        response = None if main_run in (e, None) else main_run.shared_with(e).score("Sem-ASMI")
        for depth in filter(e.has_depth, DEPTHS):
            scores = {method: e.score(method, depth=depth) for method in ("ASMI", "Sem-ASMI")}
            scores["MSP"] = e.baseline("MaximumSequenceProbability")
            pairs = [("Sem-ASMI", "MSP")]
            if response is not None:
                pairs.append(("Sem-ASMI", "response"))
            compared = scores if response is None else scores | {"response": response}
            prr, gaps = prr_intervals(compared, e.labels(correctness, RESAMPLES), pairs)
            comparison = ["", ""]
            if response is not None:
                comparison = [signed(gaps[pairs[1]]), correlation(scores["Sem-ASMI"], response)]
            rows.append(
                [e.label, PARAMETERS[e.run], f"{depth} %", e.size,
                 *(signed(prr[name]) for name in scores), signed(gaps[pairs[0]]), *comparison,
                 e.beyond_free(scores["Sem-ASMI"], correctness)]
            )  # fmt: skip
    columns = [
        "setting", "masks", "depth", "answers / clusters", "PRR of ASMI", "PRR of Sem-ASMI",
        "PRR of MSP", "PRR, Sem-ASMI − MSP",
        "PRR, Sem-ASMI − that of scope response, derived p and S, 60 %",
        "rank correlation of these two", "gain beyond free baselines, Sem-ASMI: z (p)",
    ]  # fmt: skip
    return table(columns, rows)


def depths_again_table(evidence: list[Evidence], correctness: str) -> Table:
    """The planned test of docs/results/summary.md: other depths against 60 %, on new answers."""
    subsets = []
    for e in (e for e in evidence if e.run == REPEATED):
        subsets.append(e.select(~_scored_before(e, evidence, "depths")))
        new_passages = ~_scored_before(e, evidence, "depths", by="cluster")
        subsets.append(e.select(new_passages, "passages that were not looked at"))
    return _depths_table(subsets, correctness)


def depths_elsewhere_table(evidence: list[Evidence], correctness: str) -> Table:
    """The tests of docs/evidence/depth-plan.md: 70 and 90 % against 60 %, on the other settings."""
    subsets = []
    for e in deeper_runs(evidence):
        subsets.append(e)
        new_passages = ~_scored_before(e, evidence, "depths", REPEATED, by="cluster")
        if not new_passages.all():
            subsets.append(e.select(new_passages, "passages that were not looked at"))
        if e.empty.sum() >= MIN_ANSWERS:
            subsets.append(e.select(~e.empty, "without empty answers"))
    return _depths_table(subsets, correctness)


def deeper_runs(evidence: list[Evidence]) -> list[Evidence]:
    """Runs of docs/evidence/depth-plan.md, with the scores of the same answers at 60 %.

    Raises:
        ValueError: the scores at 60 % are missing, or belong to other answers.
    """
    joined = []
    for e in (e for e in evidence if e.run == DEEPER):
        main_runs = runs_like(e, evidence, MAIN_RUNS)
        if not main_runs:
            raise ValueError(
                f"no scores at 60 % for {e.model}/{e.setting}.{e.run}.parquet: "
                f"{e.setting}.sources.parquet is missing"
            )
        joined.append(
            main_runs[0].joined_with(e).select(~_scored_before(e, evidence, "depths", REPEATED))
        )
    return joined


def depths_free_table(evidence: list[Evidence]) -> Table:
    """Rank correlation of scores with free baselines by depth, and scores of empty answers."""
    rows = []
    for e in deeper_runs(evidence):
        for depth in filter(e.has_depth, DEPTHS):
            correlations = [
                correlation(e.score(method, depth=depth), e.baseline(baseline))
                for baseline in ("MeanTokenEntropy", "Perplexity")
                for method in ("ASMI", "Sem-ASMI")
            ]
            sem = e.score("Sem-ASMI", depth=depth)
            above = share(sem[e.empty] > np.median(sem)) if e.empty.sum() >= MIN_ANSWERS else ""
            rows.append([e.label, f"{depth} %", e.size, *correlations, above])
    columns = [
        "setting", "depth", "answers / clusters",
        *(f"rank correlation of {method} with {baseline}"
          for baseline in ("mean token entropy", "perplexity") for method in ("ASMI", "Sem-ASMI")),
        "empty answers above the median of Sem-ASMI",
    ]  # fmt: skip
    return table(columns, rows)


def _scored_before(e: Evidence, evidence: list[Evidence], *runs: str, by: str = "id") -> np.ndarray:
    """(N,) whether these runs of the setting scored the answer, or another of its cluster."""
    scored = [value for run in runs_like(e, evidence, runs) for value in run.answers[by]]
    return e.answers[by].isin(scored).to_numpy()


def _depths_table(subsets: list[Evidence], correctness: str) -> Table:
    """Other depths against 60 %; Holm's correction is over planned depths and complete settings."""
    base_depth, *deeper = DEPTHS
    ranked = [e for e in subsets if e.ranked(correctness)]
    measured = [(e, d) for e in ranked for d in filter(e.has_depth, deeper)]
    tests = [
        PlannedTests.of(
            e, correctness, e.score("Sem-ASMI", depth=d), e.score("Sem-ASMI", depth=base_depth)
        )
        for e, d in measured
    ]
    planned = (not e.subset and depth in (70, 90) for e, depth in measured)
    pairs = [*zip(tests, planned, strict=True)]
    p_difference = holm([test.p_difference if is_planned else np.nan for test, is_planned in pairs])
    p_added = holm([test.p_added if is_planned else np.nan for test, is_planned in pairs])
    rows = []
    for i, ((e, depth), test) in enumerate(zip(measured, tests, strict=True)):
        scores = {
            "60 %": e.score("ASMI", depth=base_depth),
            "deeper": e.score("ASMI", depth=depth),
            "Sem-ASMI": e.score("Sem-ASMI", depth=depth),
            "MSP": e.baseline("MaximumSequenceProbability"),
            "Perplexity": e.baseline("Perplexity"),
        }
        free = [("Sem-ASMI", name) for name in ("MSP", "Perplexity")]
        prr, gaps = prr_intervals(scores, e.labels(correctness, RESAMPLES), free)
        rows.append(
            [e.label, f"{depth} %", e.size, str(int(e.wrong(correctness).sum())),
             signed(prr["60 %"]), signed(prr["deeper"]), signed(test.other_prr),
             signed(test.prr), signed(prr["MSP"]), signed(prr["Perplexity"]),
             signed(test.difference), p_text(p_difference[i]),
             *(signed(gaps[pair]) for pair in free),
             z_text(test.statistic), p_text(p_added[i])]
        )  # fmt: skip
    columns = [
        "setting", "depth", "answers / clusters", "wrong", "PRR of ASMI at 60 %",
        "PRR of ASMI at this depth", "PRR of Sem-ASMI at 60 %", "PRR of Sem-ASMI at this depth",
        "PRR of MSP", "PRR of Perplexity", "PRR of Sem-ASMI, this depth − 60 %",
        "p of that difference (Holm)", "PRR, Sem-ASMI − MSP", "PRR, Sem-ASMI − Perplexity",
        "gain beyond free baselines, z", "gain beyond free baselines, p (Holm)",
    ]  # fmt: skip
    return table(columns, rows)


def baselines_table(evidence: list[Evidence], correctness: str) -> Table:
    """All methods of the runs that include other methods than ASMI, each on its run's rows."""
    rows = []
    for e in evidence:
        if e.run not in ("baselines", "sampled", "benchmark") or not e.ranked(correctness):
            continue
        names = [name.removeprefix("score ") for name in e.answers if name.startswith("score ")]
        scores = {name: e.baseline(name) for name in names}
        scores.setdefault("MaximumSequenceProbability", e.baseline("MaximumSequenceProbability"))
        usable = {name: values for name, values in scores.items() if np.isfinite(values).all()}
        pairs = [(name, "MaximumSequenceProbability") for name in usable]
        prr, gaps = prr_intervals(usable, e.labels(correctness, RESAMPLES), pairs)
        for name in sorted(usable, key=lambda name: -prr[name].value):
            gap = "" if name == pairs[0][1] else signed(gaps[name, pairs[0][1]])
            area = f"{auroc(usable[name], e.wrong(correctness)):.2f}"
            rows.append([e.label, e.size, name, signed(prr[name]), gap, area])
    columns = ["setting", "answers / clusters", "method", "PRR", "PRR − that of MSP", "AUROC"]
    return table(columns, rows)


TABLES: dict[str, Callable[[list[Evidence]], Table]] = {
    "correctness labels": correctness_labels_table,
    "depths free": depths_free_table,
    "concentration": concentration_table,
    "probe": probe_table,
    "probe differences": partial(probe_table, kept="causal_differences", sign="+"),
}
for _label in CORRECTNESS_LABELS:
    TABLES[f"source {_label}"] = partial(source_table, correctness=_label)
    TABLES[f"source raw {_label}"] = partial(source_table, correctness=_label, method="ASMI")
    TABLES[f"source elsewhere {_label}"] = partial(elsewhere_table, correctness=_label)
    TABLES[f"trial {_label}"] = partial(trial_table, correctness=_label)
    TABLES[f"conditions {_label}"] = partial(conditions_table, correctness=_label)
    TABLES[f"conditions added {_label}"] = partial(conditions_added_table, correctness=_label)
    TABLES[f"controls {_label}"] = partial(verdict_table, correctness=_label)
    TABLES[f"controls raw {_label}"] = partial(verdict_table, correctness=_label, method="ASMI")
    TABLES[f"glance {_label}"] = partial(
        signals_table, correctness=_label, raw=(), asmi_methods=("Sem-ASMI",)
    )
    for _name, _make in {
        "signals": signals_table, "together": pooled_table, "measures": measures_table,
        "aggregation": aggregation_table, "places": places_table, "copying": copying_table,
        "quadrants": quadrants_table, "strata": strata_table, "answered": answered_table,
        "sentences": sentences_table, "coupling": coupling_table, "settings": settings_table,
        "baselines": baselines_table, "contenders": contenders_table,
        "depths again": depths_again_table, "depths elsewhere": depths_elsewhere_table,
    }.items():  # fmt: skip
        TABLES[f"{_name} {_label}"] = partial(_make, correctness=_label)
