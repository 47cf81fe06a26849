"""Scores by source (context or elsewhere), on the same answers and masks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lm_polygraph_asmi.analysis.added import adds_information
from lm_polygraph_asmi.analysis.comparison import auroc, prr_intervals
from lm_polygraph_asmi.analysis.stability import rank_correlation
from lm_polygraph_asmi.analysis.verdict import holm
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.report.item import Items, frame
from lm_polygraph_asmi.results.names import at_depth
from lm_polygraph_asmi.results.run_groups import RunGroup, Unavailable, same_depth


def _by_source(group: RunGroup) -> Iterator[dict[str, str]]:
    """Scores at the operating depth that differ only in source: source -> method."""
    groups: list[tuple[ASMIConfig, dict[str, str]]] = []
    for method, config in group.methods.items():
        if not same_depth(config.depth, group.depth):
            continue
        for other, by_source in groups:
            if config.same_but(other, "source"):
                by_source[config.source] = method
                break
        else:
            groups.append((config, {config.source: method}))
    for _, by_source in groups:
        if set(by_source) - {"all"}:
            yield by_source


def _tokens(group: RunGroup, statistic: str, source: str) -> list[np.ndarray] | None:
    """A statistic by source, for the rows in use; None if no run of the setting saved it."""
    name = at_depth(statistic, group.depth, source)
    saved = group.saved(name)
    return None if saved is None else [np.asarray(values, dtype=float) for values in saved]


def _share(group: RunGroup, method: str, of_all: str | None) -> float | None:
    """Median over answers of mean MI of a source, divided by mean MI of source all.

    Both from the runs of these scores: another run of the setting, such as one of scope "all", has
    another MI under the same name.
    """
    source_mi = group.mi_of(method)
    all_mi = None if of_all is None else group.mi_of(of_all)
    if source_mi is None or all_mi is None:
        return None
    shares = [a.mean() / b.mean() for a, b in zip(source_mi, all_mi, strict=True) if b.mean() > 0]
    return float(np.median(shares)) if shares else None


def _attention(group: RunGroup, source: str) -> float | None:
    """Median over answers of the attention on a source."""
    saved = _tokens(group, "asmi_source_attention", source)
    return None if saved is None else float(np.median([values.mean() for values in saved]))


def sources(groups: Sequence[RunGroup]) -> Items:
    """Scores whose masks remove only what comes from the context, or from elsewhere, or all."""
    title = "Where the fragility comes from: scores by source"

    def compute(group: RunGroup) -> list[dict[str, Any]]:
        variants = list(_by_source(group))
        if not variants:
            return []
        group.need_errors()
        rows = []
        for methods in variants:
            symbol = group.methods[next(iter(methods.values()))].symbol
            rows += _rows(group, {(symbol, source): m for source, m in methods.items()})
        # Scores by source that need no random masks.
        known = {m: of for m, of in group.run.described.items() if m in group.baselines}
        cheaper = {m: of for m, of in known.items() if of["source"] != "all"}
        return rows + _rows(group, {(of["symbol"], of["source"]): m for m, of in cheaper.items()})

    def finish(table: pd.DataFrame) -> pd.DataFrame:
        adjusted = table.groupby(["score", "source"])["p"].transform(holm)
        table.insert(list(table).index("p") + 1, "p, Holm", adjusted)
        return table

    notes = [
        "The same answers and masks; masked heads lose their whole input (all), or only what "
        "comes from the context's tokens or from elsewhere. PRR and its difference from all: 95 % "
        "intervals over clusters. z, p: two-sided test of added information beyond MSP, entropy "
        "and length, Holm over the settings of a score and source; z above 0: wrong answers have "
        "higher scores than the controls explain. Source-KL, Source-attention and Without-context "
        "need no random masks.",
        "Share of MI: the source's MI over that of all, median over answers; shares need not add "
        "up. Attention: on the source's tokens at the masked layer, median over answers. ρ: "
        "Spearman correlations with the score of all and with length.",
    ]
    return frame(
        "sources", title, groups, compute, notes, digits=3, resamples=10_000,
        signed=("Δ all",), p_values=("p", "p, Holm"), finish=finish,
        otherwise="no answers were scored by source (see asmi_sources)",
    )  # fmt: skip


def _rows(group: RunGroup, methods: Mapping[tuple[str, str], str]) -> list[dict[str, Any]]:
    """A row for each (symbol, source) -> method."""
    scores = {method: group.score(method) for method in methods.values()}
    methods_of_all = {key: methods.get((key[0], "all")) for key in methods if key[1] != "all"}
    pairs = [(methods[key], method) for key, method in methods_of_all.items() if method is not None]
    intervals, paired = prr_intervals(scores, group.quality, group.clusters, pairs)
    rows = []
    for (symbol, source), method in methods.items():
        values, of_all = scores[method], methods_of_all.get((symbol, source))
        partial = source != "all"
        rows.append(
            {
                "setting": group.label,
                "score": symbol,
                "source": source,
                "PRR": intervals[method],
                "Δ all": None if of_all is None else paired[method, of_all],
                "AUROC": auroc(values, group.wrong),
                **_beyond(group, values),
                "share of MI": _share(group, method, of_all) if partial else None,
                "attention": _attention(group, source) if partial else None,
                "ρ all": None if of_all is None else _rank(values, scores[of_all]),
                "ρ length": _rank(values, group.lengths),
            }
        )
    return rows


def _beyond(group: RunGroup, values: np.ndarray) -> dict[str, Any]:
    """The test of added information; NaN if controls were not saved or it is undefined."""
    try:
        msp, entropy, lengths = group.need("msp", "entropy", "lengths")
        controls = np.column_stack([msp, entropy, lengths])
        added = adds_information(values, controls, group.wrong, group.clusters)
    except (Unavailable, ValueError):
        return {"z": float("nan"), "p": float("nan")}
    return {"z": added.statistic, "p": added.p_value}


def _rank(values: np.ndarray, others: np.ndarray | None) -> float | None:
    """Spearman correlation; None without others, or if either is constant."""
    if others is None or np.ptp(values) == 0 or np.ptp(others) == 0:
        return None
    return rank_correlation(values, others)
