"""Items on the benchmark: PRR, paired comparisons, depths, and seed stability."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lm_polygraph_asmi.analysis.clusters import (
    PRR_RESAMPLES,
    RESAMPLES,
    Interval,
    percentile_interval,
)
from lm_polygraph_asmi.analysis.comparison import prr_intervals
from lm_polygraph_asmi.analysis.depth import Sweep, depth_selection
from lm_polygraph_asmi.analysis.prr import prr_draws
from lm_polygraph_asmi.analysis.right import says_nothing
from lm_polygraph_asmi.analysis.stability import seed_stability
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.report import figures
from lm_polygraph_asmi.report.item import (
    Items,
    MissingItem,
    ReportItem,
    brief,
    computed,
    frame,
    leading,
    per_setting,
)
from lm_polygraph_asmi.report.items.boundary import largest_runs
from lm_polygraph_asmi.report.tables import MethodPRR, method_prrs
from lm_polygraph_asmi.results.run_groups import SEMANTIC_ENTROPY, RunGroup, Unavailable, once
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
"""The paper's 17 baselines and their families. All other methods are "other"."""
SAMPLING = {m for m, family in FAMILIES.items() if family == "samples"} | {"PTrueSampling"}
"""Baselines that depend on the sampled answers."""


def _families(groups: Sequence[RunGroup]) -> dict[str, str]:
    """Family of each method.

    First come the paper's baselines in its order, then other methods, then ASMI's by depth.
    """
    names = dict.fromkeys(method for group in groups for method in group.scores)
    asmi = {method: config.depth for group in groups for method, config in group.methods.items()}
    others = dict.fromkeys((m for m in names if m not in FAMILIES and m not in asmi), "other")
    known = {m: family for m, family in FAMILIES.items() if m in names}
    return known | others | dict.fromkeys(sorted(asmi, key=lambda m: asmi[m]), "head masks")


def benchmark(groups: Sequence[RunGroup]) -> Items:
    """Table "bench_main" of the paper with all methods and depths."""
    notes = [
        "PRR: 1 = errors rejected first, 0 = chance, negative = worse than chance. The highest "
        "PRR among baselines and the variants at the operating depth is bold if the paired 95 % "
        "interval (over clusters) of its difference from the next highest excludes 0, and italic "
        "otherwise. Compare only within a column. Ties: mean over all orders, while "
        "LM-Polygraph's own PRR takes them in file order.",
        f"Figure: 95 % intervals over clusters ({PRR_RESAMPLES:,} resamples), uncorrected.",
    ]
    return [
        ReportItem(
            "benchmark",
            "PRR of every method",
            groups,
            _by_method(groups, _marked),
            _forest(groups, _intervals, "PRR"),
            notes,
        )
    ]


def minus_msp(groups: Sequence[RunGroup]) -> Items:
    """Every method compared with MSP, the cheapest one."""
    title = "PRR minus that of MSP"
    groups = [group for group in groups if MSP in group.scores and len(group.scores.columns) > 1]
    if not groups:
        return [MissingItem(title, f"no run has {MSP} and another method")]
    table = _by_method(groups, _minus_msp)
    return [
        ReportItem(
            "minus_msp",
            title,
            groups,
            table[table["method"] != MSP].reset_index(drop=True),
            _forest(groups, _minus_msp, title),
            ["Paired bootstrap of clusters; positive: better than MSP. Uncorrected."],
            signed=[group.label for group in groups],
            resamples=PRR_RESAMPLES,
        )
    ]


def _intervals(group: RunGroup) -> dict[str, Interval]:
    return {method: prr.interval for method, prr in prrs_of(group).items()}


def _minus_msp(group: RunGroup) -> dict[str, Interval]:
    return {method: prr.minus_msp for method, prr in prrs_of(group).items()}


