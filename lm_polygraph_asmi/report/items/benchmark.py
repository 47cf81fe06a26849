"""Benchmark, head-to-head, depths, stability."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis.clusters import (
    PRR_RESAMPLES,
    RESAMPLES,
    Interval,
    percentile_interval,
)
from lm_polygraph_asmi.analysis.comparison import augrc, auroc, drawn_prr, prr_intervals
from lm_polygraph_asmi.analysis.depth import Sweep, depth_selection
from lm_polygraph_asmi.analysis.prr import PRR, normalised_prr, prrs_with_error
from lm_polygraph_asmi.analysis.stability import seed_stability
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import (
    Items,
    MissingItem,
    Reason,
    ReportItem,
    brief,
    frame,
    leading,
    listed,
)
from lm_polygraph_asmi.results.run_groups import (
    SEMANTIC_ENTROPY,
    RunGroup,
    Unavailable,
    once,
    one_per_question_set,
)
from lm_polygraph_asmi.results.runs import MSP

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


def _families(groups: Sequence[RunGroup]) -> dict[str, str]:
    """Method -> family."""
    families = {m: FAMILIES.get(m, "other") for group in groups for m in group.scores}
    return families | {method: ASMI_FAMILY for group in groups for method in group.methods}


def _in_table_order(groups: Sequence[RunGroup]) -> list[str]:
    """Methods in the paper's order of families, variants by depth."""
    family_of = _families(groups)
    asmi_configs = {m: config for group in groups for m, config in group.methods.items()}
    families = [*dict.fromkeys(FAMILIES.values()), "other", ASMI_FAMILY]
    known = list(FAMILIES)

    def position(method: str) -> tuple[int, float, int]:
        depth = asmi_configs[method].depth if method in asmi_configs else 0
        rank = known.index(method) if method in known else len(known)
        return families.index(family_of[method]), depth, rank

    return sorted(family_of, key=position)


def competes(method: str, group: RunGroup) -> bool:
    """Whether a method can be marked best: baselines and the operating variants."""
    return method not in group.methods or method in group.variants.values()


def benchmark(groups: Sequence[RunGroup]) -> Items:
    """Table "bench_main" of the paper with all methods and depths; also by AUROC and AUGRC."""
    methods = _in_table_order(groups)
    ranked = _by_method(groups, methods, _with_error, True)
    draw = partial(
        figures.forest,
        {group.label: {brief(m): i for m, i in intervals_of(group)[0].items()} for group in groups},
        "PRR, 95 % over clusters; black: baselines, blue: ASMI",
        black=[brief(method) for group in groups for method in group.baselines],
    )
    marks = (
        "The highest among baselines and the variants at the operating depth is bold if the "
        "paired 95 % interval (over clusters) of its difference from the next best excludes 0, "
        "else underlined."
    )
    short = [f"{brief(m)} = {m}" for m in methods if brief(m) != m]
    items = [
        ReportItem(
            "benchmark", "Benchmark: PRR of every method", groups, ranked, draw,
            [
                "PRR: 1 = errors rejected first, 0 = chance, negative = worse than chance. "
                f"{marks} Compare only within a column.",
                "Ties: mean over all orders; LM-Polygraph's own PRR takes them in file order.",
            ],
            pictured=f"Figure: 95 % intervals over clusters ({PRR_RESAMPLES:,} resamples), "
            f"uncorrected{'; ' if short else ''}{', '.join(short)}.",
        )
    ]  # fmt: skip
    tested = [group for group in groups if not group.wrong.all() and group.wrong.any()]
    if tested:
        measures = {
            "auroc": (
                "Benchmark: AUROC of every method", auroc,
                "Probability that a wrong answer scores higher than a right one; 0.5 = chance, "
                "below 0.5 = worse than chance. PRR gives the few most confident answers most "
                "weight, AUROC weighs all alike: if they disagree, few answers decide.",
            ),
            "augrc": (
                "Benchmark: AUGRC of every method", augrc,
                "Wrong answers accepted, as a share of all, averaged over all coverages (Traub et "
                "al. 2024); lower = better, half the error rate = chance. Unlike AURC, it does "
                "not overweight the few most confident answers.",
            ),
        }  # fmt: skip
        for name, (title, measure, note) in measures.items():
            table = _by_method(tested, methods, partial(_of_errors, measure), False)
            items.append(ReportItem(f"benchmark_{name}", title, tested, table, None, [note], 3))
    return items


