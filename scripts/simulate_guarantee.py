"""Simulate risk guarantees on populations whose true risk is known: half an hour on one core.

    python scripts/simulate_guarantee.py docs/concepts

500 sets of labelled answers a case. A cell: % of the sets whose threshold violates the guarantee
[95 % Wilson interval] / % of later answers accepted, mean. Ways:

- named: the package, one signal named beforehand, thresholds from the labelled scores; unlabelled:
  from 2000 scores without labels. ordered: labels from the surest answer on, of as many answers;
  its third number is the mean of the labels used.
- thinned, bets: with clusters, the two tests of which `named` takes one. one each: the advice of
  version 0.3, one random answer of every cluster.
- best: of three signals, each at a third of the level. chosen: a fifth of the labels chooses one.
- learned: a learned score.
- MAPIE: its BinaryClassificationController's formula: exact binomial tests of 20 coverages, Holm;
  multi-start: its fixed sequence with 6 starts, of 2 to 20 the number that accepts
  most of 200 labels. Bonferroni: the same tests. SGR: Geifman and
  El-Yaniv (2017). All take answers as independent.

guarantee-ordered.csv has how many labels in order are used of N answers; guarantee-monitor.csv the
labels at which `monitor` has 80 % power; guarantee-search.csv the worst of many random populations
whose risk passes the bound again and again, or whose scores have ties.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import click
import numpy as np
import pandas as pd
from scipy.special import bdtr
from scipy.stats import binom, norm

from lm_polygraph_asmi.analysis import Labelled, clusters, risk_control, wilson_interval
from lm_polygraph_asmi.analysis.comparison import auroc
from lm_polygraph_asmi.analysis.risk_control import (
    choosing_rows,
    ordered_threshold,
    seed_of,
    thinned_rows,
)
from lm_polygraph_asmi.decisions import RiskThreshold, risk_monitor, risk_threshold
from lm_polygraph_asmi.decisions.learned import LearnedThreshold, learned_threshold

SETS, UNLABELLED, COVERAGES, STARTS = 500, 2000, np.linspace(0.05, 1, 20), 6
WAYS = (
    "named", "ordered", "unlabelled", "thinned", "bets", "one each", "best", "chosen", "learned",
    "MAPIE", "multi-start", "SGR", "Bonferroni",
)  # fmt: skip
AUROCS, ALIKE, DOMINATED = (0.76, 0.72, 0.68), (0.76, 0.76, 0.76), (0.76, 0.6, 0.56)
Drawn = tuple[np.ndarray, ...]
"""Signals (answers, signals), the named one first, errors (answers,), and cluster numbers unless
each cluster has as many answers."""
Change = Callable[[np.ndarray], np.ndarray]
Outcome = tuple[float, ...]
"""Whether the guarantee is violated, the share of later answers that is accepted, labels used."""


def logistic(
    rng: np.random.Generator, clusters: int, size: int, strength: float, base: float
) -> Drawn:
    """Errors that depend on the score and on their cluster."""
    score = rng.normal(size=(clusters, size))
    chance = 1 / (1 + np.exp(-(base + strength * score + rng.normal(size=(clusters, 1)))))
    return score.reshape(-1, 1), (rng.random(score.shape) < chance).ravel()


def normal(
    rng: np.random.Generator,
    clusters: int,
    size: int,
    change: Change = lambda score: score,
    aurocs: tuple[float, ...] = AUROCS,
) -> Drawn:
    """30 % errors, in clusters of several all in one half; signals that correlate by .5."""
    drawn = rng.random((clusters, size))
    wrong = (drawn < (0.3 if size == 1 else 0.6 * rng.integers(0, 2, (clusters, 1)))).ravel()
    shared = rng.normal(size=(len(wrong), 1)) + rng.normal(size=(len(wrong), len(aurocs)))
    return change(shared / 2**0.5 + np.outer(wrong, 2**0.5 * norm.ppf(aurocs))), wrong


def uneven(rng: np.random.Generator, clusters: int, size: int) -> Drawn:
    """20 % errors, AUROC .9, clusters of 1 to 6 `size` answers: the larger, the harder."""
    sizes = size * rng.integers(1, 7, clusters)
    codes = np.repeat(np.arange(clusters), sizes)
    wrong = (
        rng.random(len(codes)) < (0.2 * 21 / 91 * sizes * 2 * rng.integers(0, 2, clusters))[codes]
    )
    return (rng.normal(size=len(codes)) + wrong * 2**0.5 * norm.ppf(0.9))[:, None], wrong, codes


def by_rank(rng: np.random.Generator, clusters: int, size: int, chance: Change) -> Drawn:
    score = rng.random(clusters * size)
    return score[:, None], rng.random(len(score)) < chance(score)


def dip(score: np.ndarray) -> np.ndarray:
    """The most certain tenth is often wrong: the risk is above .2 up to .12, and from .8 on."""
    return np.select([score < 0.1, score < 0.6], [0.35, 0.05], 0.5)


def teeth(score: np.ndarray) -> np.ndarray:
    """The risk crosses .2 again and again: every second hundredth has no errors."""
    return np.where(score < 0.25, 0.2, 0.42 * (score % 0.02 < 0.01))


def learnable(rng: np.random.Generator, clusters: int, size: int) -> Drawn:
    """A simple signal, and twenty features of a cause that it does not show."""
    shown, cause = rng.normal(size=(2, clusters * size))
    wrong = rng.random(len(shown)) < 1 / (1 + np.exp(0.3 - 1.3 * shown - 1.5 * cause))
    states = 0.7 * np.outer(cause, np.linspace(-1, 1, 20)) + rng.normal(size=(len(shown), 20))
    return np.column_stack([shown, states]), wrong


POPULATIONS: dict[str, Callable[..., Drawn]] = {
    "steep": partial(logistic, strength=2.0, base=-0.3),
    "flat": partial(logistic, strength=1.0, base=-1.5),
    "normal": normal,
    "alike": partial(normal, aurocs=ALIKE),
    "dominated": partial(normal, aurocs=DOMINATED),
    "uneven": uneven,
    "ties of five values": partial(normal, change=lambda s: np.digitize(s, [-0.7, 0, 0.7, 1.4])),
    "reversed": partial(normal, change=np.negative),
    "useless": partial(by_rank, chance=lambda score: np.full_like(score, 0.3)),
    "not monotone": partial(by_rank, chance=dip),
    "teeth": partial(by_rank, chance=teeth),
    "learnable": learnable,
}


class Case(NamedTuple):
    population: str
    clusters: int
    size: int
    risk: float
    confidence: float


SHAPES = ((200, 1), (500, 1), (2000, 1), (125, 8), (250, 8), (400, 3), (60, 8))
N = (60, 100, 200, 500, 1000)
LOGISTIC = product(("steep", "flat"), ((0.1, 0.95), (0.2, 0.9)), SHAPES)
HARD = ("ties of five values", "reversed", "useless", "not monotone", "teeth")
ORDERED = (100, 150, 200, 300, 450, 600, 1000)
CASES = [
    *(Case(name, *shape, *guarantee) for name, guarantee, shape in LOGISTIC),
    *(Case("normal", n, 1, 0.2, 0.95) for n in sorted({*N, *ORDERED})),
    *(Case(name, n, 1, 0.2, 0.95) for name, n in product(("alike", "dominated"), (100, 200, 500))),
    *(Case(name, n, 1, 0.2, 0.95) for name, n in product(HARD, N)),
    *(Case("uneven", n, 1, risk, 0.95) for risk, n in product((0.1, 0.2), (58, 200, 600))),
    *(Case("normal", n // 5, 5, 0.2, 0.95) for n in N),
    *(Case("learnable", n, 1, 0.25, 0.9) for n in (200, 500)),
]


@cache
def truth(population: str) -> tuple[np.ndarray, np.ndarray]:
    """(signals, draws) scores in order and the risk up to each, from very many answers."""
    score, wrong, *_ = POPULATIONS[population](np.random.default_rng(99), 400_000, 1)
    order = np.argsort(score, axis=0, kind="stable")
    risks = wrong[order].cumsum(0) / np.arange(1, len(order) + 1)[:, None]
    return np.take_along_axis(score, order, 0).T, risks.T


def outcome(case: Case, threshold: float | None, signal: int = 0) -> Outcome:
    scores, risks = (of[signal] for of in truth(case.population))
    place = 0 if threshold is None else int(np.searchsorted(scores, threshold, side="right"))
    return bool(place and risks[place - 1] > case.risk), place / len(scores)


def features(signals: np.ndarray) -> dict[str, np.ndarray]:
    return {"free": signals[:, :1], "hidden": signals[:, 1:]}


def learned_outcome(case: Case, rule: LearnedThreshold) -> Outcome:
    signals, wrong = POPULATIONS[case.population](np.random.default_rng(98), 20_000, 1)
    values = signals[:, 0] if rule.score is None else rule.score(features(signals))
    kept = wrong[values <= (np.nan if rule.rule.threshold is None else rule.rule.threshold)]
    return bool(len(kept) and kept.mean() > case.risk), len(kept) / len(wrong)


def baselines(case: Case, score: np.ndarray, wrong: np.ndarray) -> dict[str, int]:
    """Way -> how many of the answers, ordered by score, it accepts."""
    n = np.searchsorted(score, score, side="right")  # equal scores are accepted together
    level, errors = 1 - case.confidence, wrong.cumsum()[n - 1]
    exact, ranks = bdtr(errors, n, case.risk), np.ceil(COVERAGES * len(n)).astype(int)
    tested, order = exact[ranks - 1], np.argsort(exact[ranks - 1], kind="stable")
    holm = np.logical_and.accumulate(tested[order] <= level / np.arange(len(ranks), 0, -1))
    passed, branch, started = tested <= level / STARTS, len(ranks) // STARTS, 0
    for start in range(0, branch * STARTS, branch):
        run = np.logical_and.accumulate(passed[start:])
        started = max(started, int(ranks[start:][run].max(initial=0)))
    low, high, steps = 0, len(n), int(np.ceil(np.log2(len(n))))
    for _ in range(steps):
        middle = (low + high + 1) // 2
        low, high = (middle, high) if exact[middle - 1] <= level / steps else (low, middle - 1)
    return {
        "MAPIE": int(ranks[order][holm].max(initial=0)),
        "multi-start": started,
        "SGR": low,
        "Bonferroni": int(ranks[tested <= level / len(ranks)].max(initial=0)),
    }


def labels_used(case: Case, score: np.ndarray, wrong: np.ndarray) -> int:
    """Labels up to the first test that fails, of both sequences."""
    used, about = 0, (score, wrong, np.arange(len(score)), case.risk, 1)
    for grid, level in risk_control._grids(score, len(score), case.risk, case.confidence):
        place = min(risk_control._passed(grid, level, *about), len(grid) - 1)
        used = max(used, int(np.sum(score <= grid[place])))
    return used


def in_clusters(
    case: Case, score: np.ndarray, wrong: np.ndarray, codes: np.ndarray
) -> dict[str, RiskThreshold]:
    """Way -> threshold, of those that are for clusters."""
    firsts = np.unique(codes, return_index=True)[1]  # rows of a cluster are in random order
    answers = Labelled(wrong, keys(codes))
    found = {"one each": risk_threshold(score[firsts], answers.take(firsts), *case[3:])}
    for way, enough in (("thinned", 10**9), ("bets", 0)):
        with patch.object(risk_control, "BETTING_FROM", (enough, enough)):
            found[way] = risk_threshold(score, answers, *case[3:])
    return found


def keys(codes: np.ndarray) -> list[str]:
    return codes.astype(str).tolist()


def several_signals(case: Case, signals: np.ndarray, wrong: np.ndarray) -> dict[str, Outcome]:
    """Way -> outcome, of those that take one of three signals."""
    codes, level = np.arange(len(wrong)), 1 - case.confidence
    rows = choosing_rows(codes, seed_of(signals))
    chosen = int(np.argmax([auroc(column[rows], wrong[rows]) for column in signals.T]))
    answers = Labelled(wrong, keys(codes))
    rules = [risk_threshold(column, answers, case.risk, 1 - level / 3) for column in signals.T]
    best = int(np.argmax([rule.coverage for rule in rules]))
    fifth = risk_threshold(signals[:, chosen], answers, *case[3:], choosing=rows)
    return {
        "best": outcome(case, rules[best].threshold, best),
        "chosen": outcome(case, fifth.threshold, chosen),
    }


def one_set(case: Case, seed: int) -> dict[str, Outcome]:
    """Way -> outcome on one set of labelled answers."""
    draw, rng = POPULATIONS[case.population], np.random.default_rng([seed, case.clusters])
    signals, wrong, *numbers = draw(rng, case.clusters, case.size)
    codes = numbers[0] if numbers else np.repeat(np.arange(case.clusters), case.size)
    others, score = draw(rng, UNLABELLED, 1)[0][:, 0], signals[:, 0]
    answers = Labelled(wrong, keys(codes), resamples=20)
    rules = {
        "named": risk_threshold(score, answers, *case[3:]),
        "unlabelled": risk_threshold(score, answers, *case[3:], unlabelled=others),
    }
    if len(codes) > case.clusters:
        rules |= in_clusters(case, score, wrong, codes)
    results: dict[str, Outcome] = {way: outcome(case, r.threshold) for way, r in rules.items()}
    rows = thinned_rows(codes, None, seed_of(score))
    ordered, *_ = ordered_threshold(score[rows], wrong[rows], *case[3:])
    used = labels_used(case, score[rows], wrong[rows])
    results["ordered"] = (*outcome(case, ordered.threshold), used)
    if case.population in ("normal", "alike", "dominated") and case.size == 1:
        results |= several_signals(case, signals, wrong)
    if case.population == "learnable":
        rule = learned_threshold(features(signals), {"msp": score}, answers, *case[3:])
        results["learned"] = learned_outcome(case, rule)
    order = np.argsort(score, kind="stable")
    for way, accepted in baselines(case, score[order], wrong[order]).items():
        results[way] = outcome(case, score[order[accepted - 1]] if accepted else None)
    return results


def line(case: Case, sets: int = SETS) -> dict[str, Any]:
    """One line of the table."""
    with patch.object(clusters, "identity", cache(clusters.identity)):  # half of the time
        results = pd.DataFrame([one_set(case, seed) for seed in range(sets)])
    cells = {
        "population": case.population,
        "clusters x answers": f"{case.clusters} x {case.size}",
        "sets": f"{sets}",
        "wrong, %": f"{100 * truth(case.population)[1][0, -1]:.0f}",
        "risk, %": f"{100 * case.risk:g}",
        "allowed, %": f"{100 * (1 - case.confidence):g}",
    }
    for way in results:
        violated, accepted, *used = np.sum(results[way].tolist(), axis=0)
        share, low, high = (100 * value for value in wilson_interval(int(violated), sets))
        cells[way] = f"{share:.1f} [{low:.1f}, {high:.1f}] / {100 * accepted / sets:.1f}"
        cells[way] += "".join(f" / {number / sets:.0f}" for number in used)
    return cells


def ordered_line(n: int) -> dict[str, Any]:
    """How many labels in order are used of n answers, and what they accept."""
    case, used, accepted = Case("normal", n, 1, 0.2, 0.95), [], []
    for seed in range(SETS):
        signals, wrong = normal(np.random.default_rng([seed, n]), n, 1)
        rule, *_ = ordered_threshold(signals[:, 0], wrong, *case[3:])
        used.append(labels_used(case, signals[:, 0], wrong))
        accepted.append(outcome(case, rule.threshold)[1])
    tenth, ninetieth = np.quantile(used, (0.1, 0.9))
    return {
        "answers scored (N)": n,
        "labels used, mean": f"{np.mean(used):.0f}",
        "of 80 % of the sets": f"{tenth:.0f} to {ninetieth:.0f}",
        "accepted, %": f"{100 * np.mean(accepted):.1f}",
    }


def monitor_line(
    rate: float, risk: float = 0.2, level: float = 0.05, streams: int = 200
) -> dict[str, Any]:
    """The least labels of accepted answers that decide in 80 % of the cases; one look each."""
    rule, above = RiskThreshold(0.0, 1.0, 0.0, risk, 1 - level, 0.0, 500, 500, 1), rate > risk

    def by_monitor(errors: int, n: int) -> bool:
        answers = Labelled(np.arange(n) < errors, range(n))
        return risk_monitor(rule, np.ones(n), answers).outcome == ("violated" if above else "holds")

    def exact(errors: int, n: int) -> bool:
        p = binom.sf(errors - 1, n, risk) if above else binom.cdf(errors, n, risk)
        return bool(p <= level)

    def labels(decides: Callable[[int, int], bool]) -> int:
        for n in range(20, 3000, 5):
            counts = range(n + 1) if above else range(n, -1, -1)  # the last ones decide
            most = bisect_left(counts, True, key=lambda errors: decides(errors, n))
            if most <= n and binom.cdf(n - most, n, 1 - rate if above else rate) >= 0.8:
                return n
        raise ValueError(f"expected at most 3000 labels for {rate}")

    title = "violated" if above else "holds"
    return {
        "true error rate, %": f"{100 * rate:g}",
        "outcome": title,
        "monitor": labels(by_monitor),
        "one exact test": labels(exact),
        "MAPIE's monitor": mapie_monitor(rate, risk, streams),
    }


def mapie_monitor(rate: float, risk: float, streams: int, longest: int = 800) -> str:
    """Labels at which MAPIE's monitor sees a harmful shift in 80 % of the streams."""
    from mapie.exchangeability_testing import RiskMonitoring

    if rate < 0.3:
        return "-"  # it has no outcome for a risk that is held, and .25 takes too long to simulate
    seen = np.zeros(longest)
    for wrong in np.random.default_rng(0).random((streams, longest)) < rate:
        watch = RiskMonitoring(risk="accuracy", threshold=risk, warn=False)
        watch.update(np.ones(longest, int), (~wrong).astype(int))
        seen += watch.online_risk_lower_bound_sequence_history > risk
    return str(1 + np.flatnonzero(seen >= 0.8 * streams)[0])


