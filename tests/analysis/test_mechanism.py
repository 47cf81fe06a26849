import statistics
from collections import Counter
from itertools import chain

import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi.analysis import Labelled, mechanism
from lm_polygraph_asmi.analysis.cost import WARM_UP, method_seconds, phase_seconds
from lm_polygraph_asmi.results.manifest import PHASES, seconds_by_phase
from lm_polygraph_asmi.results.names import SECONDS
from tests.analysis.simulation import keys


@pytest.mark.parametrize(
    ("answers", "over_robust"),
    [
        # Table "babiqa-mechanism": Qwen3-4B and 8B, Llama-2-7B.
        ([[0.016]], False), ([[0.025]], False), ([[0.001, 0.003]], True),
        # The screen is of the mean, and its limit is outside.
        ([[0.0, 0.0, 3.1 * mechanism.OVER_ROBUST]], False), ([[mechanism.OVER_ROBUST]], False),
        ([[0.1, 0.3], [0.2], [0.9, 0.6, 0.0], []], False),
    ],
)  # fmt: skip
def test_masking_response_is_over_tokens(answers, over_robust):
    """Not over answers: a long answer counts as its tokens."""
    found, tokens = mechanism.masking_response([*map(np.array, answers)]), [*chain(*answers)]
    expected = statistics.mean(tokens), statistics.median(tokens), len(tokens)
    assert (found.mean, found.median, found.tokens) == pytest.approx(expected)
    assert found.over_robust == over_robust


@pytest.mark.parametrize("rate", [0, 0.4, 1])
def test_error_separation_is_that_of_pandas(rate):
    """Without wrong or right answers their mean is undefined."""
    rng = np.random.default_rng(0)
    wrong = rng.random(40) < rate
    information = [rng.random(rng.integers(1, 6)) * (1 + w) for w in wrong]
    answers = Labelled(wrong, keys(20, 2), resamples=9)
    found = mechanism.error_separation(information, {"a": wrong}, answers)
    tokens = pd.DataFrame({"mi": information, "wrong": wrong}).explode("mi").astype(float)
    means = tokens.groupby("wrong")["mi"].mean().reindex([0, 1])
    assert (found.right, found.wrong) == pytest.approx(tuple(means), nan_ok=True)


def test_votes_against_a_loop():
    rng = np.random.default_rng(1)
    top_tokens, answer = rng.integers(4, size=(15, 30)), rng.integers(4, size=30)
    top_tokens[:, 0] = answer[0]  # all agree
    found = mechanism.votes(top_tokens, answer)
    for tokens, own, vote in zip(top_tokens.T.tolist(), answer, found, strict=True):
        others = Counter(token for token in tokens if token != own)
        most = max(others.values(), default=0)
        assert others[vote.alternative] == most
        assert (vote.agree, vote.share) == pytest.approx((tokens.count(own) / 15, most / 15))


def test_every_phase_a_run_can_save():
    """One that is too short is left out."""
    stats = {name: [float(i)] * 12 for i, name in enumerate(PHASES)}
    found = phase_seconds(seconds_by_phase(stats | {"asmi": [{0.6: {}}] * 12}))
    assert {name.removeprefix("seconds_") for name in SECONDS} | {"asmi", "diversity"} == set(found)
    assert [found[phase].median for phase in PHASES.values()] == list(range(len(PHASES)))
    short = {"asmi_seconds": [1.0] * 10, "seconds_nli": [], "seconds_greedy": [1.0] * 11}
    assert list(phase_seconds(seconds_by_phase(short))) == ["greedy"]


def test_a_method_costs_the_median_of_its_sums():
    """Where phases take turns in being slow, a sum of medians is another number."""
    rng = np.random.default_rng(3)
    phases = ("greedy", "samples", "nli", "asmi", "diversity")
    seconds = {phase: rng.exponential(size=31).tolist() for phase in phases}
    by_hand = {
        "MSP": ["greedy"],
        "Semantic Entropy": ["greedy", "samples", "nli"],
        "Sem-ASMI": ["greedy", "asmi"],
        "Adapt-ASMI": ["greedy", "samples", "asmi", "diversity"],
        "ASMI alone, marginal": ["asmi"],
    }
    expected = {
        method: (pytest.approx(np.median(sum(np.array(seconds[p][WARM_UP:]) for p in parts))), 21)
        for method, parts in by_hand.items()
    }
    assert method_seconds(seconds) == expected
    # A method whose phases were not all measured is left out.
    seconds = {"greedy": [1.0] * 12, "asmi": [2.0] * 12, "samples": [3.0] * 12, "nli": [1.0] * 11}
    assert list(method_seconds(seconds)) == ["MSP", "Sem-ASMI", "ASMI alone, marginal"]
    assert method_seconds({"greedy": [1.0] * WARM_UP}) == {}