def _of_errors(
    measure: Callable[[np.ndarray, np.ndarray], float], group: RunGroup
) -> dict[str, float]:
    return {m: measure(group.score(m), group.wrong) for m in group.scores}


@once
def _prr(group: RunGroup) -> dict[str, float]:
    return {m: normalised_prr(group.score(m), group.quality) for m in group.scores}


@once
def _with_error(group: RunGroup) -> dict[str, PRR]:
    scores = [group.score(m) for m in group.scores]
    return dict(zip(group.scores, prrs_with_error(scores, group.answers), strict=True))


def _by_method(
    groups: Sequence[RunGroup],
    methods: Sequence[str],
    values: Callable[[RunGroup], Mapping[str, Any]],
    marked: bool,
) -> pd.DataFrame:
    """A row per method, a column per setting; the highest is marked if `marked`."""
    families = _families(groups)
    table = pd.DataFrame({"method": methods, "family": [families.get(m) for m in methods]})
    for group in groups:
        by_method, lead = values(group), _lead(group) if marked else {}
        table[group.label] = [
            leading(by_method[m], lead[m]) if m in lead else by_method.get(m) for m in methods
        ]
    return table


def _lead(group: RunGroup) -> dict[str, Interval]:
    """The method of highest PRR, and its difference from the next best."""
    pair = _first_two(group)
    return {pair[0]: intervals_of(group)[1][pair]} if pair else {}


@once
def _first_two(group: RunGroup) -> tuple[str, str] | None:
    """The two competing methods of highest PRR; None if there are fewer."""
    prr = _prr(group)
    order = sorted(
        (m for m in prr if competes(m, group) and not np.isnan(prr[m])), key=lambda m: -prr[m]
    )
    return (order[0], order[1]) if len(order) > 1 else None


def _mean_length(group: RunGroup, chosen: np.ndarray) -> float | None:
    if group.lengths is None or not chosen.any():
        return None
    return float(group.lengths[chosen].mean())


def datasets(groups: Sequence[RunGroup]) -> Items:
    """Table "datasets" of the paper."""

    def compute(group: RunGroup) -> dict[str, Any]:
        prompts, answers = group.saved("asmi_prompt_length"), group.saved("greedy_tokens")
        return {
            "setting": group.label,
            "n": len(group),
            "clusters": len(set(group.clusters)),
            "prompt tokens": f"{np.median(prompts):g}" if prompts else None,
            "answer tokens": f"{np.median([len(a) for a in answers]):g}" if answers else None,
            "tokens of right": _mean_length(group, ~group.wrong),
            "tokens of wrong": _mean_length(group, group.wrong),
            "empty": None if group.empty is None else float(group.empty.mean()),
            f"mean {group.metric}": float(group.quality.mean()),
            "right": float(1 - group.wrong.mean()),
            "answers expected from": {True: "context", False: "memory", None: None}[group.grounded],
        }

    notes = [
        "Prompt and answer tokens: medians. Tokens of right and of wrong answers: means. Empty: "
        "share of answers without a letter or digit. Right: share with quality of at least 0.5."
    ]
    return frame("datasets", "Datasets", groups, compute, notes)


def _best(methods: Sequence[str], prr: Mapping[str, float]) -> str | None:
    defined = [m for m in methods if not np.isnan(prr[m])]
    return max(defined, key=lambda m: prr[m]) if defined else None


COMPARED = ("top Δ SemEnt", "top Δ best baseline", "Sem-ASMI Δ SemEnt", "Sem-ASMI Δ MSP")
"""Columns of the head-to-head table, first minus second."""
SINGLE_PASS = {
    method for method, family in FAMILIES.items() if family in ("information", "attention")
}
"""Baselines read from the pass that generates the answer: no samples, no further question."""


