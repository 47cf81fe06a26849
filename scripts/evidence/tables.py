"""Tables of the results pages: does the score help, and where does it come from?"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from evidence import (
    AGAIN,
    CLOSED,
    CORRECTNESS_LABELS,
    DEEPER,
    FEWEST,
    FIRST,
    MODELS,
    OWN_ANSWERS,
    PARAMETERS,
    WAYS,
    Evidence,
    Table,
    added_text,
    correlation,
    labelled,
    others,
    p_text,
    plain,
    share,
    signed,
    table,
    z_text,
)
from heads import (
    concentration_table,
    conditions_added_table,
    conditions_table,
    probe_table,
    verdict_table,
)

from lm_polygraph_asmi.analysis import (
    AddedInformation,
    Interval,
    adds_over_settings,
    auroc,
    auroc_by_label,
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
from lm_polygraph_asmi.analysis.prr import normalised_prr

RESAMPLES, REFITS = 2000, 500
DEPTHS = (60, 70, 80, 90)
TRIAL = Path(__file__).parents[2] / "docs/evidence/qwen15-trial.csv"


@dataclass(frozen=True)
class PlannedTests:
    """The tests of docs/evidence/source-plan.md and depth-plan.md, of one setting by one
    correctness label.

    Attributes:
        own, beside, difference: PRR of a score, of the one beside it, and of the first less it.
        p_own, p_difference: that these are zero.
        statistic, p_added: of the score beyond the free baselines; NaN where errors are too few.
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
        cls, evidence: Evidence, correctness: str, own: np.ndarray, beside: np.ndarray
    ) -> "PlannedTests":
        quality = evidence.quality(correctness)
        values = [normalised_prr(scores, quality) for scores in (own, beside)]
        drawn = prr_draws([own, beside], quality, evidence.clusters, RESAMPLES).T
        gap = drawn[0] - drawn[1]
        added = evidence.tested(own, correctness)
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
    ("smollm2", "xquad-few-shot"), ("gemma", "xquad"), ("qwen05", "xquad"), ("qwen15", "xquad"),
    *((model, "babi") for model in ("smollm2", "gemma", "qwen05", "qwen15")),
}  # fmt: skip


