"""Tables of the pages of evidence: what models do when their passage says something else, or none.

In settings `changed` the reference answer was replaced in the passage by one of its kind, in
`exchanged` the passage by one of another article (scripts/build_counterfactual.py); `closed`
has no passage.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from evidence import (
    CHANGED,
    CLOSED,
    FEWEST,
    OWN_ANSWERS,
    Evidence,
    Table,
    minus,
    others,
    plain,
    share,
    signed,
    table,
)
from keep import BEFORE

from lm_polygraph_asmi.analysis import auroc_interval, cluster_interval, prr_intervals

RESAMPLES = 2000
SIGNALS = ("MSP", "Perplexity", "ASMI", "Sem-ASMI", "Sem-ASMI, sum")
EXCHANGED = ("exchanged", "exchanged-few-shot")


def signals_of(e: Evidence) -> dict[str, np.ndarray]:
    """What could tell whether an answer followed its passage, as it comes."""
    return {**e.signals, "Sem-ASMI, passage": e.score("Sem-ASMI", "context"), **e.owed}


def followed(e: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """Whether each answer holds what its passage says now; and whether what it said before."""
    return e.quality("contains") >= 0.5, e.answers[BEFORE].to_numpy(dtype=float) >= 0.5


def changed_runs(evidence: list[Evidence]) -> list[Evidence]:
    return [
        e for e in evidence if e.setting in CHANGED and BEFORE in e.answers and e.run == "sources"
    ]


def followed_table(evidence: list[Evidence]) -> Table:
    """How often models follow the passage; beside it how often they are right where it is true."""
    rows = []
    for e in changed_runs(evidence):
        now, before = followed(e)
        was = [o for o in others_of(e, evidence) if o.has("contains")]
        rows.append(
            [e.label, e.size, share(now & ~before), share(before & ~now), share(now & before),
             share(~now & ~before), share(~was[0].wrong("contains")) if was else "not measured"]
        )  # fmt: skip
    columns = [
        "setting",
        "answers / clusters",
        "as the changed passage says",
        "as the original passage says",
        "both",
        "neither",
        "correct with the original passage",
    ]
    return table(columns, rows)


def others_of(e: Evidence, evidence: list[Evidence]) -> list[Evidence]:
    """The same questions with the passage as it was."""
    like = Evidence(e.model, CHANGED[e.setting], e.run, e.answers)
    return others(like, evidence, ("sources",))


def telling_table(evidence: list[Evidence]) -> Table:
    """Which signal tells answers that follow the passage from those that do not."""
    rows = []
    for e in changed_runs(evidence):
        now, before = followed(e)
        one_of_them = now != before
        for name, score in signals_of(e).items():
            shown = []
            for rows_in, missed in ((np.ones(len(now), bool), ~now), (one_of_them, before)):
                target = missed[rows_in]
                if min(target.sum(), (~target).sum()) < FEWEST:
                    shown.append("too few")
                    continue
                clusters = [c for c, inside in zip(e.clusters, rows_in, strict=True) if inside]
                shown.append(plain(auroc_interval(score[rows_in], target, clusters, RESAMPLES)))
            rows.append([e.label, name, *shown])
    columns = [
        "setting", "signal", "AUROC, higher if the changed passage was not followed",
        "AUROC, original against changed answer",
    ]  # fmt: skip
    return table(columns, rows)


def exchanged_table(evidence: list[Evidence]) -> Table:
    """What the answers to the same questions owe to their passage, and to one of another article.

    Medians over answers; the difference is that of the medians, over the same resamples.
    """
    rows = []
    for e in evidence:
        if e.setting not in EXCHANGED or e.run != "sources":
            continue
        for own in others_of(e, evidence):
            own = own.among(own.answers["id"].isin(e.answers["id"]).to_numpy())
            place = {name: i for i, name in enumerate(e.answers["id"])}
            order = [place[name] for name in own.answers["id"]]
            there, here = signals_of(e), signals_of(own)
            for name in (name for name in (*own.owed, "ASMI", "MSP") if name in there):
                first, second = here[name], there[name][order]

                def fall(
                    rows: np.ndarray, first: np.ndarray = first, second: np.ndarray = second
                ) -> float:
                    return float(np.median(second[rows]) - np.median(first[rows]))

                gap = cluster_interval(fall, own.clusters, RESAMPLES)
                rows.append(
                    [own.label, own.size, name,
                     f"{np.median(first):.3g}", f"{np.median(second):.3g}",
                     minus(f"{gap.value:+.3g} [{gap.low:+.3g}, {gap.high:+.3g}]")]
                )  # fmt: skip
    columns = [
        "setting",
        "answers / clusters",
        "median of",
        "own passage",
        "another passage",
        "difference",
    ]
    return table(columns, rows)


def _mean(values: np.ndarray, rows: np.ndarray) -> float:
    return float(values[rows].mean())


def closed_table(evidence: list[Evidence]) -> Table:
    """What models know without the passage, and whether scores rise where it is taken away."""
    rows = []
    for e in evidence:
        if e.setting not in CLOSED or e.run not in OWN_ANSWERS:
            continue
        prr = ["too few correct"] * 2
        if e.ranked("rouge"):
            scores = {name: e.signals[name] for name in ("MSP", "Sem-ASMI")}
            found, _ = prr_intervals(scores, e.quality("rouge"), e.clusters, (), RESAMPLES)
            prr = [signed(found[name]) for name in scores]
        like = Evidence(e.model, CLOSED[e.setting], e.run, e.answers)
        higher = [""] * (1 + len(e.signals))
        for own in others(like, evidence, OWN_ANSWERS):
            there = {name: i for i, name in enumerate(own.answers["id"])}
            both = e.answers["id"].isin(list(there)).to_numpy()
            alone, places = e.among(both), [there[name] for name in e.answers["id"][both]]
            higher = [str(len(places))]
            for name, score in alone.signals.items():
                rises = (score > own.signals[name][places]).astype(float)
                share_of = partial(_mean, rises)
                higher.append(plain(cluster_interval(share_of, alone.clusters, RESAMPLES)))
        correctness_labels = [share(~e.wrong(correctness)) for correctness in ("contains", "rouge")]
        rows.append([e.label, e.size, *correctness_labels, *prr, *higher])
    columns = [
        "setting", "answers / clusters", "correct (contains)", "correct (ROUGE-L)",
        "PRR of MSP (ROUGE-L)", "PRR of Sem-ASMI (ROUGE-L)", "answers also with the passage",
        *(f"share higher without it, {name}" for name in SIGNALS),
    ]  # fmt: skip
    return table(columns, rows)


TABLES: dict[str, Callable[[list[Evidence]], Table]] = {
    "changed followed": followed_table,
    "changed telling": telling_table,
    "exchanged": exchanged_table,
    "closed-book": closed_table,
}
