"""The measured counterpart of every kind of number that the paper publishes.

Each function takes a number of the paper and the settings to look in, the best first, all of the
paper's protocol if there are such. It returns the value, with a 95 % interval over clusters where
there is one, or raises `Unavailable` if the runs lack it or have other settings of ASMI.
"""

from collections.abc import Callable, Sequence

import numpy as np
from scipy.stats import pearsonr

from lm_polygraph_asmi.analysis import comparison, selective
from lm_polygraph_asmi.analysis.clusters import Interval, cluster_interval
from lm_polygraph_asmi.analysis.cost import method_seconds, phase_seconds
from lm_polygraph_asmi.analysis.coverage import TOP_K
from lm_polygraph_asmi.analysis.depth import DepthSelection, Sweep, depth_selection
from lm_polygraph_asmi.analysis.distinct import AGGREGATIONS, DistinctSignal, distinct_signal
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.stability import rank_correlation, seed_stability
from lm_polygraph_asmi.report.items.benchmark import intervals_of, other_seeds
from lm_polygraph_asmi.report.items.boundary import (
    coverages,
    differences_of_k,
    gap_to_msp,
    pairs_of_k,
    shared_rows,
    twins,
)
from lm_polygraph_asmi.report.items.mechanism import WARM_UP
from lm_polygraph_asmi.results.manifest import seconds_by_phase
from lm_polygraph_asmi.results.paper import (
    BENCHMARKS,
    MODELS,
    Published,
    Setting,
    paper_method,
    paper_setting,
)
from lm_polygraph_asmi.results.run_groups import (
    RunGroup,
    Unavailable,
    of_config,
    once,
)
from lm_polygraph_asmi.results.runs import MSP, SYMBOLS

Value = Interval | float
Measure = Callable[[Published, Sequence[RunGroup]], Value]
OPERATING, LARGER_K = 0.6, 256
SIXTEEN = len(MODELS) * (len(BENCHMARKS) - 1)


def alike(number: Published, groups: Sequence[RunGroup]) -> list[RunGroup]:
    """The settings of the number's model and data, where it names them."""
    printed = number.model, number.dataset
    return [
        group for group in groups
        if all(not name or name == other
               for name, other in zip(printed, paper_setting(group), strict=True))
    ]  # fmt: skip


def _mean(values: np.ndarray, answers: Labelled) -> Interval:
    return cluster_interval(lambda rows: float(values[rows].mean()), answers)


@once
def operating(group: RunGroup) -> RunGroup:
    """The setting with the paper's variants at 60 % as its operating variants."""
    for symbol in ("Sem-ASMI", "ASMI", "Adapt-ASMI"):
        method = paper_method(group, symbol, OPERATING)
        if method is not None:
            known = method in group.variants.values()
            return group if known else of_config(group, group.methods[method])
    raise Unavailable("no score of ASMI at a depth of 60 %")


def _signal(group: RunGroup) -> tuple[RunGroup, np.ndarray, np.ndarray, np.ndarray]:
    """The operating setting, u_sem, MSP and H."""
    group = operating(group)
    group.need_errors()
    u_sem, msp, entropy = group.need("u_sem", "msp", "entropy")
    return group, u_sem, msp, entropy


@once
def datasets(group: RunGroup, number: Published) -> Value:
    quantity, answers = number.quantity, group.answers
    if quantity == "clusters":
        return float(answers.n_clusters)
    if quantity == "mean quality":
        return _mean(group.quality, answers)
    if quantity == "median tokens of the prompt":
        saved = group.saved("asmi_prompt_length")
        if not saved:
            raise Unavailable("asmi_prompt_length not saved")
        prompts = np.array(saved, dtype=float)
        return cluster_interval(lambda rows: float(np.median(prompts[rows])), answers)
    if quantity == "AUROC":
        (msp,) = group.need("msp")
        return comparison.auroc_interval(msp, answers)
    if quantity == "empty answers":
        (empty,) = group.need("empty")
        return _mean(100.0 * empty, answers)
    (lengths,) = group.need("lengths")
    if quantity.startswith("median"):
        return cluster_interval(lambda rows: float(np.median(lengths[rows])), answers)
    chosen = np.ones(len(lengths), dtype=bool)
    if "of wrong" in quantity or "of right" in quantity:
        group.need_errors()
        chosen = group.wrong if "of wrong" in quantity else ~group.wrong
    return _mean(lengths[chosen], answers.take(chosen))


