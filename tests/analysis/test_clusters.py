from itertools import product

import numpy as np
import pytest
from scipy.stats import chisquare, multinomial
from statsmodels.stats.proportion import proportion_confint

from lm_polygraph_asmi.analysis import Clustered, Labelled, clusters
from lm_polygraph_asmi.runs.squad import Question, prompt_of
from tests.analysis.simulation import ends, keys
from tests.benchmarks import EXAMPLES, babi_prompt


def test_draws_are_those_with_replacement_of_whole_clusters():
    """All ten ways to draw three clusters of three come at their rates."""
    draws = np.concatenate([*Clustered(["a", "b", "c", "b"], resamples=20_000).draws()])
    np.testing.assert_array_equal(draws[:, 1], draws[:, 3])
    outcomes = [o for o in product(range(4), repeat=3) if sum(o) == 3]
    observed = [(draws[:, :3] == o).all(1).sum() for o in outcomes]
    assert sum(observed) == 20_000
    assert chisquare(observed, 20_000 * multinomial.pmf(outcomes, 3, [1 / 3] * 3)).pvalue > 0.01


def test_draws_depend_neither_on_how_many_are_made_at_once_nor_on_those_before(monkeypatch):
    """Statistics take fewer resamples, or more, than another that came before."""
    whole = np.concatenate([*Clustered(keys(5, 2), resamples=60, seed=3).draws()])
    monkeypatch.setattr(clusters, "ROWS_AT_ONCE", 40)
    clusters._drawn.cache_clear()
    rows = Clustered(keys(5, 2), seed=3)
    for number in (23, 60, 9):
        parts = [*rows.draws(number)]
        np.testing.assert_array_equal(np.concatenate(parts), whole[:number])
        assert len(parts) == -(-number // 4)


def test_what_is_undefined_in_a_resample_is_left_out():
    resampled = np.r_[np.arange(100.0), np.full(20, np.nan)]
    half = np.r_[np.arange(100.0), np.full(100, np.nan)]  # what is left speaks for other data
    for value, values, number, expected in (
        (7.0, resampled, 30, ends(np.arange(100), 30)), (7.0, half, 30, (np.nan, np.nan)),
        (7.0, np.nan_to_num(half, nan=np.inf), 30, (np.nan, np.nan)),
        (np.nan, resampled, 30, (np.nan, np.nan)), (7.0, resampled, 1, (np.nan, np.nan)),
    ):  # fmt: skip
        found = clusters.percentile_interval(value, values, number)
        assert found == pytest.approx((value, *expected), nan_ok=True)


FACTS = ["Mary went to the garden. " * n for n in (6, 7, 8)]  # begin alike
ASKED = [("a", "u"), ("a", "v"), ("b", "u")]
LATER = "Read.\n\nStory: Ann ran.\nHome.\n\nQuestion: Who?\nAnswer: Ann.\n\nQuestion: Where?"


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([f"Answer.\n\nStory: {s}\n\nQuestion: {q}\nAnswer:" for s, q in ASKED], list("aab")),
        ([prompt_of("paper", False)(Question("", p, q, "")) for p, q in ASKED], list("aab")),
        ([f"Read.\r\nStory: {s}\r\n\r\nQuestion: {q}" for s, q in ASKED], list("aab")),
        # A story's later questions are not part of it.
        ([LATER], ["Ann ran. Home."]),
        # Prompts without a shared text are clusters by themselves, also where one has a story.
        (["Question: a?", "Question: b?"] * 2, ["Question: a?", "Question: b?"] * 2),
        (["\nStory: s\n\nQuestion: a?", "Question: b?"], ["Story: s Question: a?", "Question: b?"]),
        ([], []),
    ],
)
def test_rows_over_one_text_are_one_cluster(prompts, expected):
    assert clusters.text_clusters(prompts) == expected


@pytest.mark.parametrize("passage", [79, 80, 81])
@pytest.mark.parametrize("longer", [-1, 0, 1])
@pytest.mark.parametrize(
    "form", ["Answer. {}{}", "{1}\n\n{0}\r\nAnswer. ", "Answer" * 99 + "\n{1}\n {0}\n" + "So" * 99]
)
def test_how_much_two_prompts_share_to_be_one_cluster(passage, longer, form):
    """At least 80 characters, and more than half of the longer prompt; not the instruction."""
    questions = "b", "c" * (passage + longer)
    prompts = [*(form.format("a" * passage, q) for q in questions), form.format("z" * 200, "")]
    same = passage >= 80 and longer < 0
    assert len({*clusters.text_clusters(prompts)}) == (2 if same else 3)


def test_whole_prompts_are_clusters_where_the_paper_has_it_so():
    babi = [babi_prompt(context, "Where is Mary?") for context in FACTS]
    trivia = [f"{EXAMPLES}Question: {context}Where is she?\nAnswer:" for context in FACTS]
    own = [*(f"{context}Where is she?" for context in FACTS), "Who flies kites?"]
    told = ["Answer from the passage. " * 30 + text for text in (*own, "Which dog barks?")]
    counts = [
        len(set(clusters.text_clusters(texts)))
        for texts in (
            babi, trivia, own, told, [*(f"{n}?\n{'So. ' * 99}" for n in range(40)), "Ping"],
        )
    ]  # fmt: skip
    assert counts == [3, 3, 2, 3, 41]


@pytest.mark.parametrize(("count", "n"), [(0, 25), (3, 25), (25, 25), (0, 1), (120, 500)])
def test_wilson_is_statsmodels(count, n):
    expected = count / n, *proportion_confint(count, n, method="wilson")
    assert clusters.wilson_interval(count, n) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_medians_of_resamples_are_numpys(n):
    rng = np.random.default_rng(n)
    values = rng.integers(0, 4, n).astype(float)
    counts = rng.multinomial(n, np.full(n, 1 / n), size=20)
    counts[0] = 0
    expected = [np.median(np.repeat(values, row)) if row.any() else np.nan for row in counts]
    np.testing.assert_array_equal(clusters.Medians(values)(counts), expected)


@pytest.mark.parametrize(
    ("clusters", "errors", "few"),
    [(49, 60, True), (50, 19, True), (50, 101, True), (50, 20, False), (50, 100, False)],
)
def test_samples_too_small_for_intervals(clusters, errors, few):
    assert Labelled(np.arange(120) < errors, np.arange(120) % clusters).too_few == few
