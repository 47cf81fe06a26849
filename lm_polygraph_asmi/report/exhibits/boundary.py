"""Where it ends: closed-book recall, and the truncation to K tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.comparison import prr_intervals
from lm_polygraph_asmi.analysis.coverage import coverage_by_band
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.cells import Cell, Unavailable, variant
from lm_polygraph_asmi.report.exhibit import Exhibit, Gap, Items, gap, left_out
from lm_polygraph_asmi.statistics import COVERAGE_AT


def boundary(cells: Sequence[Cell]) -> Items:
    """Same questions with and without the passage; appendix "Boundary Deconfounds"."""
    title = "Boundary: open against closed book"
    rows, used, reasons = [], [], []
    for opened, closed in _twins(cells):
        try:
            rows += _twin_rows(opened, closed)
        except Unavailable as error:
            reasons.append(f"{opened.label} against {closed.dataset}: {error}")
        else:
            used += [cell for cell in (opened, closed) if cell not in used]
    if not rows:
        return gap(title, reasons, "no model was asked the same questions with and without context")
    table = pd.DataFrame(rows)
    figure = figures.forest(
        {"Sem-ASMI minus MSP": dict(zip(table["cell"], table["Sem-ASMI Δ MSP"], strict=True))},
        "ΔPRR, 95 % over clusters",
    )
    notes = [
        "PRR on the questions that both runs asked, clusters of the open-book rows in both. Error "
        "rates differ between the two, so read the gaps within a row.",
        *left_out(reasons),
    ]
    signed = ("Sem-ASMI Δ MSP",)
    return [Exhibit("boundary", title, used, table, figure, notes, 3, signed)]


def _twins(cells: Sequence[Cell]) -> Iterator[tuple[Cell, Cell]]:
    """Open- and closed-book cells of one model over one source of questions."""

    def source(cell: Cell) -> object:
        return cell.model, cell.manifest.get("dataset", {}).get("source")

    for opened in cells:
        for closed in cells:
            book = closed.manifest.get("dataset", {}).get("closed_book")
            alike = source(opened) == source(closed) and opened.ids and closed.ids
            if alike and book and not opened.manifest.get("dataset", {}).get("closed_book"):
                yield opened, closed


def _twin_rows(opened: Cell, closed: Cell) -> list[dict[str, Any]]:
    place = {row: i for i, row in enumerate(closed.ids or [])}
    pairs = [(i, place[row]) for i, row in enumerate(opened.ids or []) if row in place]
    if not pairs:
        raise Unavailable("no question is in both runs")
    # Closed-book prompts have no passage: their rows take the clusters of their twins.
    clusters = [opened.clusters[i] for i, _ in pairs]
    rows = []
    for cell, chosen in ((opened, [i for i, _ in pairs]), (closed, [j for _, j in pairs])):
        sem, msp, difference = _gap_to_msp(cell, clusters, chosen)
        rows.append(
            {
                "cell": cell.label,
                "questions": len(pairs),
                f"mean {cell.metric}": float(cell.quality[chosen].mean()),
                "Sem-ASMI": sem,
                "MSP": msp,
                "Sem-ASMI Δ MSP": difference,
            }
        )
    return rows


def _gap_to_msp(cell: Cell, clusters: Sequence[str], rows: Sequence[int]) -> list[Interval]:
    """PRR of Sem-ASMI, of MSP, and the paired difference on some rows of a cell."""
    sem, msp = cell.need("u_sem", "msp")
    scores = {"sem": sem[rows], "msp": msp[rows]}
    quality = cell.quality[rows]
    alone, paired = prr_intervals(scores, quality, clusters, [("sem", "msp")])
    return [alone["sem"], alone["msp"], paired["sem", "msp"]]


def truncation(cells: Sequence[Cell]) -> Items:
    """The same masks with another K; appendix "Boundary Deconfounds", enlarged truncation."""
    title = "Boundary: larger K"
    rows, used = [], []
    for cell in cells:
        for symbol in ("Sem-ASMI", "ASMI"):
            by_k = _by_top_k(cell, symbol)
            for small, large in zip(sorted(by_k), sorted(by_k)[1:], strict=False):
                scores = {"small": cell.score(by_k[small]), "large": cell.score(by_k[large])}
                wanted = [("large", "small")]
                if cell.msp is not None:
                    scores["msp"] = cell.msp
                    wanted.append(("large", "msp"))
                _, paired = prr_intervals(scores, cell.quality, cell.clusters, wanted)
                used += [cell] if cell not in used else []
                rows.append(
                    {
                        "cell": cell.label,
                        "score": symbol,
                        "K": f"{small} → {large}",
                        "large Δ small K": paired["large", "small"],
                        "large K Δ MSP": paired.get(("large", "msp")),
                        "mean coverage, small K": _coverage_at(cell, small),
                        "mean coverage, large K": _coverage_at(cell, large),
                    }
                )
    if not rows:
        return [Gap(title, "no answers were scored with two K (see asmi_triviaqa_k256)")]
    notes = ["Same answers, same masks; paired 95 % intervals over clusters."]
    signed = ("large Δ small K", "large K Δ MSP")
    return [Exhibit("larger_k", title, used, pd.DataFrame(rows), None, notes, 3, signed)]


def _by_top_k(cell: Cell, symbol: str) -> dict[int, str]:
    """K -> method, for methods that differ from the operating variant in K alone."""
    operating = variant(cell.variants.get(symbol, ""))
    found: dict[int, str] = {}
    for method in cell.scores if operating else ():
        parsed = variant(method)
        if parsed and operating and (parsed.symbol, parsed.depth) == operating[:2]:
            own, other = (_without_top_k(name.settings) for name in (parsed, operating))
            if own[1] == other[1]:
                found[own[0]] = method
    return found


def _without_top_k(settings: str) -> tuple[int, str]:
    parts = settings.split(", ")
    return int(parts[0].removeprefix("K=")), ", ".join(parts[1:])


def _coverage_at(cell: Cell, top_k: int) -> float | None:
    saved = cell.saved("asmi_coverage", at_operating_depth=True)
    if saved is None or top_k not in COVERAGE_AT:
        return None
    return float(np.concatenate(saved)[:, COVERAGE_AT.index(top_k)].mean())


def coverage(cells: Sequence[Cell]) -> Items:
    """Table "topk-highmi" of the paper, all bands."""
    title = "Top-K coverage by disagreement"
    tables, used = [], []
    for cell in cells:
        saved = cell.saved("asmi_coverage", at_operating_depth=True)
        information = cell.saved("asmi_mi", at_operating_depth=True)
        if not saved or not information:
            continue
        used.append(cell)
        table = coverage_by_band(np.concatenate(information), np.concatenate(saved))
        table = table.rename(columns={k: f"K = {k}" for k in COVERAGE_AT})
        table.insert(0, "tokens", table.index)
        table.insert(0, "cell", cell.label)
        tables.append(table)
    if not tables:
        return [Gap(title, "no run saved asmi_coverage and asmi_mi (see save_stats)")]
    table = pd.concat(tables, ignore_index=True)
    notes = [
        "Mean probability mass of a subnetwork's K most likely tokens, averaged over masks; bands "
        "by MI_t. Bound: what the mass outside the top 64 adds to an entropy at most as one "
        "bucket, -m ln m nats.",
    ]
    return [Exhibit("top_k_coverage", title, used, table, figures.coverage(table), notes, 3)]