class Values(NamedTuple):
    """Answers whose scores have few values: how many are labelled, share and risk of each value."""

    answers: int
    share: np.ndarray
    wrong: np.ndarray


def few_values(rng: np.random.Generator) -> Values:
    """A random population; in a third, the risk passes the bound again and again."""
    values = int(rng.choice([3, 5, 8, 15, 40]))
    share = rng.dirichlet(np.full(values, rng.choice([0.5, 1.0, 5.0])))
    low, high = rng.uniform(0, 0.2, values), rng.uniform(0.2, 0.6, values)
    risks = (
        np.where(np.arange(values) % 2, low, high),
        np.clip(rng.normal(0.2, rng.choice([0.01, 0.05, 0.1]), values), 0, 1),
        rng.beta(1, 3, values),
    )
    return Values(int(rng.choice([40, 60, 100, 200, 400])), share, risks[rng.integers(3)])


def moved(rng: np.random.Generator, worst: Values) -> Values:
    """A population near another one."""
    share = worst.share * np.exp(rng.normal(0, 0.2, len(worst.share)))
    wrong = np.clip(worst.wrong + rng.normal(0, 0.03, len(share)), 0, 1)
    return Values(worst.answers, share / share.sum(), wrong)


def violations(rng: np.random.Generator, population: Values, sets: int) -> float:
    """Share of the sets whose threshold violates a risk of 20 % at 95 %."""
    answers, share, wrong = population
    counts = rng.multinomial(answers, share, sets)
    errors, kept = rng.binomial(counts, wrong).cumsum(1), counts.cumsum(1)
    broken, best = (share * wrong).cumsum() > 0.2 * share.cumsum(), np.full(sets, -1)
    for part, start in risk_control._sequences(answers):
        passes = bdtr(errors, np.maximum(kept, 1), 0.2) <= part * 0.05
        alive = np.ones(sets, bool)
        for rank in risk_control.ranks_to_test(answers, 0.2, part * 0.05, start):
            place = (kept < rank).sum(1)  # the value of that rank: ties are accepted together
            alive &= passes[np.arange(sets), place]
            best = np.where(alive, np.maximum(best, place), best)
    return float(np.mean((best >= 0) & broken[best]))