def _forest(
    groups: Sequence[RunGroup], values: Callable[[RunGroup], Mapping[str, Interval]], label: str
) -> Callable[[], Figure]:
    """The figure with the values of every method."""
    return partial(
        figures.forest,
        {group.label: {brief(m): i for m, i in values(group).items()} for group in groups},
        f"{label}, 95 % over clusters; black: baselines, blue: ASMI",
        black=[brief(method) for group in groups for method in group.baselines],
    )


@once
def prrs_of(group: RunGroup) -> dict[str, MethodPRR]:
    """PRR of a setting's methods."""
    return method_prrs({method: group.score(method) for method in group.scores}, group.answers)


def _difference(group: RunGroup, first: str, second: str) -> Interval:
    """PRR of the first method minus that of the second, on the same resamples."""
    scores = {method: group.score(method) for method in (first, second)}
    return prr_intervals(scores, group.answers, [(first, second)])[1][first, second]


def _by_method(
    groups: Sequence[RunGroup], values: Callable[[RunGroup], Mapping[str, Any]]
) -> pd.DataFrame:
    """A table with a row per method and a column per setting."""
    families = _families(groups)
    table = pd.DataFrame({"method": list(families), "family": list(families.values())})
    for group in groups:
        table[group.label] = table["method"].map(values(group)).astype(object)
    return table


def _marked(group: RunGroup) -> dict[str, Any]:
    """PRR of a setting's methods. The highest is marked."""
    by_method: dict[str, Any] = {method: prr.prr for method, prr in prrs_of(group).items()}
    best = _ranked(group, [*group.baselines, *group.variants.values()])[:2]
    if len(best) == 2:
        by_method[best[0]] = leading(by_method[best[0]], _difference(group, *best))
    return by_method


def _ranked(group: RunGroup, methods: Iterable[str]) -> list[str]:
    """Methods with a defined PRR, the highest first."""
    prr = {method: prrs_of(group)[method].prr.value for method in methods}
    return sorted((m for m in prr if not np.isnan(prr[m])), key=lambda m: -prr[m])


@per_setting(
    "datasets",
    "Datasets",
    "Prompt and answer tokens: medians. Tokens of all, right and wrong answers: means. Empty: "
    "share of answers without a letter or digit. Right: share with a quality of at least 0.5.",
)
def datasets(group: RunGroup) -> dict[str, Any]:
    """Table "datasets" of the paper."""
    prompts, empty = group.saved("asmi_prompt_length"), says_nothing(group.saved("greedy_texts"))
    answers = group.saved("greedy_tokens") or group.saved("asmi_tokens") or []
    lengths = np.array([float(len(tokens)) for tokens in answers])  # the closing token counts

    def mean(chosen: np.ndarray) -> float | None:
        return float(lengths[chosen].mean()) if answers and chosen.any() else None

    return {
        "setting": group.label,
        "n": len(group),
        "clusters": len(set(group.clusters)),
        "prompt tokens": float(np.median(prompts)) if prompts else None,
        "answer tokens": float(np.median(lengths)) if answers else None,
        "tokens an answer": mean(np.ones(len(group), dtype=bool)),
        "tokens of right": mean(~group.wrong),
        "tokens of wrong": mean(group.wrong),
        "empty": None if empty is None else float(empty.mean()),
        f"mean {group.metric}": float(group.quality.mean()),
        "right": float(1 - group.wrong.mean()),
        "answers expected from": {True: "context", False: "memory", None: None}[group.grounded],
    }


COMPARED = ("top Δ SemEnt", "top Δ best baseline", "Sem-ASMI Δ SemEnt", "Sem-ASMI Δ MSP")
"""Columns of the head-to-head table. Each is a first method minus a second."""