@once
def compared_on(group: RunGroup) -> dict[str, tuple[str, str]]:
    """The report's comparisons on a setting: name -> (first method, second method)."""
    prr = _prr(group)
    top, best = _best(list(group.variants.values()), prr), _best(group.baselines, prr)
    single_pass = _best([method for method in group.baselines if method in SINGLE_PASS], prr)
    semantic = group.variants.get("Sem-ASMI")
    pairs = {
        "top Δ SemEnt": (top, SEMANTIC_ENTROPY),
        "top Δ best baseline": (top, best),
        "Sem-ASMI Δ SemEnt": (semantic, SEMANTIC_ENTROPY),
        "Sem-ASMI Δ MSP": (semantic, MSP),
        "top Δ best single-pass": (top, single_pass),
    }
    return {
        name: (first, second)
        for name, (first, second) in pairs.items()
        if first is not None and second is not None and {first, second} <= set(group.scores)
    }


@once
def intervals_of(group: RunGroup) -> tuple[dict[str, Interval], dict[tuple[str, str], Interval]]:
    """PRR intervals of a setting's methods, and all differences that the report shows."""
    pairs = [*compared_on(group).values(), *filter(None, [_first_two(group)])]
    scores = {m: group.score(m) for m in group.scores}
    return prr_intervals(scores, group.answers, pairs)


def head_to_head(groups: Sequence[RunGroup]) -> Items:
    """Table "h2h" of the paper: paired differences."""
    title = "Head-to-head: paired differences of PRR"

    def compute(group: RunGroup) -> dict[str, Any]:
        intervals, paired = intervals_of(group)
        pairs = compared_on(group)
        if "top Δ best baseline" not in pairs:
            raise Unavailable("no variant and baseline with a defined PRR")
        top, best = pairs["top Δ best baseline"]
        differences = {n: paired[pairs[n]] if n in pairs else None for n in COMPARED}
        return {
            "setting": group.label,
            "top variant": f"{top} ({intervals[top].value:.3f})",
            "best baseline": f"{best} ({intervals[best].value:.3f})",
            **differences,
        }

    def draw(table: pd.DataFrame) -> Figure:
        return figures.forest(
            {
                delta: dict(zip(table["setting"], table[delta], strict=True))
                for delta in COMPARED
                if table[delta].notna().any()
            },
            "ΔPRR, 95 % over clusters",
        )

    notes = [
        "Top: the ASMI variant of highest PRR on a setting's answers; SemEnt: semantic entropy. "
        "Paired bootstrap of clusters; positive: ASMI is higher. Intervals are uncorrected. "
        "The best baseline and the top variant are chosen on the same answers; intervals ignore "
        "that choice."
    ]
    if not any(SEMANTIC_ENTROPY in group.scores for group in groups):
        notes.append(
            "SemanticEntropy, the pre-specified baseline, was not run (it needs an NLI model): "
            "its columns are empty."
        )
    return frame(
        "head_to_head", title, groups, compute, notes, draw, digits=3, signed=COMPARED,
        resamples=PRR_RESAMPLES,
    )  # fmt: skip


def _sweeps(groups: Sequence[RunGroup]) -> tuple[list[tuple[Any, ...]], str]:
    """(variant, its common depths, setting -> methods), and what is left out, with reasons."""
    groups, doubled = one_per_question_set(groups)
    reasons: list[Reason] = [(label, "a larger run has the same questions") for label in doubled]
    sweeps: list[tuple[Any, ...]] = []
    for symbol in ("Adapt-ASMI", "Sem-ASMI"):
        swept = {group: _by_depth(group, symbol) for group in groups}
        swept = {group: methods for group, methods in swept.items() if len(methods) > 1}
        common = sorted(set.intersection(*(set(m) for m in swept.values()))) if swept else []
        if len(common) < 2:
            continue
        halved = {c: m for c, m in swept.items() if c.answers.n_clusters > 1}
        reasons += [(c.label, "one cluster") for c in swept if c not in halved]
        methods = {c: [m[depth] for depth in common] for c, m in halved.items()}
        sweeps.append((symbol, common, methods, *halved))
    return sweeps, listed(reasons)


