"""Simulate risk guarantees on populations whose true risk is known: some minutes on two cores.

    python scripts/simulate_guarantee.py docs/concepts/guarantee-simulations.csv

500 sets of labelled answers a case. A cell: % of the sets whose threshold violates the guarantee
[95 % Wilson interval] / % of later answers accepted, mean. Ways:

- named, unlabelled: the package, one signal named beforehand; thresholds from the labelled scores,
  or from 2000 unlabelled ones. best: the best of six signals. learned: a learned score.
- MAPIE: its BinaryClassificationController's formula: exact binomial tests of 20 coverages, Holm.
  Bonferroni: the same tests. SGR: Geifman and El-Yaniv (2017). All take answers as independent.
"""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import pandas as pd
from scipy.special import bdtr
from scipy.stats import norm

from lm_polygraph_asmi.analysis import Labelled, wilson_interval
from lm_polygraph_asmi.decisions.fit import best_signal
from lm_polygraph_asmi.decisions.learned import LearnedThreshold, learned_threshold
from lm_polygraph_asmi.decisions.risk_control import CHOICE_SHARE, risk_threshold

SETS, UNLABELLED, COVERAGES = 500, 2000, np.linspace(0.05, 1, 20)
WAYS = ("named", "unlabelled", "best", "learned", "MAPIE", "SGR", "Bonferroni")
AUROCS = (0.76, 0.72, 0.68, 0.64, 0.6, 0.56)
Drawn = tuple[np.ndarray, np.ndarray]
"""Signals (answers, signals), the named one first, and errors (answers,)."""
Change = Callable[[np.ndarray], np.ndarray]
Outcome = tuple[bool, float]
"""Whether the guarantee is violated, and the share of later answers that is accepted."""


def logistic(
    rng: np.random.Generator, clusters: int, size: int, strength: float, base: float
) -> Drawn:
    """Errors that depend on the score and on their cluster."""
    score = rng.normal(size=(clusters, size))
    chance = 1 / (1 + np.exp(-(base + strength * score + rng.normal(size=(clusters, 1)))))
    return score.reshape(-1, 1), (rng.random(score.shape) < chance).ravel()


def normal(
    rng: np.random.Generator, clusters: int, size: int, change: Change = lambda score: score
) -> Drawn:
    """30 % errors, in clusters of several all in one half; signals that correlate by .5."""
    drawn = rng.random((clusters, size))
    wrong = (drawn < (0.3 if size == 1 else 0.6 * rng.integers(0, 2, (clusters, 1)))).ravel()
    shared = rng.normal(size=(len(wrong), 1)) + rng.normal(size=(len(wrong), len(AUROCS)))
    return change(shared / 2**0.5 + np.outer(wrong, 2**0.5 * norm.ppf(AUROCS))), wrong


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
OTHERS = product([name for name in POPULATIONS if name not in ("steep", "flat", "learnable")], N)
CASES = [
    *(Case(name, *shape, *guarantee) for name, guarantee, shape in LOGISTIC),
    *(Case(name, n, 1, 0.2, 0.95) for name, n in OTHERS),
    *(Case("normal", n // 5, 5, 0.2, 0.95) for n in N),
    *(Case("learnable", n, 1, 0.25, 0.9) for n in (200, 500)),
]


@cache
def truth(population: str) -> tuple[np.ndarray, np.ndarray]:
    """(signals, draws) scores in order and the risk up to each, from very many answers."""
    score, wrong = POPULATIONS[population](np.random.default_rng(99), 400_000, 1)
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
    low, high, steps = 0, len(n), int(np.ceil(np.log2(len(n))))
    for _ in range(steps):
        middle = (low + high + 1) // 2
        low, high = (middle, high) if exact[middle - 1] <= level / steps else (low, middle - 1)
    return {
        "MAPIE": int(ranks[order][holm].max(initial=0)),
        "SGR": low,
        "Bonferroni": int(ranks[tested <= level / len(ranks)].max(initial=0)),
    }


def one_set(case: Case, seed: int) -> dict[str, Outcome]:
    """Way -> outcome on one set of labelled answers."""
    draw, rng = POPULATIONS[case.population], np.random.default_rng([seed, case.clusters])
    score, wrong = draw(rng, case.clusters, case.size)
    others = draw(rng, UNLABELLED, 1)[0][:, 0]
    keys = np.repeat(np.arange(case.clusters), case.size).astype(str).tolist()
    answers = Labelled(wrong, keys, resamples=20, seed=seed)

    def found(signal: int, share: float = 0.0, unlabelled: np.ndarray | None = None) -> Outcome:
        column = score[:, signal]
        rule = risk_threshold(column, wrong, keys, *case[3:], seed, share, unlabelled)
        return outcome(case, rule.threshold, signal)

    results = {"named": found(0), "unlabelled": found(0, unlabelled=others)}
    if case.population == "normal":
        best = int(best_signal({str(i): column for i, column in enumerate(score.T)}, answers))
        results["best"] = found(best, CHOICE_SHARE)
    if case.population == "learnable":
        rule = learned_threshold(features(score), {"msp": score[:, 0]}, answers, *case[3:])
        results["learned"] = learned_outcome(case, rule)
    order = np.argsort(score[:, 0], kind="stable")
    for way, accepted in baselines(case, score[order, 0], wrong[order]).items():
        results[way] = outcome(case, score[order[accepted - 1], 0] if accepted else None)
    return results


def line(case: Case, sets: int = SETS) -> dict[str, Any]:
    """One line of the table."""
    results = pd.DataFrame([one_set(case, seed) for seed in range(sets)])
    cells = {"population": case.population, "clusters x answers": f"{case.clusters} x {case.size}"}
    cells |= {"sets": f"{sets}", "wrong, %": f"{100 * truth(case.population)[1][0, -1]:.0f}"}
    cells |= {"risk, %": f"{100 * case.risk:g}", "allowed, %": f"{100 * (1 - case.confidence):g}"}
    for way in results:
        violated, accepted = np.sum(results[way].tolist(), axis=0)
        share, low, high = (100 * value for value in wilson_interval(int(violated), sets))
        cells[way] = f"{share:.1f} [{low:.1f}, {high:.1f}] / {100 * accepted / sets:.1f}"
    return cells


@click.command(help=__doc__)
@click.argument("table", type=click.Path(dir_okay=False, path_type=Path))
def main(table: Path) -> None:
    with ProcessPoolExecutor(2) as pool:
        lines = pd.DataFrame(pool.map(line, CASES))
    lines.reindex(columns=[*lines.columns[:6], *WAYS]).fillna("-").to_csv(table, index=False)


if __name__ == "__main__":
    main()
