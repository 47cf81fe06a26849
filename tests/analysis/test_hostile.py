"""Every public statistic on inputs that break statistics: a clear error or a right number.

An error is a ValueError of this package. A number is finite, but for the corners in
`UNDEFINED`, where a docstring says that there is none.
"""

import dataclasses
import traceback
import warnings
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import lm_polygraph_asmi
from lm_polygraph_asmi import analysis as a
from lm_polygraph_asmi import decisions as d
from lm_polygraph_asmi.analysis import Labelled, Sweep
from lm_polygraph_asmi.decisions import learned
from lm_polygraph_asmi.decisions.fit import rank_signals

PACKAGE = str(Path(lm_polygraph_asmi.__file__).parent)
N, FEW = 120, 20


@cache
def sound():
    """Columns without any fault: scores of answers, and tokens behind them."""
    rng = np.random.default_rng(0)
    difficulty = np.repeat(rng.normal(size=N // 2), 2) + rng.normal(size=N)
    quality = 1 / (1 + np.exp(difficulty + rng.normal(size=N)))
    lengths = rng.integers(1, 5, N)
    return {
        "score": np.exp(difficulty + rng.normal(size=N)),
        "other": np.exp(difficulty + rng.normal(size=N)),
        "quality": quality,
        "chance": 1 / (1 + np.exp(-difficulty)),
        "wrong": quality < 0.5,
        "clusters": [f"passage {i // 2}" for i in range(N)],
        "tokens": [np.exp(rng.normal(size=t)) for t in lengths],
    }


def table(c):
    return np.column_stack([c["other"], np.arange(len(c["other"]))])


def masses(c):
    return [np.full((len(own), 7), 0.9) for own in c["tokens"]]


def of(c, resamples=FEW):
    """Columns as labelled answers."""
    return Labelled(c["wrong"], c["clusters"], c["quality"], resamples)


CALLS = {
    "distinct_signal": lambda f, c: f(c["score"], table(c), of(c)),
    "augrc": lambda f, c: f(c["score"], c["wrong"]),
    "auroc": lambda f, c: f(c["score"], c["wrong"]),
    "auroc_interval": lambda f, c: f(c["score"], of(c)),
    "auroc_difference": lambda f, c: f(c["score"], c["other"], of(c)),
    "aurc_difference": lambda f, c: f(c["score"], c["other"], of(c)),
    "mcnemar": lambda f, c: f(c["score"], c["other"], c["wrong"], 10),
    "prr_intervals": lambda f, c: f({"a": c["score"], "b": c["other"]}, of(c), [("a", "b")]),
    "coverage_by_band": lambda f, c: f(
        np.concatenate([*c["tokens"], np.empty(0)]), np.concatenate([*masses(c), np.empty((0, 7))])
    ),
    "coverage_intervals": lambda f, c: f(c["tokens"], masses(c), of(c)),
    "tail_entropy_bound": lambda f, c: f(c["score"]),
    "depth_selection": lambda f, c: f([Sweep([c["score"], c["other"]], of(c))], FEW),
    "error_separation": lambda f, c: f(c["tokens"], {"a": c["score"]}, of(c)),
    "masking_response": lambda f, c: f(c["tokens"]),
    "normalised_prr": lambda f, c: f(c["score"], c["quality"]),
    "prr_draws": lambda f, c: f([c["score"]], of(c)),
    "prr_with_error": lambda f, c: f(c["score"], of(c)),
    "rank_correlation": lambda f, c: f(c["score"], c["other"]),
    "rank_correlations": lambda f, c: f([c["score"], c["other"]]),
    "seed_stability": lambda f, c: f([c["score"], c["other"]], c["quality"]),
    "aurc": lambda f, c: f(c["score"], c["wrong"]),
    "risk_coverage": lambda f, c: f(c["score"], c["wrong"]),
    "risk_threshold": lambda f, c: f(c["score"], c["wrong"], c["clusters"], 0.3, 0.9),
    "rank_signals": lambda f, c: f({"a": c["score"]}, of(c)),
    "retained_error": lambda f, c: f(c["score"], c["wrong"], 0.5),
    "confident_but_fragile": lambda f, c: f(c["other"], c["score"], of(c)),
    "confident_filter": lambda f, c: f(c["other"], c["score"], c["other"], of(c)),
    "filter_curve": lambda f, c: f(c["other"], c["score"], c["wrong"], [0.0, 0.5]),
    "global_selector": lambda f, c: f(table(c), c["score"], of(c)),
    "token_null": lambda f, c: f(c["other"], c["tokens"], of(c)),
}  # fmt: skip
OTHERS = {
    # Of intervals, p-values, counts, texts or seconds, not of answers: see their own tests.
    "cluster_band", "cluster_interval",  # of a function of the caller's
    "holm", "method_seconds", "phase_seconds",
    "text_clusters", "votes", "wilson_interval", "free_features",
}  # fmt: skip


DECISIONS = {"risk_threshold": d.risk_threshold, "rank_signals": rank_signals}


def function(name):
    return DECISIONS.get(name) or getattr(a, name)


def test_every_public_statistic_is_tried():
    public = {n for n in a.__all__ if not isinstance(getattr(a, n), type)}
    assert public == {*CALLS, *OTHERS} - {*DECISIONS}


def with_first(value):
    def change(c):
        return c | {
            "score": np.r_[value, c["score"][1:]],
            "chance": np.r_[value, c["chance"][1:]],
            "tokens": [np.full(3, value), *c["tokens"][1:]],
        }

    return change


def tied(c):
    """All but one answer in a hundred have the same score."""
    rare = np.arange(N) % 100 == 7
    return c | {
        "score": np.where(rare, c["score"], 0.0),
        "tokens": [own * float(r) for own, r in zip(c["tokens"], rare, strict=True)],
    }


def all_of(wrong):
    return lambda c: c | {"wrong": np.full(N, wrong), "quality": np.full(N, 0.0 if wrong else 1.0)}


CORNERS = {
    "a NaN": with_first(np.nan),
    "an infinite score": with_first(np.inf),
    "NaN in the labels": lambda c: (
        c | {"quality": np.r_[np.nan, c["quality"][1:]], "wrong": np.r_[np.nan, c["wrong"][1:]]}
    ),
    "a quality for a label": lambda c: c | {"wrong": c["quality"]},
    "one score": lambda c: (
        c | {"score": np.full(N, 0.3), "tokens": [np.full_like(own, 0.3) for own in c["tokens"]]}
    ),
    "ties of 99 %": tied,
    "one cluster": lambda c: c | {"clusters": ["one"] * N},
    "two clusters": lambda c: c | {"clusters": ["one"] * 60 + ["two"] * 60},
    "all right": all_of(False),
    "all wrong": all_of(True),
    "one error": lambda c: (
        c | {"wrong": np.arange(N) == 5, "quality": np.where(np.arange(N) == 5, 0.0, 1.0)}
    ),
    "no answers": lambda c: {name: values[:0] for name, values in c.items()},
    "one answer": lambda c: {name: values[:1] for name, values in c.items()},
    "a score less": lambda c: (
        c | {"score": c["score"][1:], "chance": c["chance"][1:], "tokens": c["tokens"][1:]}
    ),
    "a label less": lambda c: c | {"wrong": c["wrong"][1:], "quality": c["quality"][1:]},
    "a cluster less": lambda c: c | {"clusters": c["clusters"][1:]},
    "texts for scores": lambda c: (
        c
        | {
            "score": ["high"] * N,
            "chance": ["high"] * N,
            "tokens": [["high"] * len(own) for own in c["tokens"]],
        }
    ),
    "an answer without a token": lambda c: c | {"tokens": [np.empty(0), *c["tokens"][1:]]},
}
NO_CONTRAST = {"all right", "all wrong", "one answer"}
"""Corners in which answers are equally good."""
UNDEFINED = {
    # No interval over one cluster, none of what is undefined.
    "coverage_intervals": {"one cluster", "one answer"},
    "auroc_interval": {"one cluster", *NO_CONTRAST},
    "rank_signals": {"one cluster", *NO_CONTRAST},
    "auroc_difference": {"one cluster", *NO_CONTRAST},
    "aurc_difference": {"one cluster", "one answer"},
    "error_separation": {"one cluster", *NO_CONTRAST},
    "prr_intervals": {"one cluster", *NO_CONTRAST},
    "confident_filter": {"one cluster", "one answer"},
    # No PRR, no AUROC where all answers are alike, no order where all scores are.
    "normalised_prr": NO_CONTRAST,
    "prr_draws": {"one error", *NO_CONTRAST},
    "prr_with_error": NO_CONTRAST,
    "seed_stability": {"one score", *NO_CONTRAST},
    "auroc": NO_CONTRAST,
    "rank_correlation": {"one score", "one answer"},
    "rank_correlations": {"one score", "one answer"},
    "confident_but_fragile": {"one cluster", "one score", "one error", *NO_CONTRAST},
    "token_null": {"one cluster", "one score", *NO_CONTRAST},
}


def numbers(found):
    """All numbers of a result, however it is packed."""
    if found is None or isinstance(found, str | bool):
        return []
    if dataclasses.is_dataclass(found):
        found = [getattr(found, field.name) for field in dataclasses.fields(found)]
    if isinstance(found, pd.DataFrame):
        found = found.to_numpy(dtype=float)
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, np.ndarray):
        return found.astype(float).ravel().tolist()
    if isinstance(found, list | tuple):
        return [number for one in found for number in numbers(one)]
    return [float(found)]


def tried(name, columns):
    """What a statistic makes of columns, and what it raised."""
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        try:
            return CALLS[name](function(name), columns), None
        except ValueError as error:
            return None, error


@pytest.mark.parametrize("name", CALLS)
def test_a_clear_refusal_or_a_right_number(name):
    for corner, change in CORNERS.items():
        found, error = tried(name, change(sound()))
        if error is not None:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{corner}: raised at {last.filename}:{last.lineno}"
            assert last.filename.startswith(PACKAGE), place
            assert len(str(error)) > 15, corner
        else:
            undefined = corner in UNDEFINED.get(name, ())
            assert np.isfinite(numbers(found)).all() != undefined, (corner, found)


@pytest.mark.parametrize("name", CALLS)
def test_sound_columns_have_a_number(name):
    """The same for clusters under other names of the same order, and under numbers."""
    keys = np.repeat(np.arange(100, 100 + N // 2), 2)
    found, again = (
        numbers(CALLS[name](function(name), sound() | {"clusters": clusters}))
        for clusters in ([f"passage {key}" for key in keys], keys.tolist())
    )
    assert found == again
    assert found
    assert np.isfinite(found).all()


NAN = np.nan
PAIR, SIXTY = Labelled([0, 1], ["a", "b"]), Labelled([0, 1] * 30, range(60))
GUARANTEE = d.RiskThreshold(0.3, 0.8, 0.04, 0.1, 0.9, 0.2, 500, 500, 1)
NO_THRESHOLD = d.RiskThreshold(None, 0.0, None, 0.1, 0.9, 0.4, 100, 100)
SCORE, MASSES = np.arange(60.0), np.ones((10, 7))
REFUSALS = [
    # Labels, columns and clusters.
    (lambda: Labelled([0, 1]), "clusters must have a key for every row"),
    (lambda: Labelled([], []), "there is no row"),
    (lambda: Labelled(clusters=["a"]), "expected wrong, quality or both"),
    (lambda: Labelled([0, 1], ["a"]), "wrong has 2 values for 1 cluster keys"),
    (lambda: Labelled([0.5], ["a"]), "wrong must contain True and False"),
    (lambda: Labelled(quality=[0.2], clusters=["a"]).wrong, "no correctness labels: pass wrong"),
    (lambda: PAIR.columns(score=["high", "low"]), "score must contain numbers"),
    (lambda: a.wilson_interval(0, 0), "at least one answer, got 0 of 0"),
    (lambda: a.wilson_interval(3, 2), "got 3 of 2"),
    # Rankings of errors, and selection.
    (lambda: a.auroc([1, NAN, 3], [1, 0, 0]), "score contains NaN"),
    (lambda: a.mcnemar([1, 2, 3], [1, 2, 3], [0, 1, 0], 4), r"must lie in 0 \.\.\. 3, got 4"),
    (lambda: a.mcnemar([1, 1, 1], [0, 1, 2], [1, 0, 0], 2), "a constant score cannot choose"),
    (lambda: a.seed_stability([[1.0, 2.0]], [0.0, 1.0]), r"\(R >= 2, n\)"),
    (lambda: a.risk_coverage([1, 2, 3], [0, 1, 0, 1]), "3 scores for 4 answers"),
    (lambda: a.retained_error([0.1, 0.2], [0, 1], 1.5), r"coverage must lie in \[0, 1\], got 1.5"),
    (lambda: a.retained_error([0.1, 0.2], [0, 1], NAN), r"coverage must lie in \[0, 1\], got nan"),
    (lambda: a.global_selector(SCORE, SCORE, SIXTY), r"shape \(n, c\), got \(60,\)"),
    # Probabilities and thresholds.
    (lambda: d.risk_threshold([0, 1], [0, 1], ["a"] * 2, 0.1, 0.9), "at least 22 at this risk"),
    (lambda: d.risk_threshold([0, 1], [0, 1], "ab", 0, 0.9), "risk must lie strictly between 0"),
    (lambda: d.risk_threshold([0, 1], [0, 1], "ab", 0.1, 1), "confidence must lie strictly"),
    (lambda: d.risk_threshold([0, 1], [0, 1], "ab", "x", 0.9), "risk must be a number, got 'x'"),
    (lambda: d.risk_gate(NO_THRESHOLD, [1, 1], PAIR), "with a threshold, got none"),
    (lambda: d.risk_gate(GUARANTEE, [1, 0.5], PAIR), "accepted must contain True"),
    # Learned scores.
    (lambda: learned.fit_score({"a": [[1.0], [2.0]]}, [1, 1]), "the 2 answers have one label"),
    (lambda: learned.fit_score({"a": [[2.0]] * 3}, [0, 1, 0]), "got 3 answers with the same"),
    (
        lambda: learned.LearnedScore({"a": [1.0]}, 0.0)({"a": [[1.0, 2.0]]}),
        "widths {'a': 1}, got {'a': 2}",
    ),
    (lambda: learned.LearnedScore({"a": [1.0]}, 0.0)({"b": [[1.0]]}), "widths {'a': 1}, got {}"),
    (lambda: a.free_features([], [], 3), "at least one token"),
    (
        lambda: learned.learned_threshold({"a": [[1.0]]}, {"b": [1.0, 2.0]}, PAIR, 0.1, 0.9),
        "a has 1 values for 2",
    ),
    # Tokens.
    (lambda: a.masking_response([np.array([])]), "expected at least one token"),
    (lambda: a.coverage_by_band(range(10), MASSES[:, 1:]), r"shape \(10, 7\), got \(10, 6\)"),
    (lambda: a.coverage_intervals([[1], []], [MASSES] * 2, PAIR), "2, 2 and 2, 1 without a token"),
    # Depths.
    (lambda: a.depth_selection([]), r"must have the same depths, got \[\]"),
    (lambda: a.depth_selection([Sweep([SCORE] * n, SIXTY) for n in (2, 3)]), r"got \[2, 3\]"),
    (
        lambda: a.depth_selection([Sweep([SCORE], Labelled([0, 1] * 30, list("abcde") * 12))]),
        "at least 6 clusters, got 5: use more rows",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_the_error_says_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