def compared_on(group: RunGroup) -> dict[str, tuple[str, str]]:
    """The report's comparisons on a setting: name -> (first method, second method)."""
    top, *_ = [*_ranked(group, group.variants.values()), None]
    best, *_ = [*_ranked(group, group.baselines), None]
    semantic = group.variants.get("Sem-ASMI")
    pairs = {
        "top Δ SemEnt": (top, SEMANTIC_ENTROPY),
        "top Δ best baseline": (top, best),
        "Sem-ASMI Δ SemEnt": (semantic, SEMANTIC_ENTROPY),
        "Sem-ASMI Δ MSP": (semantic, MSP),
    }
    return {
        name: (first, second)
        for name, (first, second) in pairs.items()
        if first is not None and second is not None and {first, second} <= set(group.scores)
    }


@per_setting(
    "head_to_head",
    "Head-to-head: paired differences of PRR",
    "Top: the ASMI variant with the highest PRR on a setting's answers. SemEnt: semantic "
    "entropy, which needs an NLI model. Paired bootstrap of clusters; positive: ASMI is higher. "
    "Intervals are uncorrected. The best baseline of the run and the top variant are chosen on "
    "the same answers, which the intervals do not take into account.",
    figure=partial(
        figures.by_setting,
        columns=dict(zip(COMPARED, COMPARED, strict=True)),
        label="ΔPRR, 95 % over clusters",
    ),
    digits=3,
    signed=COMPARED,
    resamples=PRR_RESAMPLES,
)
def head_to_head(group: RunGroup) -> dict[str, Any]:
    """Table "h2h" of the paper: paired differences."""
    pairs, prrs = compared_on(group), prrs_of(group)
    if "top Δ best baseline" not in pairs:
        raise Unavailable("no variant and baseline with a defined PRR")
    top, best = pairs["top Δ best baseline"]
    return {
        "setting": group.label,
        "top variant": f"{top} ({prrs[top].interval.value:.3f})",
        "best baseline": f"{best} ({prrs[best].interval.value:.3f})",
        **{name: _difference(group, *pairs[name]) if name in pairs else None for name in COMPARED},
    }


SWEPT = ("Adapt-ASMI", "Sem-ASMI")  # variants whose depth is chosen


class VariantSweep(NamedTuple):
    """The methods of a variant at the depths that all settings have, by setting."""

    symbol: str
    depths: list[float]
    methods: dict[RunGroup, list[str]]


def _sweeps(groups: Sequence[RunGroup]) -> Iterator[VariantSweep]:
    """Variants with at least two depths in common."""
    for symbol in SWEPT:
        swept = {c: known for c in groups if len(known := _by_depth(c, symbol)) > 1}
        common = sorted(set.intersection(*(set(m) for m in swept.values()))) if swept else []
        if len(common) > 1:
            methods = {c: [m[depth] for depth in common] for c, m in swept.items()}
            yield VariantSweep(symbol, common, methods)


