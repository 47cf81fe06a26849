"""Who wins: benchmark, head-to-head, depths, stability."""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis import comparison
from lm_polygraph_asmi.analysis.clusters import SEED, Interval
from lm_polygraph_asmi.analysis.depth import Sweep, depth_selection
from lm_polygraph_asmi.analysis.prr import normalised_prr, prr_with_error
from lm_polygraph_asmi.analysis.redraws import redraw_stability
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.exhibit import Exhibit, Gap, Items, Marked, Reason, frame
from lm_polygraph_asmi.saved.cells import (
    SEMANTIC_ENTROPY,
    Cell,
    Unavailable,
    one_per_question_set,
    variant,
)
from lm_polygraph_asmi.saved.runs import MSP

FAMILIES = {
    "MaximumSequenceProbability": "information", "Perplexity": "information",
    "MeanTokenEntropy": "information", "MeanPointwiseMutualInformation": "information",
    "SelfCertainty": "information", "MeanConditionalPointwiseMutualInformation": "information",
    "MonteCarloSequenceEntropy": "samples", "MonteCarloNormalizedSequenceEntropy": "samples",
    "SemanticEntropy": "samples", "SAR": "samples", "SentenceSAR": "samples", "LUQ": "samples",
    "KernelLanguageEntropy": "samples", "PTrue": "probing", "PTrueSampling": "probing",
    "RAUQ": "attention", "RAUQ (entropy)": "attention",
}  # fmt: skip
"""The paper's 17 baselines and their families; any other method is "other"."""
ASMI_FAMILY = "head masks"
SAMPLING = {m for m, family in FAMILIES.items() if family == "samples"} | {"PTrueSampling"}
"""Baselines that depend on the sampled answers."""


def family(method: str) -> str:
    return ASMI_FAMILY if variant(method) else FAMILIES.get(method, "other")


def _in_table_order(cells: Sequence[Cell]) -> list[str]:
    """Methods by family as in the paper, variants by depth."""
    found = dict.fromkeys(method for cell in cells for method in cell.scores)
    families = [*dict.fromkeys(FAMILIES.values()), "other", ASMI_FAMILY]
    known = list(FAMILIES)

    def position(method: str) -> tuple[int, float, int]:
        parsed = variant(method)
        place = known.index(method) if method in known else len(known)
        return families.index(family(method)), parsed.depth if parsed else 0, place

    return sorted(found, key=position)


def _competes(method: str, cell: Cell) -> bool:
    """Whether a method is marked best or second best: baselines, and the operating variants."""
    return variant(method) is None or method in cell.variants.values()


def benchmark(cells: Sequence[Cell]) -> Items:
    """Table "bench_main" of the paper, with all methods and depths."""
    methods = _in_table_order(cells)
    table = pd.DataFrame({"method": methods, "family": [family(m) for m in methods]})
    for cell in cells:
        found = {m: prr_with_error(cell.score(m), cell.quality) for m in cell.scores}
        # As printed: what looks equal is marked alike.
        printed = {
            m: round(prr.value, 2)
            for m, prr in found.items()
            if _competes(m, cell) and not np.isnan(prr.value)
        }
        best = sorted(set(printed.values()), reverse=True)[:2]
        styles = dict(zip(best, ("bold", "underline"), strict=False))
        marks = {m: styles[value] for m, value in printed.items() if value in styles}
        table[cell.label] = [
            Marked(found[m], marks[m]) if m in marks else found.get(m) for m in methods
        ]
    return [
        Exhibit(
            "benchmark",
            "Benchmark: PRR of every method",
            cells,
            table,
            figures.forest(
                {cell.label: intervals_of(cell)[0] for cell in cells},
                "PRR, 95 % over clusters",
                black=[method for method in methods if variant(method) is None],
            ),
            [
                "PRR ± bootstrap standard error over answers; 1 = errors rejected first, 0 = "
                "uninformative, below 0 = errors ranked the wrong way. Best in bold, second best "
                "underlined, among baselines and the variants at the operating depth. The figure "
                "has 95 % intervals over clusters. Compare within a column only.",
                "Equal scores count as their mean over all orders; LM-Polygraph's own figure takes "
                "them as the file orders them.",
            ],
        )
    ]


def datasets(cells: Sequence[Cell]) -> Items:
    """Table "datasets" of the paper."""

    def compute(cell: Cell) -> list[dict[str, Any]]:
        prompts, answers = cell.saved("asmi_prompt_length"), cell.saved("greedy_tokens")
        return [
            {
                "cell": cell.label,
                "n": len(cell),
                "clusters": len(set(cell.clusters)),
                "prompt tokens": f"{np.median(prompts):g}" if prompts else None,
                "answer tokens": f"{np.median([len(a) for a in answers]):g}" if answers else None,
                f"mean {cell.metric}": float(cell.quality.mean()),
                "right": float(1 - cell.wrong.mean()),
                "answers expected from": {True: "context", False: "memory", None: None}[
                    cell.grounded
                ],
            }
        ]

    notes = ["Medians of tokens; right: quality of at least 0.5."]
    return frame("datasets", "Datasets", cells, compute, notes)