def search_line(
    seed: int, random: int = 60, moves: int = 60, sets: int = 2000, again: int = 50_000
) -> dict[str, Any]:
    """The worst of random populations and of those near it, drawn again in the end."""
    rng = np.random.default_rng(seed)

    found = [
        (violations(rng, population, sets), population)
        for population in (few_values(rng) for _ in range(random))
    ]
    worst, population = max(found, key=lambda pair: pair[0])
    for _ in range(moves):
        other = moved(rng, population)
        if (violated := violations(rng, other, sets)) > worst:
            worst, population = violated, other
    return {
        "populations": random + moves,
        "values of the worst": len(population.share),
        "its answers": population.answers,
        "violated, % (5 allowed)": f"{100 * violations(rng, population, again):.2f}",
    }


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, exists=True, path_type=Path))
@click.option("--workers", default=2, show_default=True)
def main(folder: Path, workers: int) -> None:
    tables: dict[str, tuple[Callable[..., dict[str, Any]], Iterable[Any]]] = {
        "ordered": (ordered_line, ORDERED),
        "monitor": (monitor_line, (0.3, 0.25, 0.1, 0.15)),
        "search": (search_line, range(6)),
        "simulations": (line, CASES),
    }
    with ProcessPoolExecutor(workers) as pool:
        for name, (line_of, cases) in tables.items():
            frame = pd.DataFrame(pool.map(line_of, cases))
            if name == "simulations":
                frame = frame.reindex(columns=[*frame.columns[:6], *WAYS]).fillna("-")
            frame.to_csv(folder / f"guarantee-{name}.csv", index=False)


if __name__ == "__main__":
    main()
