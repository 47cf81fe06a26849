"""Every public statistic on inputs that break statistics: a clear error or a right number.

An error is a ValueError of this package. A number is finite, but for the corners in
`UNDEFINED`, where a docstring says that there is none.
"""

import dataclasses
import traceback
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import lm_polygraph_asmi
from lm_polygraph_asmi import analysis as a, decisions as d
from lm_polygraph_asmi.analysis import Labelled, Sweep
from lm_polygraph_asmi.analysis.risk_control import ordered_threshold
from lm_polygraph_asmi.decisions import fit, learned

PACKAGE = str(Path(lm_polygraph_asmi.__file__).parent)
N, FEW = 120, 20
RNG = np.random.default_rng(0)
DIFFICULTY = np.repeat(RNG.normal(size=N // 2), 2) + RNG.normal(size=N)
QUALITY = 1 / (1 + np.exp(DIFFICULTY + RNG.normal(size=N)))
SOUND = {
    "score": np.exp(DIFFICULTY + RNG.normal(size=N)),
    "other": np.exp(DIFFICULTY + RNG.normal(size=N)),
    "quality": QUALITY,
    "wrong": QUALITY < 0.5,
    "clusters": [f"passage {i // 2}" for i in range(N)],
    "tokens": [np.exp(RNG.normal(size=t)) for t in RNG.integers(1, 5, N)],
}
"""Columns without any fault: scores of answers, and tokens behind them."""


def table(c):
    return np.column_stack([c["other"], np.arange(len(c["other"]))])


def masses(c):
    return [np.full((len(own), 7), 0.9) for own in c["tokens"]]


def of(c):
    """Columns as labelled answers."""
    return Labelled(c["wrong"], c["clusters"], c["quality"], FEW)


CALLS = {
    "distinct_signal": lambda f, c: f(c["score"], table(c), of(c)),
    **dict.fromkeys(("auroc", "aurc", "risk_coverage"), lambda f, c: f(c["score"], c["wrong"])),
    **dict.fromkeys(("auroc_interval", "prr_with_error"), lambda f, c: f(c["score"], of(c))),
    **dict.fromkeys(
        ("auroc_difference", "aurc_difference", "confident_but_fragile"),
        lambda f, c: f(c["other"], c["score"], of(c)),
    ),
    "mcnemar": lambda f, c: f(c["score"], c["other"], c["wrong"], 10),
    "prr_intervals": lambda f, c: f({"a": c["score"], "b": c["other"]}, of(c), [("a", "b")]),
    "coverage_by_band": lambda f, c: f(
        np.concatenate([*c["tokens"], np.empty(0)]), np.concatenate([*masses(c), np.empty((0, 7))])
    ),
    "coverage_intervals": lambda f, c: f(c["tokens"], masses(c), of(c)),
    "tail_entropy_bound": lambda f, c: f(c["score"]),
    "depth_selection": lambda f, c: f([Sweep([c["score"], c["other"]], of(c))]),
    "error_separation": lambda f, c: f(c["tokens"], {"a": c["score"]}, of(c)),
    "masking_response": lambda f, c: f(c["tokens"]),
    "normalised_prr": lambda f, c: f(c["score"], c["quality"]),
    "prr_draws": lambda f, c: f([c["score"]], of(c)),
    "rank_correlation": lambda f, c: f(c["score"], c["other"]),
    "seed_stability": lambda f, c: f([c["score"], c["other"]], c["quality"]),
    "risk_threshold": lambda f, c: f(c["score"], Labelled(c["wrong"], c["clusters"]), 0.3, 0.9),
    "rank_signals": lambda f, c: f({"a": c["score"]}, of(c)),
    "retained_error": lambda f, c: f(c["score"], c["wrong"], 0.5),
    "confident_filter": lambda f, c: f(c["other"], c["score"], c["other"], of(c)),
    "filter_curve": lambda f, c: f(c["other"], c["score"], c["wrong"], [0.0, 0.5]),
    "global_selector": lambda f, c: f(table(c), c["score"], of(c)),
    "token_null": lambda f, c: f(c["other"], c["tokens"], of(c)),
}
OTHERS = {
    # Of intervals, counts, texts or seconds, not of answers: see their own tests.
    "cluster_band", "cluster_interval", "method_seconds", "phase_seconds", "text_clusters", "votes",
    "wilson_interval", "free_features",
}  # fmt: skip
DECISIONS = {"risk_threshold": d.risk_threshold, "rank_signals": fit.rank_signals}


def test_every_public_statistic_is_tried():
    public = {n for n in a.__all__ if not isinstance(getattr(a, n), type)}
    assert public == {*CALLS, *OTHERS} - {*DECISIONS}


def first(value):
    """Columns whose first answer has another score."""
    return {
        "score": np.r_[value, SOUND["score"][1:]],
        "tokens": [np.full(3, value), *SOUND["tokens"][1:]],
    }


def labelled(wrong):
    return {"wrong": wrong, "quality": 1.0 - wrong}


ALL, RARE = np.ones(N, dtype=bool), np.arange(N) % 100 == 7
CORNERS = {
    "a NaN": first(np.nan),
    "an infinite score": first(np.inf),
    "NaN in the labels": {name: np.r_[np.nan, SOUND[name][1:]] for name in ("wrong", "quality")},
    "a quality for a label": {"wrong": SOUND["quality"]},
    "one score": {
        "score": np.full(N, 0.3), "tokens": [np.full_like(own, 0.3) for own in SOUND["tokens"]],
    },
    "ties of 99 %": {
        "score": SOUND["score"] * RARE,
        "tokens": [own * rare for own, rare in zip(SOUND["tokens"], RARE, strict=True)],
    },
    "one cluster": {"clusters": ["one"] * N},
    "two clusters": {"clusters": ["one"] * 60 + ["two"] * 60},
    "all right": labelled(~ALL),
    "all wrong": labelled(ALL),
    "one error": labelled(np.arange(N) == 5),
    "no answers": {name: values[:0] for name, values in SOUND.items()},
    "one answer": {name: values[:1] for name, values in SOUND.items()},
    "a score less": {name: SOUND[name][1:] for name in ("score", "tokens")},
    "a label less": {name: SOUND[name][1:] for name in ("wrong", "quality")},
    "a cluster less": {"clusters": SOUND["clusters"][1:]},
    "texts for scores": {
        "score": ["high"] * N, "tokens": [["high"] * len(own) for own in SOUND["tokens"]],
    },
    "an answer without a token": {"tokens": [np.empty(0), *SOUND["tokens"][1:]]},
}  # fmt: skip
"""Columns to put in the place of sound ones."""
NO_CONTRAST = {"all right", "all wrong", "one answer"}  # corners in which answers are equally good
UNDEFINED = (
    # No interval over one cluster, none of what is undefined.
    ("coverage_intervals aurc_difference confident_filter", {"one cluster", "one answer"}),
    ("auroc_interval auroc_difference rank_signals", {"one cluster", *NO_CONTRAST}),
    ("error_separation prr_intervals", {"one cluster", *NO_CONTRAST}),
    # No PRR, no AUROC where all answers are alike, no order where all scores are.
    ("normalised_prr prr_with_error auroc", NO_CONTRAST),
    ("prr_draws", {"one error", *NO_CONTRAST}),
    ("seed_stability", {"one score", *NO_CONTRAST}),
    ("rank_correlation", {"one score", "one answer"}),
    ("confident_but_fragile", {"one cluster", "one score", "one error", *NO_CONTRAST}),
    ("token_null", {"one cluster", "one score", *NO_CONTRAST}),
)
"""Statistics, and the corners in which they have no number."""


def numbers(found):
    """All numbers of a result, however it is packed."""
    if dataclasses.is_dataclass(found):
        found = vars(found)
    if isinstance(found, pd.DataFrame):
        found = found.to_numpy(dtype=float)
    if isinstance(found, dict):
        found = list(found.values())
    if isinstance(found, np.ndarray | list | tuple):
        return [number for one in found for number in numbers(one)]
    return [] if found is None or isinstance(found, str | bool) else [float(found)]


def called(name, changed):
    """Numbers of a statistic of changed columns, and what it raised."""
    function = DECISIONS.get(name) or getattr(a, name)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        try:
            return numbers(CALLS[name](function, SOUND | changed)), None
        except ValueError as error:
            return [], error


@pytest.mark.parametrize("name", CALLS)
def test_a_clear_refusal_or_a_right_number(name):
    """Sound columns have a number, the same for clusters under names and under numbers."""
    keys = np.repeat(np.arange(100, 100 + N // 2), 2)
    named = [f"passage {key}" for key in keys]
    (sound, _), (again, _) = (called(name, {"clusters": c}) for c in (named, keys.tolist()))
    assert sound == again != []
    assert np.isfinite(sound).all()
    undefined = {c for names, corners in UNDEFINED if name in names.split() for c in corners}
    for corner, changed in CORNERS.items():
        found, error = called(name, changed)
        if error is None:
            assert np.isfinite(found).all() != (corner in undefined), (corner, found)
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{corner}: raised at {last.filename}:{last.lineno}"
            assert last.filename.startswith(PACKAGE), place
            assert len(str(error)) > 15, corner


PAIR, SIXTY = Labelled([0, 1], ["a", "b"]), Labelled([0, 1] * 30, range(60))
GUARANTEE = d.RiskThreshold(0.3, 0.8, 0.04, 0.1, 0.9, 0.2, 500, 500, 1)
ERRORS, SCORE, MASSES = np.arange(20) < 8, np.arange(60.0), np.ones((10, 7))
FIVE = [Sweep([SCORE], Labelled([0, 1] * 30, list("abcde") * 12))]
FOUR, NINE = Labelled([0, 0, 1, 1], "aabc"), [0, 1, 1, 1, 2, 2, 3, 3, 3]
REFUSALS = [
    # Labels, columns and clusters.
    (lambda: Labelled([0, 1]), "clusters must have a key for every row"),
    (lambda: Labelled([], []), "there is no row"),
    (lambda: Labelled(clusters=["a"]), "expected wrong, quality or both"),
    (lambda: Labelled([0, 1], ["a"]), "wrong has 2 values for 1 cluster keys"),
    (lambda: Labelled([0.5], ["a"]), "wrong must contain True and False"),
    (lambda: Labelled(quality=[0.2], clusters=["a"]).wrong, "no correctness labels: pass wrong"),
    (lambda: Labelled([0] * 20, range(20)).folds(), "clusters each, got 0: use more rows"),
    # Many errors, in few clusters.
    (lambda: Labelled(ERRORS, [*"aabbccdd", *range(12)]).folds(), "clusters each, got 4"),
    (lambda: PAIR.columns(score=["high", "low"]), "score must contain numbers"),
    (lambda: a.wilson_interval(0, 0), "at least one answer, got 0 of 0"),
    # Rankings of errors, and selection.
    (lambda: a.mcnemar([1, 2, 3], [1, 2, 3], [0, 1, 0], 4), r"must lie in 0 \.\.\. 3, got 4"),
    (lambda: a.mcnemar([1, 1, 1], [0, 1, 2], [1, 0, 0], 2), "a constant score cannot choose"),
    (lambda: a.seed_stability([[1.0, 2.0]], [0.0, 1.0]), r"\(R >= 2, n\)"),
    (lambda: a.retained_error([0.1, 0.2], [0, 1], 1.5), r"coverage must lie in \[0, 1\], got 1.5"),
    (lambda: a.global_selector(SCORE, SCORE, SIXTY), r"shape \(n, c\), got \(60,\)"),
    # Probabilities and thresholds.
    (
        lambda: d.risk_threshold([0, 1], Labelled([0, 1], ["a"] * 2), 0.1, 0.9),
        "at least 22 at this risk",
    ),
    (
        lambda: d.risk_threshold([0, 1], Labelled([0, 1], "ab"), "x", 0.9),
        "risk must be a number, got 'x'",
    ),
    (lambda: d.risk_threshold(range(4), FOUR, 0.2, 0.9, choosing=[1, 0, 0, 0]), "a part"),
    (lambda: d.risk_threshold(range(4), FOUR, 0.2, 0.9, choosing=[1] * 5), "choosing"),
    (
        lambda: d.risk_threshold(NINE, Labelled([0, 1] * 4 + [1], NINE), 0.2, 0.9, largest=2),
        "largest: .* at least 3, .* got 2",
    ),
    (lambda: ordered_threshold([1, 2, 3], [0, 1], 0.2, 0.9), "3 scores, got 2"),
    (lambda: ordered_threshold([1, 2, 3], [0, None, 2], 0.2, 0.9), "True and False .* got 2"),
    (lambda: ordered_threshold([1, np.nan, 3], [0, 1, None], 0.2, 0.9), "scores .* not finite"),
    (lambda: d.risk_monitor(GUARANTEE, [1, 0.5], PAIR), "accepted must contain True"),
    (
        lambda: d.risk_monitor(ordered_threshold([1, 2], [1, 1], 0.9, 0.5)[0], [1, 0], PAIR),
        r"more labels if they are in order, or else begin with other answers and labels\.$",
    ),
    # Learned scores.
    (lambda: a.free_features([], [], 3), "at least one token"),
    (lambda: learned.learned_threshold({"a": [[1.0]]}, {}, PAIR, 0.1, 0.9), "a has 1 values for 2"),
    # Tokens.
    (lambda: a.masking_response([np.array([])]), "expected at least one token"),
    (lambda: a.coverage_by_band(range(10), MASSES[:, 1:]), r"shape \(10, 7\), got \(10, 6\)"),
    (lambda: a.coverage_intervals([[1], [np.nan]], [MASSES[:1]] * 2, PAIR), "information"),
    (lambda: a.coverage_intervals([[1], []], [MASSES] * 2, PAIR), "2, 2 and 2, 1 without a token"),
    # Depths.
    (lambda: a.depth_selection([]), r"expected the same depths in all settings, got \[\]"),
    (lambda: a.depth_selection([Sweep([SCORE] * n, SIXTY) for n in (2, 3)]), r"got \[2, 3\]"),
    (lambda: a.depth_selection([Sweep([SCORE, SCORE[1:]], SIXTY)]), "scores has 59 values for 60"),
    (lambda: a.depth_selection(FIVE), "at least 6 clusters, got 5: use more rows"),
]


@pytest.mark.parametrize(("call", "message"), REFUSALS, ids=range(len(REFUSALS)))
def test_the_error_says_what_was_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()