def method_of(number: Published, group: RunGroup) -> str:
    """Name of the number's method in a setting.

    Raises:
        Unavailable: it was not run, or with other settings.
    """
    if number.method in SYMBOLS:
        method = paper_method(group, number.method, number.depth or OPERATING)
    else:
        method = number.method if number.method in group.baselines else None
    if method is None:
        depth = f" at {number.depth:.0%}" if number.depth else ""
        raise Unavailable(f"{number.method}{depth} was not run")
    return method


@once
def benchmark(group: RunGroup, number: Published) -> Interval:
    return intervals_of(group)[0][method_of(number, group)]


@once
def head_to_head(group: RunGroup, number: Published) -> Interval:
    if " − " not in number.method:
        return benchmark(group, number)
    first, second = number.method.split(" − ")
    method = paper_method(group, first, OPERATING)
    if method is None:
        raise Unavailable(f"{first} at 60% was not run")
    if second not in group.baselines:
        raise Unavailable(f"{second} was not run")
    scores = {name: group.score(name) for name in (method, second)}
    return comparison.prr_intervals(scores, group.answers, [(method, second)])[1][method, second]


@once
def _distinct(group: RunGroup, symbol: str, aggregation: str, entropies: bool) -> DistinctSignal:
    """The paper's test on a setting; over MSP and H, or over both entropies inside MI."""
    group, u_sem, msp, entropy = _signal(group)
    values = u_sem
    if symbol == "ASMI":
        (values,) = group.need("mi")
    if aggregation:
        (tokens,) = group.need("u_tokens")
        values = np.array([AGGREGATIONS[aggregation](answer) for answer in tokens])
    if entropies:
        msp, entropy = group.need("entropy_of_mean", "mean_entropy")
    controls = np.column_stack([msp, entropy])
    return distinct_signal(values, controls, group.answers)


def distinct(number: Published, groups: Sequence[RunGroup]) -> Value:
    if number.quantity.startswith("correlation"):
        return stability(number, groups)
    kind, _, rest = number.quantity.partition(", ")
    aggregation = rest if rest in AGGREGATIONS else ""
    tested = _distinct(groups[0], number.method, aggregation, "entropies" in kind)
    return tested.residual_auroc if kind.startswith("residual") else tested.incremental_auroc


def ensemble_mean(number: Published, groups: Sequence[RunGroup]) -> Value:
    if number.quantity.startswith("Spearman"):
        by_dataset: dict[str, float] = {}
        for group in alike(number, groups):
            average, entropy = operating(group).need("entropy_of_mean", "entropy")
            by_dataset.setdefault(paper_setting(group).dataset, rank_correlation(average, entropy))
        three = [by_dataset[name] for name in ("BabiQA", "CoQA", "TriviaQA") if name in by_dataset]
        if len(three) < 3:
            raise Unavailable("needs BabiQA, CoQA and TriviaQA")
        return min(three) if "lowest" in number.quantity else max(three)
    return _above_mean(groups[0])


@once
def _above_mean(group: RunGroup) -> Interval:
    """PRR of u_sem minus that of the ensemble mean's entropy."""
    group, u_sem, _, _ = _signal(group)
    (average,) = group.need("entropy_of_mean")
    scores, pair = {"u_sem": u_sem, "mean": average}, ("u_sem", "mean")
    return comparison.prr_intervals(scores, group.answers, [pair])[1][pair]


@once
def matched_flags(group: RunGroup, _: Published) -> float:
    group, u_sem, _msp, entropy = _signal(group)
    flagged = int(group.wrong.sum())
    return comparison.mcnemar(u_sem, entropy, group.wrong, flagged).p_value