def source_table(evidence: list[Evidence], correctness: str, method: str = "Sem-ASMI") -> Table:
    planned = [c for c in labelled(evidence, correctness) if (c.model, c.setting) in PLANNED]
    sources = [[e.score(method, source) for source in ("context", "all")] for e in planned]
    tests = [PlannedTests.of(e, correctness, *own) for e, own in zip(planned, sources, strict=True)]
    primary = method == "Sem-ASMI"  # the plan adjusts nothing else
    ps = [[getattr(test, p) for test in tests] for p in ("p_own", "p_difference", "p_added")]
    adjusted = [holm(own) if primary else own for own in ps] if tests else []
    how = "Holm" if primary else "uncorrected"
    columns = [
        "setting",
        "answers / clusters",
        "wrong",
        f"PRR of {method}, all sources",
        f"PRR of {method}, passage",
        f"p of the passage's PRR ({how})",
        "PRR, passage − all sources",
        f"p of that difference ({how})",
        "gain beyond free baselines, z",
        f"gain beyond free baselines, p ({how})",
    ]
    return table(
        columns,
        [
            [
                test.evidence.label,
                test.evidence.size,
                str(int(test.evidence.wrong(correctness).sum())),
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


def elsewhere_table(evidence: list[Evidence], correctness: str) -> Table:
    """PRR where masked heads lose all, what comes from the passage, or all else; not planned."""
    rows = []
    for e in labelled(evidence, correctness):
        if not e.has_source("elsewhere"):
            continue
        sources = ("all", "context", "elsewhere")
        scores = {source: e.score("Sem-ASMI", source) for source in sources}
        free = {"MSP": e.signals["MSP"], "Perplexity": e.signals["Perplexity"]}
        pairs = [("elsewhere", name) for name in free]
        alone, gaps = prr_intervals(
            scores | free, e.quality(correctness), e.clusters, pairs, RESAMPLES
        )
        shown = [signed(alone[name]) for name in (*sources, *free)]
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
    """Other ways to ask how much an answer owes to its passage; as scores, higher = more."""
    rows = []
    for e in labelled(evidence, correctness):
        if "asmi_source_kl_d60_context" not in e.answers:
            continue
        alone, _ = prr_intervals(e.owed, e.quality(correctness), e.clusters, resamples=RESAMPLES)
        for name, score in e.owed.items():
            rows.append(
                [e.label, name, f"{np.median(score):.3g}", signed(alone[name]),
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
    ours: tuple[str, ...] = ("Sem-ASMI", "Sem-ASMI, sum"),
) -> Table:
    """PRR of each signal, what ours have over the free baselines, and whether they add to it."""
    free = ("MSP", "Perplexity")
    pairs = [(own, other) for own in ours for other in free]
    rows = []
    for e in labelled(evidence, correctness):
        scores = {name: e.signals[name] for name in (*free, *raw, *ours)}
        alone, gaps = prr_intervals(scores, e.quality(correctness), e.clusters, pairs, RESAMPLES)
        rows.append(
            [
                e.label,
                e.size,
                share(~e.wrong(correctness)),
                *(signed(alone[name]) for name in scores),
                *(signed(gaps[pair]) for pair in pairs),
                *(e.beyond_free(scores[name], correctness) for name in (*raw, *ours)),
            ]
        )
    columns = [
        "setting",
        "answers / clusters",
        "correct",
        *(f"PRR of {name}" for name in (*free, *raw, *ours)),
        *(f"PRR, {own} − {other}" for own, other in pairs),
        *(f"gain beyond free baselines, {name}: z (p)" for name in (*raw, *ours)),
    ]
    return table(columns, rows)


def trial_table(evidence: list[Evidence], correctness: str) -> Table:
    """A setting some of whose questions a trial had asked (docs/concepts/guarantee.md), by whether
    it had."""
    trial = set(pd.read_csv(TRIAL)["id"])
    rows = []
    for e in evidence:
        if (e.model, e.setting, e.run) == ("qwen15", "xquad-few-shot", "sources"):
            asked = e.answers["id"].isin(trial).to_numpy()
            rows += [
                e.among(asked, "asked in the trial"),
                e.among(~asked, "not asked in the trial"),
            ]
    return signals_table(rows, correctness, raw=(), ours=("Sem-ASMI",))


def together_table(evidence: list[Evidence], correctness: str) -> Table:
    """Beyond the free baselines, over all settings that have a passage; and over those of each data
    set, without empty answers, and at other depths."""

    def tested(
        chosen: Iterable[Evidence], method: str = "Sem-ASMI", **how: Any
    ) -> dict[Evidence, AddedInformation]:
        found = {e: e.tested(e.score(method, **how), correctness) for e in chosen}
        return {e: one for e, one in found.items() if one}

    read = [e for e in labelled(evidence, correctness) if e.setting not in CLOSED]
    deeper = [e for e in deeper_runs(evidence) if e.ranked(correctness)]
    sem = tested(read)
    asked = {
        "ASMI": tested(read, "ASMI"),
        "Sem-ASMI": sem,
        **{
            f"Sem-ASMI, {name} only": {e: one for e, one in sem.items() if e.data_set == name}
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
        whole, z = adds_over_settings(found), [one.statistic for one in found]
        rows.append(
            [name, str(len(found)), f"{whole.n} / {whole.clusters}",
             f"{z_text(min(z))} to {z_text(max(z))}", str(sum(own < 0 for own in z)),
             added_text(whole)]
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
        found = rank_signals(e.signals, wrong, e.clusters, resamples=RESAMPLES)
        for name, signal in found.items():
            stacked = ["", "", ""]
            if name.startswith(("ASMI", "Sem")):
                try:
                    gain = stacked_gain(e.signals[name], e.controls, wrong, e.clusters,
                                        e.quality(correctness), REFITS)  # fmt: skip
                    stacked = [signed(one) for one in (gain.log_loss, gain.auroc, gain.prr)]
                except ValueError:
                    stacked = ["too few errors"] * 3
            rows.append([e.label, name, plain(signal.auroc), plain(signal.augrc, 3), *stacked])
    columns = [
        "setting", "score", "AUROC", "AUGRC (lower is better)", "change of log loss in a stack",
        "change of AUROC in a stack", "change of PRR in a stack",
    ]  # fmt: skip
    return table(columns, rows)


def aggregation_table(evidence: list[Evidence], correctness: str) -> Table:
    rows = []
    for e in labelled(evidence, correctness):
        for method in ("ASMI", "Sem-ASMI", "surprisal", "entropy"):
            scores = {aggregation: e.score(method, aggregation=aggregation) for aggregation in WAYS}
            alone, _ = prr_intervals(scores, e.quality(correctness), e.clusters, (), RESAMPLES)
            along = " / ".join(correlation(own, e.length) for own in scores.values())
            rows.append([e.label, method, *(signed(alone[way]) for way in WAYS), along])
    by_length = f"rank correlation with length, {' / '.join(WAYS)}"
    columns = [
        "setting",
        "signal of a token",
        *(f"PRR, {aggregation}" for aggregation in WAYS),
        by_length,
    ]
    return table(columns, rows)


def quadrants_table(evidence: list[Evidence], correctness: str) -> Table:
    rows = []
    for e in labelled(evidence, correctness):
        for name in ("Perplexity", "Sem-ASMI", "Sem-ASMI, sum"):  # do free ones do as much?
            found = confident_but_fragile(
                e.signals["MSP"], e.signals[name], e.wrong(correctness), e.clusters, RESAMPLES
            )
            halves = zip(found.error_rate.ravel(), found.count.ravel(), strict=True)
            shown = [f"{rate:.0%} of {count}" if count else "none" for rate, count in halves]
            rows.append([e.label, name, *shown, signed(found.gap)])
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
            names = tuple(scores)
            alone, gaps = prr_intervals(
                scores, one.quality(correctness), one.clusters, [("Sem-ASMI", "MSP")], RESAMPLES
            )
            rows.append(
                [e.label, name, str(int(inside.sum())), share(one.wrong(correctness)),
                 *(signed(alone[score]) for score in scores),
                 signed(gaps["Sem-ASMI", "MSP"])]
            )  # fmt: skip
    columns = [
        "setting", "which answers", "answers", "wrong", *(f"PRR of {score}" for score in names),
        "PRR, Sem-ASMI − MSP",
    ]  # fmt: skip
    return table(columns, rows)


def answered_table(evidence: list[Evidence], correctness: str) -> Table:
    """Where many answers are empty, what other tables say of the setting without these."""
    ours = ("Sem-ASMI", "Sem-ASMI, sum")
    named = ("ASMI", *ours, "first", "passage")
    rows = []
    for e in labelled(evidence, correctness):
        if e.empty.sum() < FEWEST:
            continue
        one = e.among(~e.empty)
        scores = {name: one.signals[name] for name in ("ASMI", *ours)}
        scores["first"] = one.score("Sem-ASMI", aggregation=FIRST)
        if one.has_source("context"):
            scores["passage"] = one.score("Sem-ASMI", "context")
        alone, _ = prr_intervals(
            scores, one.quality(correctness), one.clusters, resamples=RESAMPLES
        )
        (coupled,) = couplings([one], correctness)
        fragile = [
            confident_but_fragile(
                one.signals["MSP"],
                one.signals[name],
                one.wrong(correctness),
                one.clusters,
                RESAMPLES,
            )
            for name in ("Perplexity", *ours)
        ]
        rows.append(
            [e.label, str(int(e.empty.sum())), one.size, str(int(one.wrong(correctness).sum())),
             *(signed(alone[name]) if name in alone else "" for name in named),
             plain(coupled.mean), plain(coupled.total), *(signed(found.gap) for found in fragile)]
        )  # fmt: skip
    columns = [
        "setting", "empty answers", "other answers / clusters", "wrong", "PRR of ASMI",
        "PRR of Sem-ASMI", "PRR of Sem-ASMI, sum", "PRR of Sem-ASMI, first token",
        "PRR of Sem-ASMI, passage", "AUROC of MI, mean", "AUROC of MI, sum",
        *(f"error rate if confident, fragile − robust by {name}" for name in ("Perplexity", *ours)),
    ]  # fmt: skip
    return table(columns, rows)


def sentences_table(evidence: list[Evidence], correctness: str) -> Table:
    """Where many answers go on after their first sentence, the setting as if they had ended
    there."""
    ours = ("Sem-ASMI", "Sem-ASMI, sum")
    pairs = [(own, "Perplexity") for own in ours]
    rows = []
    for e in labelled(evidence, correctness):
        if e.cut.sum() < FEWEST:
            continue
        for one in (e, e.first_sentences()):
            alone, gaps = prr_intervals(
                one.signals, one.quality(correctness), one.clusters, pairs, RESAMPLES
            )
            rows.append(
                [one.label, one.size, str(int(e.cut.sum())), share(~one.wrong(correctness)),
                 *(signed(alone[name]) for name in one.signals),
                 *(signed(gaps[pair]) for pair in pairs),
                 *(one.beyond_free(one.signals[name], correctness) for name in ours)]
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
        *(f"gain beyond free baselines, {name}: z (p)" for name in ours),
    ]
    return table(columns, rows)


def correctness_labels_table(evidence: list[Evidence]) -> Table:
    """AUROC under every correctness label at every threshold; a correctness label of yes and no has
    one row."""
    rows = []
    for e in [e for e in evidence if e.run in OWN_ANSWERS]:
        qualities = {
            correctness: e.quality(correctness)
            for correctness in CORRECTNESS_LABELS
            if e.ranked(correctness)
        }
        before: tuple[Any, ...] = ()
        for (correctness, threshold), found in auroc_by_label(e.signals, qualities).items():
            wrong = qualities[correctness] < threshold
            seen = (correctness, *wrong)
            if seen == before:
                continue
            before = seen
            values = [f"{value:.2f}" for value in found.values()]
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
    """How MI goes with errors in a setting: AUROC above .5 is the paper's direction."""

    evidence: Evidence
    mean: Interval
    total: Interval
    tokens: float
    right: float
    wrong: float


def couplings(evidence: list[Evidence], correctness: str) -> list[Coupling]:
    found = []
    for e in labelled(evidence, correctness):
        scores = {
            aggregation: e.score("ASMI", aggregation=aggregation) for aggregation in ("mean", "sum")
        }
        apart = error_separation(
            e.tokens("ASMI"), scores, e.wrong(correctness), e.clusters, RESAMPLES
        )
        mean, total = apart.auroc["mean"], apart.auroc["sum"]
        found.append(Coupling(e, mean, total, apart.mean, apart.right, apart.wrong))
    return found


def coupling_table(evidence: list[Evidence], correctness: str) -> Table:
    columns = [
        "setting", "billion parameters", "MI of a token (nats)", "MI in correct answers",
        "MI in wrong answers", "AUROC of MI, mean", "AUROC of MI, sum",
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
            for one in couplings(evidence, correctness)
        ],
    )


PLACES: dict[str, Callable[[np.ndarray], float]] = {
    "first": lambda tokens: tokens[0],
    "between": lambda tokens: tokens[1:-1].mean(),
    "closing": lambda tokens: tokens[-1],
}
"""Places in an answer that ended by itself, and what stands for their tokens."""


def places_table(evidence: list[Evidence], correctness: str) -> Table:
    """Which tokens know of errors, and which way: of MI, of its passage's part, of entropy."""
    rows = []
    for e in labelled(evidence, correctness):
        for place, mean_of in PLACES.items():
            # An answer of two tokens has none between; one that was cut has no closing token.
            has = e.answers["closing"].to_numpy() & (e.length >= (3 if place == "between" else 2))
            one = e.among(has)
            wrong = one.wrong(correctness)
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
        "setting", "token", "answers / wrong", "AUROC of MI", "AUROC of entropy",
        "AUROC of MI from the passage", "median MI, correct / wrong",
        "median MI from the passage, correct / wrong",
    ]  # fmt: skip
    return table(columns, rows)


def flat(values: Iterable[Any]) -> np.ndarray:
    """Of all answers, what belongs to their tokens between the first and the closing one."""
    return np.concatenate([own[1:-1] for own in values])


def copying_table(evidence: list[Evidence], correctness: str) -> Table:
    """Tokens between the first and the closing one, by whether they go on as the passage does."""
    names = ("MI", "the passage's", "entropy")
    rows = []
    for e in labelled(evidence, correctness):
        if "copied" not in e.answers:
            continue
        e = e.among(e.answers["closing"].to_numpy())
        as_there = flat(e.answers["copied"]).astype(bool)
        wrong = flat(np.full(n, w) for n, w in zip(e.length, e.wrong(correctness), strict=True))
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
        "setting", "which tokens", "tokens", "in wrong answers", "median MI",
        "median MI from the passage", "median entropy", "AUROC of MI",
        "AUROC of MI from the passage", "AUROC of entropy",
    ]  # fmt: skip
    return table(columns, rows)


def settings_table(evidence: list[Evidence], correctness: str) -> Table:
    """Other masks, positions and depths, beside MSP and what a setting is judged by, on their rows.

    Of settings that were measured under other settings, too.
    """
    usual = {(e.model, e.setting): e for e in labelled(evidence, correctness)}
    measured = [e for e in evidence if e.run in PARAMETERS and e.ranked(correctness)]
    varied = {(e.model, e.setting) for e in measured if e.run not in OWN_ANSWERS}
    rows = []
    for e in measured:
        if (e.model, e.setting) not in varied:
            continue
        answered = usual.get((e.model, e.setting))
        response = None if answered in (e, None) else answered.shared_with(e).score("Sem-ASMI")
        for depth in filter(e.has_depth, DEPTHS):
            scores = {m: e.score(m, depth=depth) for m in ("ASMI", "Sem-ASMI")}
            scores["MSP"] = e.baseline("MaximumSequenceProbability")
            pairs = [("Sem-ASMI", "MSP")]
            if response is not None:
                pairs.append(("Sem-ASMI", "response"))
            alone, gaps = prr_intervals(
                scores if response is None else scores | {"response": response},
                e.quality(correctness), e.clusters, pairs, RESAMPLES,
            )  # fmt: skip
            beside = ["", ""]
            if response is not None:
                beside = [signed(gaps[pairs[1]]), correlation(scores["Sem-ASMI"], response)]
            rows.append(
                [e.label, PARAMETERS[e.run], f"{depth} %", e.size,
                 *(signed(alone[name]) for name in scores), signed(gaps[pairs[0]]), *beside,
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
    """The planned test of docs/results/summary.md: other depths against 60 %, on other answers."""
    asked = []
    for e in (e for e in evidence if e.run == AGAIN):
        asked.append(e.among(~_looked_at(e, evidence, "depths")))
        other = ~_looked_at(e, evidence, "depths", by="cluster")
        asked.append(e.among(other, "passages that were not looked at"))
    return _depths_table(asked, correctness)


def depths_elsewhere_table(evidence: list[Evidence], correctness: str) -> Table:
    """The tests of docs/evidence/depth-plan.md: 70 and 90 % against 60 %, on the other settings."""
    asked = []
    for e in deeper_runs(evidence):
        asked.append(e)
        other = ~_looked_at(e, evidence, "depths", AGAIN, by="cluster")
        if not other.all():
            asked.append(e.among(other, "passages that were not looked at"))
        if e.empty.sum() >= FEWEST:
            asked.append(e.among(~e.empty, "without empty answers"))
    return _depths_table(asked, correctness)


def deeper_runs(evidence: list[Evidence]) -> list[Evidence]:
    """What docs/evidence/depth-plan.md asks, with the same answers' scores at 60 %.

    Raises:
        ValueError: these are not there, or are of other answers.
    """
    found = []
    for e in (e for e in evidence if e.run == DEEPER):
        usual = others(e, evidence, OWN_ANSWERS)
        if not usual:
            raise ValueError(
                f"no scores at 60 % for {e.model}/{e.setting}.{e.run}.parquet: "
                f"{e.setting}.sources.parquet is missing"
            )
        found.append(usual[0].joined_with(e).among(~_looked_at(e, evidence, "depths", AGAIN)))
    return found


def depths_free_table(evidence: list[Evidence]) -> Table:
    """Rank correlation of scores at each depth with the free baselines, and what empty answers
    get."""
    rows = []
    for e in deeper_runs(evidence):
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
        "setting", "depth", "answers / clusters",
        *(f"rank correlation of {own} with {free}" for free in ("mean token entropy", "perplexity")
          for own in ("ASMI", "Sem-ASMI")),
        "empty answers above the median of Sem-ASMI",
    ]  # fmt: skip
    return table(columns, rows)


def _looked_at(e: Evidence, evidence: list[Evidence], *runs: str, by: str = "id") -> np.ndarray:
    """(N,) which of its answers, or clusters, other runs of the setting have scored as deep."""
    seen = [own for one in others(e, evidence, runs) for own in one.answers[by]]
    return e.answers[by].isin(seen).to_numpy()


def _depths_table(asked: list[Evidence], correctness: str) -> Table:
    """Adjusted over whole settings and the depths that were planned."""
    usual, *deeper = DEPTHS
    measured = [(e, d) for e in asked if e.ranked(correctness) for d in filter(e.has_depth, deeper)]
    tests = [
        PlannedTests.of(
            e, correctness, e.score("Sem-ASMI", depth=d), e.score("Sem-ASMI", depth=usual)
        )
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
        alone, gaps = prr_intervals(scores, e.quality(correctness), e.clusters, free, RESAMPLES)
        rows.append(
            [e.label, f"{depth} %", e.size, str(int(e.wrong(correctness).sum())),
             signed(alone["usual"]), signed(alone["deeper"]), signed(test.beside),
             signed(test.own), signed(alone["MSP"]), signed(alone["Perplexity"]),
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
    """All methods of the runs that have more than ours, each run's on its own rows."""
    rows = []
    for e in evidence:
        if e.run not in ("baselines", "sampled", "benchmark") or not e.ranked(correctness):
            continue
        names = [name.removeprefix("score ") for name in e.answers if name.startswith("score ")]
        scores = {name: e.baseline(name) for name in names}
        scores.setdefault("MaximumSequenceProbability", e.baseline("MaximumSequenceProbability"))
        usable = {name: own for name, own in scores.items() if np.isfinite(own).all()}
        pairs = [(name, "MaximumSequenceProbability") for name in usable]
        alone, gaps = prr_intervals(usable, e.quality(correctness), e.clusters, pairs, RESAMPLES)
        for name in sorted(usable, key=lambda name: -alone[name].value):
            over = "" if name == pairs[0][1] else signed(gaps[name, pairs[0][1]])
            area = f"{auroc(usable[name], e.wrong(correctness)):.2f}"
            rows.append([e.label, e.size, name, signed(alone[name]), over, area])
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
        signals_table, correctness=_label, raw=(), ours=("Sem-ASMI",)
    )
    for _name, _make in {
        "signals": signals_table, "together": together_table, "measures": measures_table,
        "aggregation": aggregation_table, "places": places_table, "copying": copying_table,
        "quadrants": quadrants_table, "strata": strata_table, "answered": answered_table,
        "sentences": sentences_table, "coupling": coupling_table, "settings": settings_table,
        "baselines": baselines_table, "contenders": contenders_table,
        "depths again": depths_again_table, "depths elsewhere": depths_elsewhere_table,
    }.items():  # fmt: skip
        TABLES[f"{_name} {_label}"] = partial(_make, correctness=_label)