@cache
def intervals_of(cell: Cell) -> tuple[dict[str, Interval], dict[tuple[str, str], Interval]]:
    """PRR intervals of a cell's methods, and of the differences the report needs."""
    prr = {m: normalised_prr(cell.score(m), cell.quality) for m in cell.scores}
    pairs = [(a, b) for a in _references(cell, prr) for b in _references(cell, prr) if a != b]
    return comparison.prr_intervals(
        {m: cell.score(m) for m in cell.scores}, cell.quality, cell.clusters, pairs, 10_000, SEED
    )


def _references(cell: Cell, prr: dict[str, float]) -> list[str]:
    named = [m for m in (MSP, SEMANTIC_ENTROPY) if m in cell.scores]
    best = _best(cell.baselines, prr)
    return list(dict.fromkeys([*cell.variants.values(), *named, *([best] if best else [])]))


def _best(methods: Sequence[str], prr: dict[str, float]) -> str | None:
    defined = [m for m in methods if not np.isnan(prr[m])]
    return max(defined, key=lambda m: prr[m]) if defined else None


DELTAS = ("top Δ SemEnt", "top Δ best baseline", "Sem-ASMI Δ SemEnt", "Sem-ASMI Δ MSP")
"""Columns of the head-to-head table, first minus second."""


def head_to_head(cells: Sequence[Cell]) -> Items:
    """Table "h2h" of the paper: paired differences, and how often they decide."""
    title = "Head-to-head: paired differences of PRR"

    def compute(cell: Cell) -> list[dict[str, Any]]:
        alone, paired = intervals_of(cell)
        prr = {m: found.value for m, found in alone.items()}
        top, best = _best(list(cell.variants.values()), prr), _best(cell.baselines, prr)
        if top is None or best is None:
            raise Unavailable("no variant and baseline with a defined PRR")
        semantic = cell.variants.get("Sem-ASMI", "")
        return [
            {
                "cell": cell.label,
                "top variant": f"{top} ({prr[top]:.3f})",
                "best baseline": f"{best} ({prr[best]:.3f})",
            }
            | dict(
                zip(
                    DELTAS,
                    (
                        paired.get((top, SEMANTIC_ENTROPY)),
                        paired[top, best],
                        paired.get((semantic, SEMANTIC_ENTROPY)),
                        paired.get((semantic, MSP)),
                    ),
                    strict=True,
                )
            )
        ]

    def draw(table: pd.DataFrame) -> Figure:
        return figures.forest(
            {
                delta: dict(zip(table["cell"], table[delta], strict=True))
                for delta in DELTAS
                if table[delta].notna().any()
            },
            "ΔPRR, 95 % over clusters",
        )

    notes = [
        "Cluster-respecting paired bootstrap, B = 10,000, percentile 95 %; positive = ASMI ahead, "
        "asterisk: the interval excludes zero. The best baseline and the top variant are chosen on "
        "the same answers; the interval takes them as given."
    ]
    (item,) = frame("head_to_head", title, cells, compute, notes, draw, digits=3, signed=DELTAS)
    if isinstance(item, Gap):
        return [item]
    if not any(SEMANTIC_ENTROPY in cell.scores for cell in cells):
        item.notes = [
            *item.notes,
            "SemanticEntropy, the pre-specified reference, was not run (it needs an NLI model): "
            "its columns are empty.",
        ]
    assert item.table is not None
    return [item, _tallies(item.cells, item.table)]


def _tallies(cells: Sequence[Cell], table: pd.DataFrame) -> Exhibit | Gap:
    def is_llama_squad(cell: Cell) -> bool:
        name = f"{cell.model} {cell.dataset}".lower()
        return "llama2" in re.sub("[ -]", "", name) and "squad" in name

    counted, doubled = one_per_question_set(cells)
    kinds = {"grounded": True, "closed-book": False, "not recorded which": None}
    subsets = {
        name: [cell in counted and cell.grounded is kind for cell in cells]
        for name, kind in kinds.items()
    }
    if any(is_llama_squad(cell) and cell.grounded for cell in cells):
        subsets["grounded, without Llama-2 on SQuAD"] = [
            chosen and not is_llama_squad(cell)
            for cell, chosen in zip(cells, subsets["grounded"], strict=True)
        ]
    rows = []
    for name, chosen in subsets.items():
        for delta in DELTAS:
            found = [d for d in table.loc[chosen, delta] if isinstance(d, Interval)]
            counts = comparison.tally(found)._asdict()
            if any(counts.values()):
                leads = sum(d.value > 0 for d in found)
                rows.append({"cells": name, "comparison": delta} | counts | {"leads": leads})
    title = "Wins, ties and losses"
    if not rows:
        return Gap(title, "no difference has an interval: fewer than two clusters in every run")
    notes = [
        "Win or loss: the interval excludes zero; tie: it does not; lead: the difference is "
        "positive."
    ]
    if len(subsets) > len(kinds):
        notes.append("The paper counts without Llama-2 on SQuAD too, where many answers are empty.")
    if doubled:
        notes.append(f"Not counted, since a larger run asks the same: {'; '.join(doubled)}.")
    return Exhibit("wins_ties_losses", title, cells, pd.DataFrame(rows), None, notes)


