"""A score learned from labelled answers, with a risk guarantee for its threshold.

The score is a logistic regression with strong L2 regularisation, on features of an answer from one
unmasked pass. It is saved as plain numbers, so that scoring with it needs only NumPy.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import binary, finite
from lm_polygraph_asmi.analysis.comparison import auroc, auroc_difference
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.risk_control import (
    RiskThreshold,
    choosing_rows,
    risk_threshold,
    seed_of,
)
from lm_polygraph_asmi.scoring.signals import LEARNED

STRENGTH = 0.01
"""scikit-learn's C; smaller = more regularised. docs/evidence/fresh-plan.md fixed it;
docs/evidence/learned-plan.md kept it, with the same penalty for all features."""
LEARNING_SHARE = 0.5
"""Share of the clusters that learn and choose the signal. In simulations it accepted the most."""
FEWEST = 10
"""Least number of clusters with wrong answers, and of clusters with right ones, to learn from.

Each of the five folds then learns from about eight of each."""

Features = Mapping[str, ArrayLike]
"""Group of features -> (n, width)."""


@dataclass(frozen=True)
class LearnedScore:
    """A weighted sum of features: the log-odds of an error, nats; higher = more uncertain."""

    weights: dict[str, list[float]]  # group -> (width,), for features that are not standardised
    intercept: float

    def __call__(self, features: Features) -> np.ndarray:
        """Log-odds of an error, (n,). Groups without weights are ignored.

        Raises ValueError: a group is missing, or has another width.
        """
        widths = {name: len(values) for name, values in self.weights.items()}
        tables = _tables({name: features[name] for name in widths if name in features})
        if (actual := {name: table.shape[1] for name, table in tables.items()}) != widths:
            raise ValueError(
                f"the score was learned with features of widths {widths}, got {actual}: use the "
                "model with which it was learned"
            )
        table = np.hstack(list(tables.values()))
        return table @ np.concatenate(list(self.weights.values())) + self.intercept


def _tables(features: Features) -> dict[str, np.ndarray]:
    return {name: finite(**{name: values}) for name, values in features.items()}


def fit_score(features: Features, wrong: ArrayLike) -> LearnedScore:
    """Logistic regression of errors, (n,) with 1 = wrong, on standardised features.

    Raises ValueError also if all labels are equal, or no feature varies.
    """
    from sklearn.linear_model import LogisticRegression  # a second to import

    tables, errors = _tables(features), binary(wrong=wrong)
    if errors.all() or not errors.any():
        raise ValueError(
            f"expected right and wrong answers, but all {len(errors)} have the same label: label "
            "answers of both kinds"
        )
    table = np.hstack(list(tables.values()))
    mean, scale = table.mean(0), table.std(0)
    # A constant column has no information, and its standard deviation is only rounding error.
    known = scale > 1e-9 * np.abs(mean)
    if not known.any():
        raise ValueError(f"expected features that vary, got {len(errors)} answers with the same")
    model = LogisticRegression(C=STRENGTH, max_iter=1000)
    model.fit((table[:, known] - mean[known]) / scale[known], errors)
    weights = np.zeros(table.shape[1])
    weights[known] = model.coef_[0] / scale[known]
    parts = np.split(weights, np.cumsum([part.shape[1] for part in tables.values()])[:-1])
    by_group = {name: part.tolist() for name, part in zip(tables, parts, strict=True)}
    return LearnedScore(by_group, float(model.intercept_[0] - weights @ mean))


def out_of_fold(features: Features, answers: Labelled) -> np.ndarray:
    """Log-odds of an error, (n,); each by a score learned on the other four of five folds.

    Folds are of clusters. Raises ValueError also if fewer than five clusters have a right answer,
    or a wrong one.
    """
    tables, folds, logits = _tables(features), answers.folds(), np.empty(len(answers))
    for fold in np.unique(folds):
        train, test = folds != fold, folds == fold
        logits[test] = fit_score(_rows(tables, train), answers.wrong[train])(_rows(tables, test))
    return logits


def _rows(tables: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: table[rows] for name, table in tables.items()}


@dataclass(frozen=True, eq=False)
class LearnedThreshold:
    """A signal, learned or not, and the threshold on it."""

    signal: str  # "learned", or the name of the best signal that is not learned
    score: LearnedScore | None = field(repr=False)  # None if `signal` is not "learned"
    values: np.ndarray = field(repr=False)  # (n,); learned ones are out of fold for learning rows
    chose: np.ndarray = field(repr=False)  # (n,) True for rows that learned and chose; others test
    rule: RiskThreshold
    learning: str  # a sentence on what was learned and how much it gains


def learned_threshold(
    features: Features,
    simple: Mapping[str, ArrayLike],
    answers: Labelled,
    risk: float,
    confidence: float,
    largest: int | None = None,
) -> LearnedThreshold:
    """The largest threshold with a risk guarantee, on a learned score if it ranks errors better.

    The clusters are split at random. One part learns the score, and chooses by AUROC between the
    learned score (out of fold) and the best simple signal. The simple signal is chosen if it ranks
    as well, or if fewer than `FEWEST` of these clusters have a wrong answer, or a right one. The
    other part only tests thresholds. For these clusters the score is fixed, so the guarantee holds
    even if the score is overfitted.

    Args:
        features: group -> (n, width).
        simple: name of a simple signal -> (n,), higher = more uncertain.
        answers: labels and clusters of the n answers.
        risk, confidence, largest: see `risk_threshold`.
    """
    tables, columns = _tables(features), dict(zip(simple, answers.columns(**simple), strict=True))
    answers.columns(**tables)
    learning = choosing_rows(answers.codes, seed_of(*columns.values()), LEARNING_SHARE)
    known = answers.take(np.flatnonzero(learning))
    ranks = {name: auroc(column[learning], known.wrong) for name, column in columns.items()}
    signal = max(ranks, key=lambda name: np.nan_to_num(ranks[name], nan=0.5))
    values, score = columns[signal], None
    by_kind = [len(set(known.codes[known.wrong == kind])) for kind in (True, False)]
    if min(by_kind) >= FEWEST:
        part = _rows(tables, learning)
        fitted = fit_score(part, known.wrong)
        learned = fitted(tables)
        learned[learning] = out_of_fold(part, known)
        gain = auroc_difference(learned[learning], values[learning], known)
        sentence = (
            f"AUROC of the learned score minus that of {signal}: {gain}, out of fold on the "
            f"{known.n_clusters} of {answers.n_clusters} clusters that learn"
        )
        if gain.value > 0:
            signal, score, values = LEARNED, fitted, learned
    else:
        sentence = (
            f"Nothing was learned: expected {FEWEST} clusters with wrong and {FEWEST} with right "
            f"answers among the {known.n_clusters} that learn, got {by_kind[0]} and {by_kind[1]}"
        )
    rule = risk_threshold(values, answers, risk, confidence, choosing=learning, largest=largest)
    return LearnedThreshold(signal, score, values, learning, rule, f"{sentence}; {signal} decides.")