def depths(groups: Sequence[RunGroup]) -> Items:
    """Appendix "Full Benchmark and Depth Sweep": best depth, and whether halves agree on it."""
    by_group: list[dict[str, Any]] = []
    sweeps, left_out = _sweeps(groups)

    def compute(sweep: tuple[Any, ...]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        symbol, common, methods, *halved = sweep
        scores = {c: np.array([c.score(m) for m in methods[c]]) for c in halved}
        selection = depth_selection([Sweep(scores[c], c.answers) for c in halved])
        if np.ptp(selection.aggregate) == 0:
            raise Unavailable("PRR is the same at all depths")
        drawn = {c: _drawn_at_depths(c, *methods[c]) for c in halved}
        num_clusters = min(c.answers.n_clusters for c in halved)
        mean = _mean(drawn.values())
        lead = _ahead(selection.aggregate, mean, num_clusters)
        curves = figures.DepthCurves(
            common,
            {
                c.label: (prr, _band(drawn[c], len(set(c.clusters))))
                for c, prr in zip(halved, selection.groups, strict=True)
            },
            (selection.aggregate, _band(mean, num_clusters)),
        )
        for c, prr in zip(halved, selection.groups, strict=True):
            by_group.append(_depths_of(c, symbol, common, prr, drawn[c]))
        rows = [
            {
                "variant": symbol,
                "depth": f"{depth:.0%}",
                "aggregate PRR": leading(selection.aggregate[i], lead)
                if i == selection.chosen
                else float(selection.aggregate[i]),
                "selected on halves": float(selection.selected[i]),
                "mean regret": selection.mean_regret if i == selection.chosen else None,
                "no regret": selection.no_regret if i == selection.chosen else None,
            }
            for i, depth in enumerate(common)
        ]
        return rows, {symbol: curves}

    notes = [
        "Aggregate: mean over settings. The highest is bold if the paired 95 % interval (over "
        "clusters) of its difference from the next excludes 0, else underlined. Selected on "
        "halves: in 1,000 random splits of the clusters, how often a depth is best on the first "
        "half. Regret: the PRR that this choice loses on the second half (no regret: share of "
        "splits that lose nothing). It describes the whole procedure and is shown in the row of "
        "the chosen depth.",
        *([f"Left out: {left_out}."] if left_out else []),
    ]
    pictured = (
        "Figure: pointwise 95 % bands over clusters (2,000 resamples), per setting if there are "
        f"at most {figures.FEW}, else of the mean over settings. With more than {figures.MANY} "
        "settings, only those of highest and lowest mean PRR are named; the others are grey (see "
        "the table by setting)."
    )
    items = frame(
        "depth_selection", "Depth selection", sweeps, compute, notes, figures.depths, digits=3,
        label=lambda sweep: sweep[0], pictured=pictured,
        otherwise=left_out or "no variant was scored at two or more depths (see asmi_depth_sweep)",
    )  # fmt: skip
    if isinstance(items[0], MissingItem):
        return items
    return [*items, _by_setting(pd.DataFrame(by_group), items[0].groups)]


def _by_setting(table: pd.DataFrame, groups: Sequence[RunGroup]) -> ReportItem:
    """PRR at every depth, and how often each is the best."""
    rows_by_variant = {symbol: rows.index for symbol, rows in table.groupby("variant", sort=False)}
    counts = [
        f"{symbol}: {depth} is best or tied-best in {int(count)} of {len(rows)}"
        for symbol, rows in rows_by_variant.items()
        for depth, count in table.loc[rows, "best or tied"].explode().value_counts().items()
    ]
    table["best or tied"] = [", ".join(best) for best in table["best or tied"]]
    notes = [
        "PRR at every depth. Best or tied: the highest, and depths whose paired 95 % interval "
        "(over clusters) of the difference from it includes 0. Settings by depth: "
        f"{'; '.join(counts)}."
    ]
    title = "PRR by depth and setting"
    return ReportItem("depth_by_group", title, groups, table, None, notes, 3)


@once
def _drawn_at_depths(group: RunGroup, *methods: str) -> np.ndarray:
    """(B, D) PRR at every depth; settings with the same questions share their resamples."""
    scores = {m: group.score(m) for m in methods}
    drawn = drawn_prr(scores, group.answers, RESAMPLES)[1]
    return np.column_stack([drawn[m] for m in methods])


def _mean(drawn: Iterable[np.ndarray]) -> np.ndarray:
    """(B, D) mean over the settings where PRR is defined."""
    defined = [prr for prr in drawn if np.isfinite(prr).any()]
    return np.nanmean(defined, axis=0) if defined else np.full((1, 1), np.nan)


def _ahead(prr: np.ndarray, drawn: np.ndarray, clusters: int) -> Interval:
    """The highest minus the next, paired; `drawn` (B, D) as of `_mean`."""
    first, second = np.argsort(-prr, kind="stable")[:2]
    if drawn.shape[1] < 2:
        return Interval(float(prr[first] - prr[second]), float("nan"), float("nan"))
    return percentile_interval(
        prr[first] - prr[second], drawn[:, first] - drawn[:, second], clusters
    )


def _band(drawn: np.ndarray, clusters: int) -> np.ndarray:
    """(2, D) pointwise 95 % band."""
    ends = [percentile_interval(0.0, column, clusters) for column in drawn.T]
    return np.array([[end.low for end in ends], [end.high for end in ends]])


def _depths_of(
    group: RunGroup, symbol: str, depths: Sequence[float], prr: np.ndarray, drawn: np.ndarray
) -> dict[str, Any]:
    """A variant's PRR at every depth of a setting, and the depths that are best or tied."""
    names = [f"{depth:.0%}" for depth in depths]
    row: dict[str, Any] = {"setting": group.label, "variant": symbol}
    row |= dict(zip(names, map(float, prr), strict=True))
    if np.isnan(prr).any():
        return row | {"best or tied": []}
    best = int(prr.argmax())
    gaps = [
        percentile_interval(prr[best] - value, drawn[:, best] - column, group.answers.n_clusters)
        for value, column in zip(prr, drawn.T, strict=True)
    ]
    tied = [name for name, gap in zip(names, gaps, strict=True) if not gap.excludes(0)]
    return row | {"best or tied": tied}


def _by_depth(group: RunGroup, symbol: str) -> dict[float, str]:
    """depth -> method, for methods that differ from the operating variant only in depth."""
    if symbol not in group.variants:
        return {}
    operating = group.methods[group.variants[symbol]]
    return {
        config.depth: method
        for method, config in group.methods.items()
        if config.same_but(operating, "depth")
    }


def stability(groups: Sequence[RunGroup]) -> Items:
    """Table "stability" of the paper: other seeds of masks and samples, same answers."""
    title = "Seed stability: the same answers with other masks and samples"

    def compute(group: RunGroup) -> list[dict[str, Any]]:
        rows = []
        for method, drawn in other_seeds(group).items():
            over_seeds = seed_stability(drawn, group.quality)
            rows.append(
                {
                    "setting": group.label,
                    "method": method,
                    "other_seeds": len(drawn),
                    "mean PRR": over_seeds.mean,
                    "sd": over_seeds.sd,
                    "lowest": over_seeds.low,
                    "highest": over_seeds.high,
                    "rank ρ": over_seeds.rank_correlation,
                }
            )
        return rows

    notes = [
        "PRR over seeds on the same answers; rank ρ: mean Spearman correlation of pairs of seeds. "
        "With few seeds, the sd is imprecise."
    ]
    missing = "no answers were scored twice with other masks or samples (see asmi_stability)"
    return frame("stability", title, groups, compute, notes, digits=3, otherwise=missing)


def other_seeds(group: RunGroup) -> dict[str, np.ndarray]:
    """Method without its seed -> (R, n) scores, a row per seed of its masks and samples."""
    drawn: dict[str, dict[tuple[Any, ...], np.ndarray]] = {}
    by_name: dict[str, ASMIConfig] = {}
    for run in group.runs:
        seeds = run.recorded("seeds")
        mask_seeds = [used["seed"] for used in run.settings()][:1] or [seeds.get("masks")]
        for method in run.scores:
            config = run.methods.get(method)
            if config is None and method not in SAMPLING:
                continue
            sample_seeds = [] if config and config.method != "adapt" else [seeds.get("samples")]
            seed = (*(mask_seeds if config else []), *sample_seeds)
            scores = run.scores[method].to_numpy(dtype=float)[group.rows]
            if np.isfinite(scores).all():
                name = method if config is None else str(config.replace(seed=ASMIConfig.seed))
                if config and not config.same_but(by_name.setdefault(name, config), "seed"):
                    continue  # of another number of samples
                drawn.setdefault(name, {}).setdefault(seed, scores)
    return {n: np.array([*by_seed.values()]) for n, by_seed in drawn.items() if len(by_seed) > 1}