def depths(cells: Sequence[Cell]) -> Items:
    """Appendix "Full Benchmark and Depth Sweep": which depth, and would halves agree."""
    title = "Depth selection"
    curves = {}
    cells, doubled = one_per_question_set(cells)
    reasons: list[Reason] = [(label, "a larger run asks the same") for label in doubled]
    sweeps = []
    for symbol in ("Adapt-ASMI", "Sem-ASMI"):
        swept = {cell: _by_depth(cell, symbol) for cell in cells}
        swept = {cell: methods for cell, methods in swept.items() if len(methods) > 1}
        common = sorted(set.intersection(*(set(m) for m in swept.values()))) if swept else []
        if len(common) < 2:
            continue
        halved = {c: m for c, m in swept.items() if len(set(c.clusters)) > 1}
        reasons += [(c.label, "one cluster") for c in swept if c not in halved]
        methods = {c: [m[depth] for depth in common] for c, m in halved.items()}
        sweeps.append((symbol, common, methods, *halved))

    def compute(sweep: tuple[Any, ...]) -> list[dict[str, Any]]:
        symbol, common, methods, *halved = sweep
        found = depth_selection(
            [
                Sweep(np.array([c.score(m) for m in methods[c]]), c.quality, c.clusters)
                for c in halved
            ]
        )
        if np.ptp(found.aggregate) == 0:
            raise Unavailable("PRR is the same at all depths")
        curves[symbol] = (common, found.cells, [c.label for c in halved])
        return [
            {
                "variant": symbol,
                "depth": f"{depth:.0%}",
                "aggregate PRR": Marked(found.aggregate[i], "bold")
                if i == found.chosen
                else float(found.aggregate[i]),
                "selected on halves": float(found.selected[i]),
                "mean regret": found.mean_regret if i == found.chosen else None,
                "no regret": found.no_regret if i == found.chosen else None,
            }
            for i, depth in enumerate(common)
        ]

    notes = [
        "Aggregate: mean over cells. Split-half: 1,000 random halves of clusters; the depth that "
        "is best on the first half, and the PRR it loses on the second (share of splits that lose "
        "nothing). Regret stands in the row of the chosen depth and is of the whole procedure."
    ]
    return frame(
        "depth_selection", title, sweeps, compute, notes, lambda _: figures.depths(curves),
        digits=3, label=lambda sweep: sweep[0], reasons=reasons,
        otherwise="no variant was scored at two or more depths (see asmi_depth_sweep)",
    )  # fmt: skip


def _by_depth(cell: Cell, symbol: str) -> dict[float, str]:
    """depth -> method, for methods that differ from the operating variant in depth alone."""
    if symbol not in cell.variants:
        return {}
    operating = variant(cell.variants[symbol])
    assert operating is not None
    found = {}
    for method in cell.scores:
        parsed = variant(method)
        if parsed and (parsed.symbol, parsed.settings) == (symbol, operating.settings):
            found[parsed.depth] = method
    return found


def stability(cells: Sequence[Cell]) -> Items:
    """Table "stability" of the paper: redraws of masks and samples on fixed answers."""
    title = "Stability over redraws of the method's own randomness"

    def compute(cell: Cell) -> list[dict[str, Any]]:
        rows = []
        for method, drawn in _redraws(cell).items():
            found = redraw_stability(drawn, cell.quality)
            rows.append(
                {
                    "cell": cell.label,
                    "method": method,
                    "redraws": len(drawn),
                    "mean PRR": found.mean,
                    "sd": found.sd,
                    "lowest": found.low,
                    "highest": found.high,
                    "rank ρ": found.rank_correlation,
                }
            )
        return rows

    notes = [
        "PRR over redraws on the same answers, and mean Spearman correlation of pairs of redraws. "
        "With few redraws the sd is coarse."
    ]
    missing = "no answers were scored twice with other masks or samples (see asmi_stability)"
    return frame("stability", title, cells, compute, notes, digits=3, otherwise=missing)


def _redraws(cell: Cell) -> dict[str, np.ndarray]:
    """Method without its seed -> (R, n) scores, a row per seed of what is random in it."""
    drawn: dict[str, dict[tuple[Any, ...], np.ndarray]] = {}
    for run in cell.runs:
        seeds = run.recorded("seeds")
        masks = [used["seed"] for used in run.settings()][:1] or [seeds.get("masks")]
        for method in run.scores:
            parsed = variant(method)
            if parsed is None and method not in SAMPLING:
                continue
            own = [] if parsed and parsed.symbol != "Adapt-ASMI" else [seeds.get("samples")]
            seed = (*(masks if parsed else []), *own)
            scores = run.scores[method].to_numpy(dtype=float)[cell.rows]
            if np.isfinite(scores).all():
                name = re.sub(r", seed=\d+", "", method)
                drawn.setdefault(name, {}).setdefault(seed, scores)
    return {n: np.array([*by_seed.values()]) for n, by_seed in drawn.items() if len(by_seed) > 1}
