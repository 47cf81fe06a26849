"""What a learned score accepts at a guaranteed risk, against a simple signal and other ways.

python scripts/try_learned.py simulate docs/concepts/learned-simulations.csv
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import click
import numpy as np
import pandas as pd
from scipy.special import ndtr

from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.learned import (
    LEARNING_SHARE,
    Features,
    LearnedScore,
    Learner,
    fit_score,
    learned_threshold,
    out_of_fold,
)
from lm_polygraph_asmi.analysis.risk_control import (
    BETS,
    RiskThreshold,
    _gains,
    fixing_rows,
    risk_threshold,
)
from lm_polygraph_asmi.analysis.signals import best_signal

CONFIDENCE = 0.9
SIMULATED_RISK = 0.25
SIZES = ((200, 1), (500, 1), (2000, 1), (125, 4), (500, 4))
"""Clusters, and answers in each."""
COVERAGES = np.linspace(0.1, 1, 10)
FIRST, BLOCKS = 0.25, 5
Rule = Sequence[tuple[float, Callable[..., np.ndarray], float]] | None
"""Weight, score and threshold of each block; None: no threshold."""


class Folded(Labelled):
    """Answers with random folds of clusters; stratified ones would take most of the time."""

    def folds(self) -> np.ndarray:
        return np.random.default_rng(self.seed).permutation(self.n_clusters)[self.codes] % 5

    def take(self, rows: np.ndarray) -> "Folded":
        part = super().take(rows)
        return Folded(part.wrong, part.clusters, None, self.resamples, self.seed)


def prequential(table: np.ndarray, answers: Labelled, risk: float) -> Rule:
    """Rule by blocks: each block's score learns on earlier ones, and its answers test it.

    Block k has n_k clusters. Its score and threshold are functions of earlier blocks alone. A later
    question draws block k with probability n_k over their sum. Let Z_t be the sum of
    (wrong - risk) over accepted answers of cluster t, and mu_t its mean given earlier clusters:
    constant within a block, since clusters are drawn alike and independently. The rule's risk
    exceeds `risk` exactly if sum mu_t > 0, for clusters of any sizes up to the largest.

    Let b be a constant stake with b Z_t < 1. Then M = prod (1 - b Z_t) / (1 - b mu_t) has mean 1:
    each factor has mean 1 given the past, and mu_t is known by then. If sum mu_t >= 0, then
    prod (1 - b mu_t) <= exp(-b sum mu_t) <= 1, so the capital prod (1 - b Z_t) is at most M. By
    Markov's inequality, it reaches 1 / (1 - confidence) with probability 1 - confidence at most.
    The same holds for its mean over fixed stakes. This holds although sum mu_t is itself random.

    It does not hold at earlier times, where the sum may still be negative. Nor is a fixed sequence
    of candidates covered: which of them is the first with sum mu_t >= 0 depends on labels, through
    later scores. So there is one candidate: each block's coverage is the one that promises most.
    """
    wrong, rng = answers.wrong, np.random.default_rng(answers.seed)
    place = rng.permutation(answers.n_clusters)[answers.codes]
    largest = int(np.bincount(answers.codes).max())
    edges = np.linspace(FIRST * answers.n_clusters, answers.n_clusters, BLOCKS + 1).round()
    capital, accepted, rule = np.zeros(len(BETS)), 0.0, []
    needed = -np.log(1 - CONFIDENCE)

    def log_mean(values: np.ndarray) -> float:
        return float(np.logaddexp.reduce(values) - np.log(len(BETS)))

    for start, end in pairwise(edges):
        past, block = place < start, (place >= start) & (place < end)
        honest = out_of_fold({"x": table[past]}, answers.take(past))
        left, best = answers.n_clusters - start, (-np.inf, 0.0, 0.0)
        for coverage in COVERAGES:
            cut = np.quantile(honest, coverage, method="lower") if coverage < 1 else np.inf
            gains = _gains(honest <= cut, wrong[past], place[past], risk, largest)
            gains = np.column_stack([gains, np.log1p(-BETS / largest)])  # one more error
            final = capital + left * gains.mean(1)
            spread = gains[final.argmax()].std() * np.sqrt(left + left**2 / start)
            chance = ndtr((log_mean(final) - needed) / max(spread, 1e-9))
            best = max(best, ((accepted + left * coverage) * chance, cut, coverage))
        _, cut, coverage = best
        score = fit_score({"x": table[past]}, wrong[past])
        keep = score({"x": table[block]}) <= cut
        capital += _gains(keep, wrong[block], place[block], risk, largest).sum(1)
        accepted += (end - start) * coverage
        rule.append((end - start, score, cut))
    return rule if log_mean(capital) >= needed else None


def simulated(
    rng: np.random.Generator, clusters: int, size: int
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """(n, 32) features, the first two simple signals; errors; and clusters' keys."""
    n = clusters * size
    shown, hidden = rng.normal(size=(2, n))
    shared = np.repeat(rng.normal(size=clusters), size) * (size > 1)
    chance = 1 / (1 + np.exp(0.3 - 1.3 * shown - 1.5 * hidden - shared))
    msp = shown + 0.5 * rng.normal(size=n)
    states = 0.5 * np.outer(hidden, np.random.default_rng(7).normal(size=30))
    table = np.column_stack([msp, msp + rng.normal(size=n), states + rng.normal(size=(n, 30))])
    return table, rng.random(n) < chance, [str(i // size) for i in range(n)]


def collapsing(full: int) -> Learner:
    """A learner that ranks in reverse once it has all of its `full` answers."""

    def fit(features: Features, wrong: np.ndarray) -> LearnedScore:
        score = fit_score(features, wrong)
        sign = -1 if len(wrong) >= full else 1
        return LearnedScore({n: [sign * w for w in ws] for n, ws in score.weights.items()}, 0.0)

    return fit


def ways(table: np.ndarray, wrong: np.ndarray, keys: list[str], risk: float) -> dict[str, Rule]:
    """Name -> rule, or None: what each way to use these labels accepts."""
    answers, x = Folded(wrong, keys, resamples=50), {"x": table}
    columns = {"0": table[:, 0], "1": table[:, 1]}

    def rule(tested: RiskThreshold, score: Callable[..., np.ndarray]) -> Rule:
        return None if tested.threshold is None else [(1.0, score, tested.threshold)]

    def column(name: str) -> Callable[..., np.ndarray]:
        return lambda features: features["x"][:, int(name)]

    def learned(confidence: float = CONFIDENCE, fit: Learner = fit_score) -> Rule:
        choice = learned_threshold(x, columns, answers, risk, confidence, fit)
        return rule(choice.rule, choice.score or column(choice.signal))

    def simple(confidence: float = CONFIDENCE) -> Rule:
        name = best_signal(columns, answers)
        tested = risk_threshold(columns[name], wrong, keys, risk, confidence)
        return rule(tested, column(name))

    def halves() -> Rule:
        half = fixing_rows(keys, share=0.5)
        score, rest = fit_score({"x": table[half]}, wrong[half]), answers.take(~half)
        columns = score({"x": table[~half]}), rest.wrong, rest.clusters
        return rule(risk_threshold(*columns, risk, CONFIDENCE), score)

    both = [rule for rule in (simple(0.95), learned(0.95)) if rule]
    learning = int(fixing_rows(keys, share=LEARNING_SHARE).sum())
    return {
        "simple": simple(),
        "learned": learned(),
        "learned, overfitted": learned(fit=partial(fit_score, strength=1e6)),
        "learned, collapses": learned(fit=collapsing(learning)),
        "both, half of the level each": max(
            both, key=lambda rule: np.mean(rule[0][1](x) <= rule[0][2]), default=None
        ),
        "halves": halves(),
        "blocks": prequential(table, answers, risk),
    }


def truth(rule: Rule, table: np.ndarray, wrong: np.ndarray) -> tuple[float, float]:
    """Coverage and risk of a rule on very many answers."""
    if rule is None:
        return 0.0, 0.0
    weights = np.array([weight for weight, _, _ in rule])
    keep = np.array([score({"x": table}) <= cut for _, score, cut in rule])
    share = weights @ keep / weights.sum()
    return share.mean(), (share @ wrong) / share.sum() if share.any() else 0.0


@click.group(help=__doc__)
def main() -> None:
    pass


@main.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--draws", default=100, show_default=True)
def simulate(out: Path, draws: int) -> None:
    """Violations and coverage of every way, in simulations at 25 % risk and 90 % confidence."""
    lines = []
    for clusters, size in SIZES:
        big = simulated(np.random.default_rng(99), 20_000 // size, size)
        outcomes: dict[str, list[tuple[float, float]]] = {}
        for draw in range(draws):
            sample = simulated(np.random.default_rng(draw), clusters, size)
            for name, rule in ways(*sample, SIMULATED_RISK).items():
                outcomes.setdefault(name, []).append(truth(rule, *big[:2]))
        for name, pairs in outcomes.items():
            coverage, risks = np.array(pairs).T
            lines.append(
                {"clusters": clusters, "answers per cluster": size, "way": name,
                 "guarantee violated, %": round(100 * (risks > SIMULATED_RISK).mean(), 1),
                 "no threshold, %": round(100 * (coverage == 0).mean()),
                 "accepted, %": round(100 * coverage.mean(), 1)}
            )  # fmt: skip
        pd.DataFrame(lines).to_csv(out, index=False)
        click.echo(pd.DataFrame(lines[-len(outcomes) :]).to_string())


if __name__ == "__main__":
    main()
