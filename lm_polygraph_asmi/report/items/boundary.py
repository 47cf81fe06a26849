"""Items on the limits of the method: closed-book recall, and truncation to the top K tokens."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from lm_polygraph_asmi.analysis.clusters import PRR_RESAMPLES
from lm_polygraph_asmi.analysis.comparison import prr_intervals
from lm_polygraph_asmi.analysis.coverage import TOP_K, coverage_by_band, coverage_intervals
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.stability import rank_correlation
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import Items, computed, frame, per_setting
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, same_depth


def pairs_of_rows(first: RunGroup, second: RunGroup, same_answers: bool) -> list[tuple[int, int]]:
    """Pairs of row numbers of two settings with the same question, and perhaps the same answer.

    Questions are the same if prompts and gold answers are. Where one source is asked with other
    prompts, such as without the passage, ids are compared instead of prompts.
    """
    names = ["input_texts", "greedy_texts"] if same_answers else ["input_texts"]
    if not same_answers and _asked_otherwise(first, second):
        names = ["ids"]
    if first.saved("target_texts") and second.saved("target_texts"):
        names.append("target_texts")

    def keys(group: RunGroup) -> list[tuple[str, ...]]:
        """What tells each row's question, and answer, from others; [] if it was not saved."""
        columns = [group.ids if name == "ids" else group.saved(name) for name in names]
        saved = [map(repr, column) for column in columns if column is not None]
        return list(zip(*saved, strict=True)) if len(saved) == len(names) else []

    second_rows = {row: j for j, row in enumerate(keys(second))}
    return [(i, second_rows[row]) for i, row in enumerate(keys(first)) if row in second_rows]


def _asked_otherwise(first: RunGroup, second: RunGroup) -> bool:
    """Whether two settings ask one source, whose rows have ids, with other prompts."""
    data = [group.run.recorded("dataset") for group in (first, second)]
    source, prompts = (
        [[of.get(name) for name in names] for of in data]
        for names in (("source", "split"), ("closed_book", "prompt_style"))
    )
    have_ids = bool(first.ids and second.ids)
    return have_ids and source[0] == source[1] and prompts[0] != prompts[1]


def largest_runs(groups: Sequence[RunGroup]) -> dict[RunGroup, RunGroup]:
    """Each setting -> the largest one that has some of its questions, for the same model.

    Names do not matter: one name may stand for several data, and one data set have several names.
    """
    found: dict[RunGroup, RunGroup] = {}
    for group in sorted(groups, key=len, reverse=True):
        found[group] = next(
            (
                other
                for other in dict.fromkeys(found.values())
                if (other.model, other.closed_book) == (group.model, group.closed_book)
                and pairs_of_rows(other, group, same_answers=False)
            ),
            group,
        )
    return found


def twins(groups: Sequence[RunGroup]) -> Iterator[tuple[RunGroup, RunGroup]]:
    """Closed-book settings, each with the open-book setting that shares most questions with it."""
    for closed in (group for group in groups if group.closed_book and group.ids):
        source = closed.run.recorded("dataset").get("source")
        opened = [
            group
            for group in groups
            if not group.closed_book
            and group.model == closed.model
            and source is not None
            and group.run.recorded("dataset").get("source") == source
            and group.ids
        ]
        if opened:
            yield max(opened, key=lambda c: len(pairs_of_rows(c, closed, False))), closed


def _twin_rows(twins: tuple[RunGroup, RunGroup]) -> list[dict[str, Any]]:
    """One row for each of the two settings, over the questions that both have.

    Raises:
        Unavailable: the settings have no question in common.
    """
    opened, closed = twins
    pairs = pairs_of_rows(opened, closed, same_answers=False)
    if not pairs:
        raise Unavailable("no question is in both runs")
    opened_rows, closed_rows = map(list, zip(*pairs, strict=True))
    # Closed-book prompts have no passage, so both settings use the open-book clusters.
    clusters = opened.answers.take(opened_rows).clusters
    rows = []
    for group, chosen in ((opened, opened_rows), (closed, closed_rows)):
        sem, msp = group.need("u_sem", "msp")
        answers = Labelled(quality=group.quality[chosen], clusters=clusters)
        scores = {"Sem-ASMI": sem[chosen], "MSP": msp[chosen]}
        intervals, paired = prr_intervals(scores, answers, [("Sem-ASMI", "MSP")])
        rows.append(
            {
                "setting": group.label,
                "questions": len(chosen),
                f"mean {group.metric}": float(group.quality[chosen].mean()),
                **intervals,
                "Sem-ASMI Δ MSP": paired["Sem-ASMI", "MSP"],
            }
        )
    return rows


def boundary(groups: Sequence[RunGroup]) -> Items:
    """The same questions with and without the passage: appendix "Boundary Deconfounds"."""
    return frame(
        "boundary",
        "Boundary: open against closed book",
        computed(
            twins(groups), _twin_rows, lambda twins: f"{twins[0].label} against {twins[1].dataset}"
        ),
        [
            "PRR on the questions that both runs have, with the clusters of the open-book rows. "
            "The error rates of the two differ, so compare differences within a row."
        ],
        partial(
            figures.by_setting,
            columns={"Sem-ASMI minus MSP": "Sem-ASMI Δ MSP"},
            label="ΔPRR, 95 % over clusters",
        ),
        digits=3,
        signed=("Sem-ASMI Δ MSP",),
        resamples=PRR_RESAMPLES,
        otherwise="no model has runs on the same questions with and without context (see "
        "asmi_squad_closed_book)",
    )


