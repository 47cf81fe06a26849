"""A score learned from labelled answers, with a risk guarantee for its threshold.

A logistic regression with strong L2 on what one pass without masks knows of an answer. It is kept
as plain numbers, so that scoring needs NumPy only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike

from lm_polygraph_asmi.analysis.clusters import Interval, finite
from lm_polygraph_asmi.analysis.comparison import auroc, auroc_difference
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.decisions.risk_control import RiskThreshold, fixing_rows, risk_threshold

FREE_STRENGTH, STRENGTH = 0.05, 0.01
"""scikit-learn's C with free features only, and with others, as fixed in
docs/evidence/fresh-plan.md."""
LEARNING_SHARE = 0.4
"""Share of the clusters that learn, choose the signal and choose the thresholds to test."""
FEWEST = 10
"""Wrong and right answers, in as many clusters, that a score is learned from at least.

Each of five folds then learns from about eight of either kind."""
LEARNED = "learned"
"""Name of the learned signal."""

Features = Mapping[str, ArrayLike]
"""Group of features -> (n, width)."""


@dataclass(frozen=True)
class LearnedScore:
    """A weighted sum of features: the log-odds of an error, nats; higher = more uncertain.

    Attributes:
        weights: group of features -> (width,), for features as they are, not standardised; at least
            one group, else a ValueError.
        intercept: the value where all features are 0.

    Example:
        >>> score = LearnedScore({"free": [1.0, -2.0]}, intercept=0.5)
        >>> score({"free": [[1.0, 1.0], [0.0, 0.0]]}).tolist()
        [-0.5, 0.5]
    """

    weights: dict[str, list[float]]
    intercept: float

    def __post_init__(self) -> None:
        arrays = [finite(**{name: values}) for name, values in self.weights.items()]
        finite(intercept=self.intercept)
        if not arrays or any(values.ndim != 1 for values in arrays):
            raise ValueError("expected a list of weights for at least one group of features")

    def __call__(self, features: Features) -> np.ndarray:
        """(n,) log-odds; groups without weights are ignored, a missing one is a ValueError."""
        missing = [name for name in self.weights if name not in features]
        if missing:
            raise ValueError(
                f"the learned score needs {', '.join(missing)}, got {', '.join(features)}"
            )
        tables = _tables({name: features[name] for name in self.weights})
        for name, table in tables.items():
            if table.shape[1] != np.size(self.weights[name]):
                raise ValueError(
                    f"{name} has width {table.shape[1]}, but the score was learned with width "
                    f"{np.size(self.weights[name])}: use the model that it was learned with"
                )
        table = np.hstack(list(tables.values()))
        return table @ np.concatenate(list(self.weights.values())) + self.intercept


def _tables(features: Features) -> dict[str, np.ndarray]:
    """Features as checked tables with equally many rows."""
    tables = {name: finite(**{name: values}) for name, values in features.items()}
    shapes = {name: table.shape for name, table in tables.items()}
    if not tables or any(len(s) != 2 or not s[1] for s in shapes.values()):
        raise ValueError(f"expected a table (n, width) for each group of features, got {shapes}")
    if len({s[0] for s in shapes.values()}) > 1:
        raise ValueError(f"expected a row for each answer in all groups of features, got {shapes}")
    return tables


def fit_score(features: Features, wrong: ArrayLike, strength: float | None = None) -> LearnedScore:
    """Logistic regression of errors on standardised features.

    `strength` is scikit-learn's C, smaller = more regularised; None: `STRENGTH`, or with free
    features only `FREE_STRENGTH`. ValueError also if all labels, or all features, are alike.

    Example:
        >>> score = fit_score({"free": [[n] for n in range(40)]}, [0] * 20 + [1] * 20)
        >>> bool(score({"free": [[30]]})[0] > 0 > score({"free": [[10]]})[0])
        True
    """
    from sklearn.linear_model import LogisticRegression  # a second to import

    tables = _tables(features)
    answers = Labelled(wrong, [str(n) for n in range(len(next(iter(tables.values()))))])
    if answers.wrong.all() or not answers.wrong.any():
        kind = "wrong" if answers.wrong.all() else "right"
        raise ValueError(f"all {len(answers)} answers are {kind}: label answers of both kinds")
    table = np.hstack(list(tables.values()))
    mean, scale = table.mean(0), table.std(0)
    # A constant column tells nothing, and its spread is a rounding error.
    known = scale > 1e-9 * np.abs(mean)
    if not known.any():
        raise ValueError(
            f"expected features that vary, got {len(answers)} answers with the same features: "
            "pass others, or use a signal that is not learned"
        )
    strength = strength or (FREE_STRENGTH if list(tables) == ["free"] else STRENGTH)
    model = LogisticRegression(C=strength, max_iter=1000)
    model.fit((table[:, known] - mean[known]) / scale[known], answers.wrong)
    weights = np.zeros(table.shape[1])
    weights[known] = model.coef_[0] / scale[known]
    ends = np.cumsum([part.shape[1] for part in tables.values()])[:-1]
    parts = [part.tolist() for part in np.split(weights, ends)]
    by_group = dict(zip(tables, parts, strict=True))
    return LearnedScore(by_group, float(model.intercept_[0] - weights @ mean))


Learner = Callable[[Features, np.ndarray], LearnedScore]
"""Learns a score from features and labels, as `fit_score`."""


def out_of_fold(features: Features, answers: Labelled, fit: Learner = fit_score) -> np.ndarray:
    """(n,) log-odds by scores that were learned without the answer's cluster, in five folds.

    ValueError also for right or wrong answers in fewer than five clusters.

    Example:
        >>> answers = Labelled([0, 1] * 20, range(40))
        >>> logits = out_of_fold({"free": [[n % 2] for n in range(40)]}, answers)
        >>> bool(logits[1::2].min() > 0 > logits[::2].max())
        True
    """
    tables = _tables(features)
    answers.columns(**tables)
    folds = answers.folds()
    logits = np.empty(len(answers))
    for fold in np.unique(folds):
        train, test = folds != fold, folds == fold
        fitted = fit(_rows(tables, train), answers.wrong[train])
        logits[test] = fitted(_rows(tables, test))
    return logits


def _rows(tables: Mapping[str, np.ndarray], rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: table[rows] for name, table in tables.items()}


@dataclass(frozen=True, eq=False)
class LearnedThreshold:
    """A signal, learned or simple, and the threshold on it.

    Attributes:
        signal: "learned", or the name of the best simple signal.
        score: the learned score; None if a simple signal was chosen.
        values: (n,) of the signal; learned ones are out of fold for the answers that learn.
        rule: the threshold with its guarantee.
        auroc: signal -> AUROC on the clusters that learn, the learned one out of fold.
        gain: AUROC of the learned signal minus that of the best simple one, on the same clusters;
            None if nothing was learned.
        learning: what was learned and gained, in a sentence.
    """

    signal: str
    score: LearnedScore | None = field(repr=False)
    values: np.ndarray = field(repr=False)
    rule: RiskThreshold
    auroc: Mapping[str, float]
    gain: Interval | None
    learning: str

    def __str__(self) -> str:
        return f"{self.learning} {self.rule}"


def learned_threshold(
    features: Features,
    simple: Mapping[str, ArrayLike],
    answers: Labelled,
    risk: float,
    confidence: float,
    fit: Learner = fit_score,
) -> LearnedThreshold:
    """The most lenient threshold with a risk guarantee, on a learned score if it ranks better.

    Two fifths of the clusters, drawn at random, learn the score. Out of fold, they also choose
    between it and the simple signals (the highest AUROC), and the thresholds to test. The other
    clusters test these thresholds only. So signal, score and thresholds are constants for the
    test, whose guarantee is that of `risk_threshold`, however much the score overfits.

    Args:
        features: group -> (n, width), such as "free" (`free_features`), "hidden mean".
        simple: name -> (n,) signals to choose from besides; at least one, none named "learned".
        risk, confidence: of the guarantee, in (0, 1).

    Returns:
        On a simple signal if it ranks at least as well, or if fewer than `FEWEST` of the clusters
        that learn have a wrong or a right answer.

    Raises:
        ValueError: also fewer than two clusters.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> cause = rng.normal(size=(400, 2))
        >>> wrong, keys = cause.sum(1) + rng.normal(size=400) > 1, [str(n) for n in range(400)]
        >>> found = learned_threshold(
        ...     {"free": cause}, {"msp": cause[:, 0]}, Labelled(wrong, keys), 0.1, 0.9
        ... )
        >>> found.signal, bool(found.rule.coverage > 0.4)
        ('learned', True)
    """
    if not simple or LEARNED in simple:
        raise ValueError(f"expected simple signals, none of them named {LEARNED!r}")
    tables, columns = _tables(features), dict(zip(simple, answers.columns(**simple), strict=True))
    answers.columns(**tables)
    learning = fixing_rows(answers.clusters, answers.seed, LEARNING_SHARE)
    known = answers.take(np.flatnonzero(learning))
    by_kind = [len(set(known.codes[known.wrong == kind])) for kind in (True, False)]
    score = None
    if min(by_kind) >= FEWEST:
        part = _rows(tables, learning)
        score = fit(part, known.wrong)
        columns[LEARNED] = score(tables)
        columns[LEARNED][learning] = out_of_fold(part, known, fit)
    ranks = {name: auroc(column[learning], known.wrong) for name, column in columns.items()}
    best = signal = max(simple, key=lambda name: np.nan_to_num(ranks[name], nan=0.5))
    gain = None
    if score is None:
        sentence = (
            f"Nothing was learned: expected {FEWEST} clusters with wrong and {FEWEST} with right "
            f"answers among the {known.n_clusters} that learn, got {by_kind[0]} and {by_kind[1]}; "
            f"{best} decides."
        )
    else:
        gain = auroc_difference(columns[LEARNED][learning], columns[best][learning], known)
        signal, score = (LEARNED, score) if gain.value > 0 else (best, None)
        sentence = (
            f"AUROC of the learned score minus that of {best}: {gain}, out of fold on the "
            f"{known.n_clusters} of {answers.n_clusters} clusters that learn; {signal} decides."
        )
    rule = risk_threshold(
        columns[signal], answers.wrong, answers.clusters, risk, confidence, answers.seed,
        LEARNING_SHARE,
    )  # fmt: skip
    return LearnedThreshold(signal, score, columns[signal], rule, ranks, gain, sentence)
