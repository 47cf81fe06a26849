"""Simulate the risk guarantee, the gate and thresholds by group on populations of known truth.

    python scripts/simulate_guarantee.py docs/concepts

writes gate-simulations.csv and group-simulations.csv into the folder.
Shares are in %.

- Gate: looks after every new cluster, as many clusters as in the calibration. At the risk exactly,
  any look may give `violated` in 5 %, `holds` in 100 % - confidence. Drift: the log-odds of an
  error rise by 1, with the threshold whose risk was exact.
- Groups: three with other error rates; violated: any threshold's risk is above the bound.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd

from lm_polygraph_asmi.decisions import risk_thresholds
from lm_polygraph_asmi.decisions.monitoring import LEVEL, SMALL_BETS
from lm_polygraph_asmi.decisions.risk_control import BETS

SHAPES = [(200, 1), (500, 1), (2000, 1), (125, 8), (250, 8), (400, 3), (60, 8)]
GUARANTEES = [(0.1, 0.95), (0.2, 0.9)]
KINDS: list[dict[str, float]] = [{"strength": 2.0, "base": -0.3}, {"strength": 1.0, "base": -1.5}]
SHIFTS = {"easy": -1.0, "usual": 0.0, "hard": 1.0}


def answers(
    rng: np.random.Generator, clusters: int, size: int, strength: float = 2.0, base: Any = -0.3
) -> tuple[np.ndarray, np.ndarray]:
    """Scores (clusters, size), and errors that correlate within clusters."""
    score = rng.normal(size=(clusters, size))
    chance = 1 / (1 + np.exp(-(base + strength * score + rng.normal(size=(clusters, 1)))))
    return score, rng.random(score.shape) < chance


class Truth:
    """Risk of every threshold, from very many answers."""

    def __init__(self, **kind: Any) -> None:
        score, wrong = (column.ravel() for column in answers(np.random.default_rng(99), 10**6, 1,
                                                             **kind))  # fmt: skip
        order = np.argsort(score)
        self.scores, self.base = score[order], float(wrong.mean())
        self.risks = np.cumsum(wrong[order]) / np.arange(1, len(order) + 1)

    def risk(self, threshold: float) -> float:
        """Share of wrong answers among those up to a threshold."""
        place = int(np.searchsorted(self.scores, threshold, side="right"))
        return float(self.risks[place - 1]) if place else 0.0

    def threshold(self, risk: float) -> float:
        """The most lenient threshold with at most this risk."""
        return float(self.scores[np.flatnonzero(self.risks <= risk)[-1]])


def looks(
    score: np.ndarray, wrong: np.ndarray, threshold: float, risk: float, above: bool
) -> np.ndarray:
    """(clusters,) the gate's p-value after each: of `violated` if `above`, else of `holds`."""
    excess = ((score <= threshold) * (wrong - risk)).sum(1)
    bets, worst = (SMALL_BETS, -risk) if above else (BETS, 1 - risk)
    gains = np.log1p(-(bets / (worst * score.shape[1]))[:, None] * excess).cumsum(1)
    return np.exp(-np.maximum(0, np.logaddexp.reduce(gains, 0) - np.log(len(bets))))


def gate_case(
    clusters: int, size: int, risk: float, confidence: float, draws: int, **kind: float
) -> dict[str, float]:
    """One line of gate-simulations.csv."""
    truth, rng = Truth(**kind), np.random.default_rng(5)
    drifted = kind | {"base": kind["base"] + 1}
    exact, half = truth.threshold(risk), truth.threshold(risk / 2)
    counts = np.zeros(4)
    for _ in range(draws):
        same = answers(rng, clusters, size, **kind)
        harder = answers(rng, clusters, size, **drifted)
        counts += [
            looks(*same, exact, risk, True).min() <= LEVEL,
            looks(*same, exact, risk, False).min() <= 1 - confidence,
            looks(*same, half, risk, False)[-1] <= 1 - confidence,
            looks(*harder, exact, risk, True).min() <= LEVEL,
        ]
    shares = 100 * counts / draws
    return {
        "clusters": clusters, "answers per cluster": size, "wrong overall, %": 100 * truth.base,
        "risk, %": 100 * risk, "confidence, %": 100 * confidence,
        "at the risk: violated at any look, %": shares[0],
        "at the risk: holds at any look, %": shares[1],
        "at half the risk: holds at the end, %": shares[2],
        "after drift: error rate, %": 100 * Truth(**drifted).risk(exact),
        "after drift: violated at any look, %": shares[3],
    }  # fmt: skip


def group_case(
    clusters: int, size: int, risk: float, confidence: float, draws: int, **kind: float
) -> dict[str, float]:
    """One line of group-simulations.csv."""
    truths = {n: Truth(**kind | {"base": kind["base"] + by}) for n, by in SHIFTS.items()}
    rng, names = np.random.default_rng(5), np.array(list(SHIFTS))
    keys = np.repeat(np.arange(clusters), size).astype(str).tolist()
    broken, attained = 0, 0
    for _ in range(draws):
        group = rng.choice(names, size=(clusters, size))
        base = kind["base"] + np.vectorize(SHIFTS.get)(group)
        score, wrong = answers(rng, clusters, size, kind["strength"], base)
        rules = risk_thresholds(
            score.ravel(),
            wrong.ravel(),
            keys,
            group.ravel().tolist(),
            risk,
            confidence,
        )
        limits = {n: r.threshold for n, r in rules.items() if r.threshold is not None}
        broken += any(truths[name].risk(limit) > risk for name, limit in limits.items())
        attained += len(limits)
    return {
        "clusters": clusters, "answers per cluster": size, "risk, %": 100 * risk,
        "confidence, %": 100 * confidence, "any guarantee violated, %": 100 * broken / draws,
        "groups with a threshold, of 3": attained / draws,
    }  # fmt: skip


TABLES: dict[str, tuple[Callable[..., dict[str, float]], list[tuple[int, int]], int]] = {
    "gate": (gate_case, SHAPES, 400),
    "group": (group_case, [(500, 1), (2000, 1), (250, 8), (400, 3)], 100),
}
"""Name -> function of one case, shapes, draws."""


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--table", "tables", multiple=True, type=click.Choice(list(TABLES)))
def main(folder: Path, tables: tuple[str, ...]) -> None:
    for name in tables or TABLES:
        case, shapes, draws = TABLES[name]
        rows = [
            case(*shape, *guarantee, draws, **kind)
            for kind in KINDS
            for guarantee in GUARANTEES
            for shape in shapes
        ]
        path = folder / f"{name}-simulations.csv"
        pd.DataFrame(rows).round(1).to_csv(path, index=False)
        click.echo(path)


if __name__ == "__main__":
    main()