PairOfK = tuple[str, int, RunGroup, str, int, RunGroup, str]
"""Symbol; K, setting and method of the smaller K; K, setting and method of the larger K."""


def truncation(groups: Sequence[RunGroup]) -> Items:
    """The same masks with another K: appendix "Boundary Deconfounds", enlarged truncation."""
    pairs = [pair for symbol in ("Sem-ASMI", "ASMI") for pair in pairs_of_k(groups, symbol)]
    return frame(
        "larger_k",
        "Boundary: larger K",
        computed(pairs, _rows_of_k, lambda pair: pair[2].label),
        [
            "Answers that were scored with both K; paired 95 % intervals over clusters. Token ρ: "
            "Spearman correlation of MI_t between the two K, over all tokens. Coverage: mean over "
            "all tokens.",
        ],
        digits=3,
        signed=("large Δ small K", "large K Δ MSP"),
        resamples=PRR_RESAMPLES,
        otherwise="no answers were scored with two K (see asmi_triviaqa_k256)",
    )


def pairs_of_k(groups: Sequence[RunGroup], symbol: str) -> Iterator[PairOfK]:
    """Pairs of scores of a model on the same questions that differ only in K."""
    largest = largest_runs(groups)
    alike_but_k: dict[tuple[Any, ...], dict[int, tuple[RunGroup, str]]] = {}
    for group in groups:
        for method, config in group.methods.items():
            if config.symbol == symbol and same_depth(config.depth, group.depth):
                others = config.score_key() | {"top_k": None, "stop": None}
                by_k = alike_but_k.setdefault((largest[group], *others.values()), {})
                by_k.setdefault(config.top_k, (group, method))
    for by_k in alike_but_k.values():
        for small, large in pairwise(sorted(by_k)):
            yield symbol, small, *by_k[small], large, *by_k[large]


def _rows_of_k(pair: PairOfK) -> list[dict[str, Any]]:
    """PRR with the larger K, minus PRR with the smaller K, and minus PRR of MSP.

    The list is empty if no answer was scored with both K.
    """
    symbol, first_k, first, first_method, second_k, second, second_method = pair
    every_row = [(i, i) for i in range(len(first))]
    pairs = every_row if first is second else pairs_of_rows(first, second, True)
    if not pairs:
        return []
    first_rows, second_rows = map(list, zip(*pairs, strict=True))
    scores = {
        "small": first.score(first_method)[first_rows],
        "large": second.score(second_method)[second_rows],
    }
    if first.msp is not None:
        scores["msp"] = first.msp[first_rows]
    differences = [("large", other) for other in scores if other != "large"]
    paired = prr_intervals(scores, first.answers.take(first_rows), differences)[1]
    scored = (first, first_method, first_rows), (second, second_method, second_rows)
    return [
        {
            "setting": first.label,
            "score": symbol,
            "K": f"{first_k} to {second_k}",
            "answers": len(first_rows),
            "large Δ small K": paired["large", "small"],
            "large K Δ MSP": paired.get(("large", "msp")),
            "token ρ of MI": _token_correlation(*scored),
            "mean coverage, small K": _coverage_at(first, first_k),
            "mean coverage, large K": _coverage_at(first, second_k),
        }
    ]


def _token_correlation(*scored: tuple[RunGroup, str, Sequence[int]]) -> float | None:
    """Rank correlation of MI_t over the tokens of two triples (setting, method, rows).

    None if MI_t was not saved, if answers differ in length, or if all values of one are equal.
    """
    saved = [(group.mi_of(method), rows) for group, method, rows in scored]
    tokens = [np.concatenate([mi[i] for i in rows]) for mi, rows in saved if mi]
    alike = len(tokens) == len(scored) and len(set(map(len, tokens))) == 1
    return rank_correlation(*tokens) if alike and all(map(np.ptp, tokens)) else None


def _coverage_at(group: RunGroup, top_k: int) -> float | None:
    saved = group.masked("coverage")
    if saved is None or top_k not in TOP_K:
        return None
    return float(np.concatenate(saved)[:, TOP_K.index(top_k)].mean())


@per_setting(
    "top_k_coverage",
    "Top-K coverage by disagreement",
    "Mean probability mass of a subnetwork's K most likely tokens, averaged over masks, in bands "
    "of MI_t. Bound: if the mass m outside the top 64 is treated as one token, it adds at most "
    "−m ln m nats to an entropy.",
    "Figure: pointwise 95 % bands over clusters (200 resamples). Each resample chooses its own "
    "bands of MI_t.",
    figure=figures.coverage,
    digits=3,
)
def coverage(group: RunGroup) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Table "topk-highmi" of the paper, all bands."""
    saved, information = group.masked("coverage"), group.masked("mi")
    if not saved or not information:
        raise Unavailable("asmi not saved")
    bands = coverage_by_band(np.concatenate(information), np.concatenate(saved))
    ends = coverage_intervals(information, saved, group.answers)
    rows = [
        {"setting": group.label, "tokens": band}
        | {f"K = {name}" if name in TOP_K else str(name): v for name, v in row.items()}
        for band, row in bands.to_dict("index").items()
    ]
    return rows, {group.label: (bands[list(TOP_K)], ends)}