@once
def confident_fragile(group: RunGroup, number: Published) -> Interval:
    group, u_sem, msp, _ = _signal(group)
    if number.quantity == "gap of error rates":
        return selective.confident_but_fragile(msp, u_sem, group.answers).gap
    if number.quantity.endswith("tokens"):
        (tokens,) = group.need("u_tokens")
        return selective.token_null(msp, tokens, group.answers).gap
    fragile = number.quantity.endswith("fragile")

    def rate(rows: np.ndarray) -> float:
        confident = msp[rows] <= np.median(msp[rows])
        chosen = confident & ((u_sem[rows] > np.median(u_sem[rows])) == fragile)
        return 100 * float(group.wrong[rows][chosen].mean()) if chosen.any() else float("nan")

    return cluster_interval(rate, group.answers)


@once
def payoff(group: RunGroup, number: Published) -> Interval:
    group, u_sem, msp, entropy = _signal(group)
    by, abstain = {
        "confident error": (msp, 0.0), "filter by u_sem": (u_sem, 0.5),
        "filter by entropy": (entropy, 0.5),
    }[number.quantity]  # fmt: skip
    wrong = group.wrong
    return cluster_interval(
        lambda rows: selective.filter_error(msp[rows], by[rows], wrong[rows], abstain),
        group.answers,
    )


@once
def aurc(group: RunGroup, number: Published) -> Interval:
    group, u_sem, msp, entropy = _signal(group)
    score = {MSP: msp, "MeanTokenEntropy": entropy}.get(number.method, u_sem)
    wrong = group.wrong
    return cluster_interval(lambda rows: selective.aurc(score[rows], wrong[rows]), group.answers)


def boundary(number: Published, groups: Sequence[RunGroup]) -> Value:
    if number.quantity == "mean quality":
        return datasets(groups[0], number)
    for pair in twins(groups):
        for group in pair:
            if paper_setting(group) != (number.model, number.dataset):
                continue
            rows, clusters = shared_rows(*pair)[pair.index(group)][1:]
            return gap_to_msp(operating(group), rows, clusters)[-1]
    raise Unavailable("no run on the same questions with and without passage")


def larger_k(number: Published, groups: Sequence[RunGroup]) -> Interval:
    if number.quantity.startswith("mean coverage"):
        return _coverage(groups[0], "all tokens", LARGER_K)
    first, _, second = number.method.partition(" − ")
    for pair in pairs_of_k(groups, first):
        _, small_k, small, small_method, large_k, large, large_method = pair
        if (small_k, large_k) != (64, LARGER_K):
            continue
        if paper_method(small, first, OPERATING) != small_method:
            continue
        if paper_method(large, first, OPERATING, LARGER_K) != large_method:
            continue
        if paired := differences_of_k(pair)[-1]:
            if second:
                small.need("msp")
            return paired["large", "msp" if second else "small"]
    raise Unavailable("no answers were scored with K = 64 and K = 256")


def _coverage(group: RunGroup, band: str, top_k: int) -> Interval:
    bands, ends = coverages(operating(group))
    low, high = ends[band][:, TOP_K.index(top_k)]
    return Interval(float(bands.loc[band, top_k]), float(low), float(high))


@once
def top_k_coverage(group: RunGroup, number: Published) -> Interval:
    return _coverage(group, "high (top decile)", int(number.quantity.rpartition(" = ")[2]))


@once
def error_separation(group: RunGroup, number: Published) -> Interval:
    if number.quantity == "AUROC":
        score = group.score(method_of(number, group))
        return comparison.auroc_interval(score, group.answers)
    group = operating(group)
    (tokens,) = group.need("mi_tokens")
    chosen = np.ones(len(group), dtype=bool)
    if "answers" in number.quantity:
        group.need_errors()
        chosen = group.wrong if "wrong" in number.quantity else ~group.wrong
    answers = [tokens[i] for i in np.flatnonzero(chosen)]
    statistic = np.median if number.quantity.startswith("median") else np.mean
    return cluster_interval(
        lambda rows: float(statistic(np.concatenate([answers[i] for i in rows]))),
        group.answers.take(chosen),
    )


@once
def mechanism(group: RunGroup, _: Published) -> float:
    mi, agreement = operating(group).need("mi_tokens", "agreement_tokens")
    return float(pearsonr(np.concatenate(mi), np.concatenate(agreement)).statistic)


