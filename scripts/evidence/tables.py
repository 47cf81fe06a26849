"""Tables of the results pages: does the score help, beside free baselines, and where?"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
from controls import conditions_added_table, conditions_table, verdict_table
from evidence import (
    ALL_AGGREGATIONS,
    CLOSED,
    CORRECTNESS_LABELS,
    DEEPER,
    FIRST,
    MAIN_RUNS,
    MODELS,
    PARAMETERS,
    REPEATED,
    Evidence,
    Table,
    added_text,
    correlation,
    labelled,
    runs_like,
    share,
    signed,
    table,
    unsigned,
    z_text,
)

from lm_polygraph_asmi.analysis import (
    AddedInformation,
    Clustered,
    adds_over_settings,
    auroc,
    auroc_by_label,
    cluster_interval,
    confident_but_fragile,
    error_separation,
    prr_intervals,
    strata,
)

RESAMPLES = 2000
DEPTHS = (60, 70, 80, 90)


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


def coupling_table(evidence: list[Evidence], correctness: str) -> Table:
    """How MI relates to errors: AUROC above .5 is the paper's direction."""
    rows = []
    for e in labelled(evidence, correctness):
        scores = {name: e.score("ASMI", aggregation=name) for name in ("mean", "sum")}
        mi = error_separation(e.tokens("ASMI"), scores, e.labels(correctness, RESAMPLES))
        rows.append(
            [e.label, f"{MODELS[e.model].billions:g}",
             *(f"{value:.4f}" for value in (mi.mean, mi.right, mi.wrong)),
             *(unsigned(mi.auroc[name]) for name in scores)]
        )  # fmt: skip
    columns = [
        "setting", "billion parameters", "MI of a token (nats)", "MI in correct answers",
        "MI in wrong answers", "AUROC of MI, mean", "AUROC of MI, sum",
    ]  # fmt: skip
    return table(columns, rows)


def closed_table(evidence: list[Evidence]) -> Table:
    """Correctness without the passage, and how often scores are higher without it."""
    signals: dict[str, np.ndarray] = {}
    rows = []
    for e in evidence:
        if e.setting not in CLOSED or e.run not in MAIN_RUNS:
            continue
        signals = e.signals
        prr = ["too few correct"] * 2
        if e.ranked("rouge"):
            scores = {name: signals[name] for name in ("MSP", "Sem-ASMI")}
            intervals, _ = prr_intervals(scores, e.labels("rouge", RESAMPLES))
            prr = [signed(intervals[name]) for name in scores]
        open_book = Evidence(e.model, CLOSED[e.setting], e.run, e.answers)
        higher = [""] * (1 + len(signals))
        for opened in runs_like(open_book, evidence, MAIN_RUNS):
            row_of = {name: i for i, name in enumerate(opened.answers["id"])}
            both = e.answers["id"].isin(list(row_of)).to_numpy()
            closed, order = e.select(both), [row_of[name] for name in e.answers["id"][both]]
            higher = [str(len(order))]
            for name, score in closed.signals.items():
                rises = (score > opened.signals[name][order]).astype(float)
                mean = cluster_interval(
                    lambda chosen, rises=rises: float(rises[chosen].mean()),
                    Clustered(closed.clusters, RESAMPLES),
                )
                higher.append(unsigned(mean))
        correct = [share(~e.wrong(correctness)) for correctness in ("contains", "rouge")]
        rows.append([e.label, e.size, *correct, *prr, *higher])
    columns = [
        "setting", "answers / clusters", "correct (contains)", "correct (ROUGE-L)",
        "PRR of MSP (ROUGE-L)", "PRR of Sem-ASMI (ROUGE-L)", "answers also with the passage",
        *(f"share higher without it, {name}" for name in signals),
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
        both = main_runs[0].joined_with(e)
        earlier = runs_like(e, evidence, ("depths", REPEATED))  # looked at before the plan
        scored = [row_id for run in earlier for row_id in run.answers["id"]]
        joined.append(both.select(~both.answers["id"].isin(scored).to_numpy()))
    return joined


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
    "closed-book": closed_table,
}
for _label in CORRECTNESS_LABELS:
    for _name, _make in {
        "glance": partial(signals_table, raw=(), asmi_methods=("Sem-ASMI",)),
        "signals": signals_table, "together": pooled_table, "aggregation": aggregation_table,
        "quadrants": quadrants_table, "strata": strata_table, "coupling": coupling_table,
        "settings": settings_table, "baselines": baselines_table,
        "conditions": conditions_table, "conditions added": conditions_added_table,
        "controls": verdict_table, "controls raw": partial(verdict_table, method="ASMI"),
    }.items():  # fmt: skip
        TABLES[f"{_name} {_label}"] = partial(_make, correctness=_label)
