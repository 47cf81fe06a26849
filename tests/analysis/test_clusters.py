from itertools import product

import numpy as np
import pytest
from scipy.stats import bootstrap, chisquare, multinomial, norm

from lm_polygraph_asmi.analysis import Clustered, Interval, Labelled, cluster_interval
from lm_polygraph_asmi.analysis import clusters as clusters_module
from lm_polygraph_asmi.analysis.clusters import (
    Medians,
    bootstrap_interval,
    cluster_band,
    percentile_interval,
    percentiles,
    text_clusters,
    wilson_interval,
)
from lm_polygraph_asmi.runs.squad import Question, prompt_of
from tests.analysis.simulation import coverage, ends, keys, monte_carlo_error, shared
from tests.benchmarks import EXAMPLES, babi_prompt


def test_clusters_are_drawn_whole():
    """Four rows a cluster that are copies of one another carry no more evidence than one."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=60)
    copies = np.repeat(values, 4)
    alone = cluster_interval(
        lambda rows: values[rows].mean(), Clustered([str(i) for i in range(60)])
    )
    clustered = cluster_interval(lambda rows: copies[rows].mean(), Clustered(keys(60, 4)))
    ignored = cluster_interval(
        lambda rows: copies[rows].mean(), Clustered([str(i) for i in range(240)])
    )
    assert clustered.value == pytest.approx(alone.value)
    width, expected = clustered.high - clustered.low, alone.high - alone.low
    assert width == pytest.approx(expected, rel=0.15)
    assert ignored.high - ignored.low == pytest.approx(expected / 2, rel=0.15)
    # The interval is that of the mean.
    assert width == pytest.approx(2 * 1.96 * values.std() / np.sqrt(60), rel=0.15)


def test_an_undefined_statistic_has_no_interval():
    found = cluster_interval(lambda _: float("nan"), Clustered(["a", "b"]))
    assert all(np.isnan(found))
    # One cluster cannot be resampled: the value stands, its interval does not.
    alone = cluster_interval(lambda rows: rows.mean(), Clustered(["a", "a"]))
    assert alone.value == 0.5
    assert np.isnan(alone.low)
    assert np.isnan(alone.high)


def test_rows_of_a_cluster_share_their_count():
    names = ["b", "a", "c", "b", "a", "b"]
    (draws,) = Clustered(names, resamples=50).draws()
    assert draws.shape == (50, 6)
    np.testing.assert_array_equal(draws[:, [0, 0]], draws[:, [3, 5]])
    np.testing.assert_array_equal(draws[:, 1], draws[:, 4])
    # As many clusters as there are.
    np.testing.assert_array_equal(draws[:, :3].sum(1), np.full(50, 3))


def test_draws_are_those_with_replacement():
    """All ten ways to draw three clusters of three come at their rates."""
    draws = np.concatenate([*Clustered(["a", "b", "b", "c"], resamples=20_000).draws()])[
        :, [0, 1, 3]
    ]
    outcomes = [o for o in product(range(4), repeat=3) if sum(o) == 3]
    observed = [(draws == o).all(1).sum() for o in outcomes]
    assert sum(observed) == 20_000
    expected = 20_000 * multinomial.pmf(outcomes, 3, [1 / 3] * 3)
    assert chisquare(observed, expected).pvalue > 0.01


def test_draws_do_not_depend_on_how_many_are_made_at_once(monkeypatch):
    whole = np.concatenate([*Clustered(keys(5, 2), resamples=23, seed=3).draws()])
    monkeypatch.setattr(clusters_module, "ROWS_AT_ONCE", 40)
    parts = [*Clustered(keys(5, 2), resamples=23, seed=3).draws()]
    assert [len(part) for part in parts] == [4, 4, 4, 4, 4, 3]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(
        np.concatenate([*Clustered(keys(5, 2), resamples=23, seed=4).draws()]), whole
    )


def test_the_interval_is_a_naive_loop_over_the_draws():
    rng = np.random.default_rng(1)
    values, names = rng.normal(size=30), keys(10, 3)
    (draws,) = Clustered(names, resamples=200, seed=5).draws()
    found = []
    for counts in draws:
        sample = [value for value, times in zip(values, counts, strict=True) for _ in range(times)]
        found.append(np.median(sample))
    interval = cluster_interval(
        lambda rows: np.median(values[rows]), Clustered(names, resamples=200, seed=5)
    )
    assert interval == pytest.approx((np.median(values), *ends(found, 10)))


def test_agrees_with_scipy_where_every_row_is_a_cluster():
    values = np.random.default_rng(2).exponential(size=80)
    expected = bootstrap(
        (values,), np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(3)
    ).confidence_interval
    found = cluster_interval(
        lambda rows: values[rows].mean(), Clustered(keys(80, 1), resamples=10_000)
    )
    # The ends of a percentile interval over 10,000 resamples are off by about 2 % of its width.
    np.testing.assert_allclose(found[1:], expected, atol=0.05 * (expected.high - expected.low))


def test_intervals_cover_the_mean_of_correlated_rows():
    """75 simulations: 0.95 within three Monte Carlo errors of 0.025."""
    rng = np.random.default_rng(4)

    def found(clusters: list[str], simulations: int) -> list[Interval]:
        intervals = []
        for _ in range(simulations):
            values = shared(rng, 80, 4)
            intervals.append(
                cluster_interval(
                    lambda r, v=values: v[r].mean(), Clustered(clusters, resamples=200)
                )
            )
        return intervals

    error = monte_carlo_error(0.95, 75)
    assert coverage(found(keys(80, 4), 75), 0) == pytest.approx(0.95, abs=3 * error)
    # The variance of the mean is 1 + 3 * 0.5 = 2.5 times that of independent rows: the narrow
    # intervals cover as often as a normal variable stays within 1.96 / sqrt(2.5) of 0.
    narrow = 2 * norm.cdf(1.96 / np.sqrt(2.5)) - 1
    error = monte_carlo_error(narrow, 40)
    assert coverage(found(keys(320, 1), 40), 0) == pytest.approx(narrow, abs=3 * error)


def test_what_is_undefined_in_a_resample_is_left_out():
    resampled = np.r_[np.arange(100.0), np.full(20, np.nan)]
    found = percentile_interval(7.0, resampled, 30)
    assert found == pytest.approx((7.0, *ends(np.arange(100), 30)))
    # Undefined in half of them: what is left speaks for other data than these.
    for missing in (np.nan, np.inf):
        half = percentile_interval(7.0, np.r_[np.arange(100.0), np.full(100, missing)], 30)
        assert half.value == 7
        assert np.isnan(half.low)
        assert np.isnan(half.high)
    undefined = percentile_interval(np.nan, resampled, 30)
    assert np.isnan(undefined).all()


def test_few_clusters_widen_an_interval_and_many_do_not():
    assert percentiles(10**6) == pytest.approx((2.5, 97.5), abs=1e-3)
    assert percentiles(11) == pytest.approx((0.97, 99.03), abs=0.01)
    lows = [percentiles(n)[0] for n in (2, 3, 5, 11, 50, 200)]
    assert lows == sorted(lows)
    assert lows[0] >= 0


def test_interval():
    interval = Interval(0.2, 0.1, 0.4)
    assert -interval == (-0.2, -0.4, -0.1)
    assert str(interval) == "+0.20 [+0.10, +0.40]"
    assert interval.excludes(0)
    assert interval.excludes(0.5)
    # Touching is holding.
    assert not any(interval.excludes(value) for value in (0.1, 0.3, 0.4))
    assert not Interval(0.2, np.nan, np.nan).excludes(0)


def test_rows_over_one_text_are_one_cluster():
    coqa = [f"Answer.\n\nStory: {s}\n\nQuestion: {q}\nAnswer:" for s, q in ("au", "av", "bu")]
    assert text_clusters(coqa) == ["a", "a", "b"]
    squad = [prompt_of("paper", False)(Question("", p, q, "")) for p, q in ("au", "av", "bu")]
    assert text_clusters(squad) == ["a", "a", "b"]


def test_a_storys_later_questions_are_not_part_of_it():
    turns = "\n\nQuestion: Who?\nAnswer: Ann.\n\nQuestion: Where?\nAnswer:"
    assert text_clusters([f"Read.\n\nStory: Ann ran.\nHome.{turns}"]) == ["Ann ran. Home."]


def test_prompts_without_a_shared_text_are_clusters_by_themselves():
    prompts = ["Question: a?", "Question: b?", "Question: a?"]
    assert text_clusters(prompts) == prompts
    # One prompt of another kind: the pattern is not this run's.
    mixed = ["\nStory: s\n\nQuestion: a?", "Question: b?"]
    assert text_clusters(mixed) == ["Story: s Question: a?", "Question: b?"]
    assert text_clusters([]) == []


def test_whole_prompts_are_clusters_where_the_paper_has_it_so():
    facts = ["Mary went to the garden. " * n for n in (6, 7, 8)]  # begin alike
    babi = [babi_prompt(context, "Where is Mary?") for context in facts]
    trivia = [f"{EXAMPLES}Question: {context}Where is she?\nAnswer:" for context in facts]
    own = [*(f"{context}Where is she?" for context in facts), "Who flies kites?"]
    assert [len(set(text_clusters(texts))) for texts in (babi, trivia, own)] == [3, 3, 2]


@pytest.mark.parametrize(("count", "n"), [(0, 25), (3, 25), (25, 25), (0, 1), (120, 500)])
def test_wilson_against_its_definition(count, n):
    """Rates whose score test, with its own standard error, does not reject the count."""
    found = wilson_interval(count, n)
    for bound in (found.low, found.high):
        if 0 < bound < 1:
            z = abs(count / n - bound) / np.sqrt(bound * (1 - bound) / n)
            assert z == pytest.approx(norm.ppf(0.975))
    assert found.low <= count / n <= found.high
    assert 0 <= found.low < found.high <= 1


def test_a_band_is_the_interval_of_each_point():
    rng = np.random.default_rng(9)
    values, names = rng.normal(size=(40, 3)), keys(20, 2)
    found = cluster_band(
        lambda rows: values[rows].mean(0), Clustered(names, resamples=100), points=3
    )
    for place in range(3):
        expected = cluster_interval(
            lambda rows, j=place: values[rows, j].mean(), Clustered(names, resamples=100)
        )
        assert found[:, place].tolist() == pytest.approx([expected.low, expected.high])
    # A curve of as many points as rows is read at the same shares of it.
    spread = cluster_band(
        lambda rows: np.linspace(0, 1, len(rows)), Clustered(names, resamples=9), points=5
    )
    np.testing.assert_allclose(spread, [[0, 0.25, 0.5, 0.75, 1]] * 2)
    assert np.isnan(cluster_band(lambda rows: values[rows, 0], Clustered(["one"] * 40))).all()


@pytest.mark.parametrize("n", [1, 2, 7, 8])
def test_medians_of_resamples_are_numpys(n):
    rng = np.random.default_rng(n)
    values = rng.integers(0, 4, n).astype(float)
    counts = rng.multinomial(n, np.full(n, 1 / n), size=20)
    counts[0] = 0
    expected = [np.median(np.repeat(values, row)) if row.any() else np.nan for row in counts]
    np.testing.assert_array_equal(Medians(values)(counts), expected)


def test_statistics_of_counts_have_the_interval_of_those_of_rows():
    rng = np.random.default_rng(13)
    values, names = rng.normal(size=40), keys(20, 2)
    found = bootstrap_interval(
        values.mean(), lambda counts: counts @ values / 40, Clustered(names, resamples=90)
    )
    assert found == pytest.approx(
        cluster_interval(lambda rows: values[rows].mean(), Clustered(names, resamples=90))
    )
    assert np.isnan(bootstrap_interval(0.5, len, Clustered(["one"] * 3)).low)


def test_quality_is_one_minus_wrong_unless_given():
    answers = Labelled(quality=[0.2, 0.9], clusters=["a", "a"])
    assert (answers.quality.tolist(), answers.n_clusters) == ([0.2, 0.9], 1)
    assert Labelled([True, False], ["b", "a"]).quality.tolist() == [0, 1]