@once
def _selection(first: RunGroup, symbol: str, *others: RunGroup) -> DepthSelection:
    """Depth selection over the sixteen settings, with depths 60, 70, 80 and 90 %."""
    sweeps: dict[Setting, Sweep] = {}
    for group in (first, *others):
        depths = (0.6, 0.7, 0.8, 0.9)
        methods = [paper_method(group, symbol, depth) for depth in depths]
        setting = paper_setting(group)
        if None not in methods and setting.dataset != "SQuAD without passage":
            scores = np.array([group.score(str(method)) for method in methods])
            sweeps.setdefault(setting, Sweep(scores, group.answers))
    if len(sweeps) < SIXTEEN:
        raise Unavailable(f"needs all {SIXTEEN} settings at four depths, got {len(sweeps)}")
    return depth_selection([*sweeps.values()])


def depths(number: Published, groups: Sequence[RunGroup]) -> float:
    selection = _selection(groups[0], number.method, *groups[1:])
    at = round(10 * (number.depth or OPERATING)) - 6
    return {
        "mean PRR of sixteen settings": float(selection.aggregate[at]),
        "selected on halves": 100 * float(selection.selected[at]),
        "no regret": 100 * selection.no_regret,
        "mean regret": selection.mean_regret,
    }[number.quantity]


def stability(number: Published, groups: Sequence[RunGroup]) -> float:
    for group in alike(number, groups):
        for method, drawn in other_seeds(group).items():
            if method == number.method or method.startswith(f"{number.method} (60%, K=64"):
                over = seed_stability(drawn, group.quality)
                return {
                    "mean PRR": over.mean, "sd of PRR": over.sd, "lowest PRR": over.low,
                    "highest PRR": over.high, "rank ρ": over.rank_correlation,
                    "correlation of two draws": over.rank_correlation,
                }[number.quantity]  # fmt: skip
    raise Unavailable("no answers were scored twice with other masks or samples")


PHASES = {
    "greedy answer": "greedy", "ten samples": "samples", "NLI": "nli",
    "masked passes, batched": "asmi", "masked passes, one at a time": "asmi",
}  # fmt: skip


def cost(number: Published, groups: Sequence[RunGroup]) -> float:
    for run in (run for group in alike(number, groups) for run in group.runs):
        if number.unit == "GB":
            sizes = run.recorded("peak_memory_bytes").items()
            on_gpu = [size for name, size in sizes if name.startswith("cuda")]
            if on_gpu:
                return max(on_gpu) / 1e9
            continue
        single = run.recorded("config").get("asmi", {}).get("memory_budget") == 1
        masked = "ASMI" in number.quantity or "masked" in number.quantity
        several_depths = masked and len(run.settings()) != 1
        if several_depths or single != number.quantity.endswith("one at a time"):
            continue
        seconds = seconds_by_phase(run.stats)
        timings = method_seconds(seconds, WARM_UP) | phase_seconds(seconds, WARM_UP)
        name = "ASMI alone, marginal" if "marginal" in number.quantity else number.quantity
        timing = timings.get(PHASES.get(name, name))
        if timing:
            return timing.median
    raise Unavailable("not measured in a run of one depth")


def _of_one(measure: Callable[[RunGroup, Published], Value]) -> Measure:
    """A measure of the best setting alone."""
    return lambda number, groups: measure(groups[0], number)


MEASURES: dict[str, Measure] = {
    "datasets": _of_one(datasets), "benchmark": _of_one(benchmark),
    "head_to_head": _of_one(head_to_head), "depth_selection": depths,
    "error_separation": _of_one(error_separation), "distinct_signal": distinct,
    "ensemble_mean": ensemble_mean, "matched_flags": _of_one(matched_flags),
    "confident_fragile": _of_one(confident_fragile), "payoff": _of_one(payoff),
    "aurc": _of_one(aurc), "boundary": boundary, "larger_k": larger_k,
    "top_k_coverage": _of_one(top_k_coverage), "stability": stability,
    "mechanism": _of_one(mechanism), "cost": cost,
}  # fmt: skip
"""By item of the report; those of heads are in `experiments.items.measured`."""