def _depth_rows(sweep: VariantSweep) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One row per depth, and the curves of the figure."""
    scores = {c: np.array([c.score(m) for m in names]) for c, names in sweep.methods.items()}
    selection = depth_selection([Sweep(scores[c], c.answers) for c in scores])
    if np.ptp(selection.aggregate) == 0:
        raise Unavailable("PRR is the same at all depths")
    drawn = {c: _drawn_at_depths(c, *names) for c, names in sweep.methods.items()}
    # In each resample, the mean over settings where PRR is defined: (B, D).
    mean = np.nanmean([prr for prr in drawn.values() if np.isfinite(prr).any()], axis=0)
    interval = partial(percentile_interval, clusters=min(c.answers.n_clusters for c in scores))
    first, second = np.argsort(-selection.aggregate, kind="stable")[:2]
    lead = interval(
        selection.aggregate[first] - selection.aggregate[second], mean[:, first] - mean[:, second]
    )
    band = np.array([interval(0.0, column)[1:] for column in mean.T]).T
    by_setting = {c.label: prr for c, prr in zip(scores, selection.groups, strict=True)}
    curves = sweep.depths, by_setting, selection.aggregate, band
    rows: list[dict[str, Any]] = [
        {
            "variant": sweep.symbol,
            "depth": f"{depth:.0%}",
            "aggregate PRR": float(aggregate),
            "selected on halves": float(selected),
            "mean regret": None,
            "no regret": None,
        }
        for depth, aggregate, selected in zip(
            sweep.depths, selection.aggregate, selection.selected, strict=True
        )
    ]
    chosen = rows[selection.chosen]
    chosen["aggregate PRR"] = leading(chosen["aggregate PRR"], lead)
    chosen |= {"mean regret": selection.mean_regret, "no regret": selection.no_regret}
    return rows, {sweep.symbol: curves}


def depths(groups: Sequence[RunGroup]) -> Items:
    """Appendix "Full Benchmark and Depth Sweep": the best depth, and whether halves agree on it."""
    swept = (c for c in groups if any(len(_by_depth(c, symbol)) > 1 for symbol in SWEPT))
    largest = largest_runs([group for group in swept if group.answers.n_clusters > 1])
    doubled = [group.label for group in groups if largest.get(group, group) is not group]
    left_out = [f"Left out, since a larger run has some of their questions: {'; '.join(doubled)}."]
    groups = [group for group in groups if largest.get(group) is group]
    notes = [
        "Aggregate: mean over settings. The highest is bold if the paired 95 % interval (over "
        "clusters) of its difference from the next highest excludes 0, and italic otherwise. "
        "Selected on halves: share of 1,000 random splits of the clusters in which a depth is "
        "best on the first half. Regret: PRR that this choice loses on the second half (no "
        "regret: share of splits that lose nothing). Regret describes the whole procedure, and "
        "is shown in the row of the chosen depth.",
        "Figure: pointwise 95 % bands of the mean over clusters (2,000 resamples).",
        *left_out * bool(doubled),
    ]
    return frame(
        "depth_selection",
        "Depth selection",
        computed(_sweeps(groups), _depth_rows, lambda sweep: sweep.symbol),
        notes,
        figures.depths,
        digits=3,
        groups=groups,
        otherwise="no setting of several clusters was scored at two or more depths, or settings "
        "were scored at different ones (see asmi_depth_sweep)",
    )


@once
def _drawn_at_depths(group: RunGroup, *methods: str) -> np.ndarray:
    """(B, D) PRR at every depth. Settings with the same questions share the resamples."""
    return prr_draws([group.score(m) for m in methods], group.answers, RESAMPLES)


def _by_depth(group: RunGroup, symbol: str) -> dict[float, str]:
    """depth -> method, for methods that differ from the operating variant only in depth."""
    operating = group.methods.get(group.variants.get(symbol, ""))
    return {
        config.depth: method
        for method, config in group.methods.items()
        if operating and config.same_but(operating, "depth")
    }


@per_setting(
    "stability",
    "Seed stability: the same answers with other masks and samples",
    "PRR over seeds on the same answers. Rank ρ: mean Spearman correlation of pairs of seeds. "
    "With few seeds, the standard deviation is imprecise.",
    digits=3,
    otherwise="no answers were scored twice with other masks or samples (see asmi_stability)",
)
def stability(group: RunGroup) -> list[dict[str, Any]]:
    """Table "stability" of the paper: the same answers with other seeds of masks and samples."""
    columns = "mean PRR", "sd", "lowest", "highest", "rank ρ"
    return [
        {"setting": group.label, "method": method, "seeds": len(drawn)}
        | dict(zip(columns, seed_stability(drawn, group.quality), strict=True))
        for method, drawn in other_seeds(group).items()
    ]


def other_seeds(group: RunGroup) -> dict[str, np.ndarray]:
    """Method without its seed -> (R, n) scores, one row per seed of masks and samples."""
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
                    continue  # it has another number of samples
                drawn.setdefault(name, {}).setdefault(seed, scores)
    return {n: np.array([*by_seed.values()]) for n, by_seed in drawn.items() if len(by_seed) > 1}
