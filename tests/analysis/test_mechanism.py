from collections import Counter

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Labelled, mechanism
from tests.analysis.simulation import keys


def test_masking_response_is_over_tokens():
    """Not over answers: a long answer counts as its tokens."""
    answers = [0.1, 0.3], [0.2], [0.9, 0.6, 0.0], []
    found = mechanism.masking_response([np.array(answer) for answer in answers])
    assert (found.mean, found.median, found.tokens) == pytest.approx((2.1 / 6, 0.25, 6))


@pytest.mark.parametrize(
    ("tokens", "over_robust"),
    [
        # Table "babiqa-mechanism": Qwen3-4B and 8B, Llama-2-7B.
        ([0.016], False), ([0.025], False), ([0.001, 0.003], True),
        # The screen is of the mean, and its limit is outside.
        ([0.0, 0.0, 3.1 * mechanism.OVER_ROBUST], False), ([mechanism.OVER_ROBUST], False),
    ],
)  # fmt: skip
def test_the_screen_tells_the_papers_cells_apart(tokens, over_robust):
    assert mechanism.masking_response([np.array(tokens)]).over_robust == over_robust


@pytest.mark.parametrize("rate", [0, 0.4, 1])
def test_error_separation_against_loops(rate):
    """Without wrong or right answers their mean is undefined."""
    rng = np.random.default_rng(0)
    wrong = rng.random(40) < rate
    information = [rng.random(rng.integers(1, 6)) * (1 + w) for w in wrong]
    answers = Labelled(wrong, keys(20, 2), resamples=9)
    found = mechanism.error_separation(information, {"a": wrong}, answers)
    tokens = {False: [np.nan] if rate == 1 else [], True: [] if rate else [np.nan]}
    for answer, label in zip(information, wrong.tolist(), strict=True):
        tokens[label].extend(answer.tolist())
    expected = np.mean(tokens[False]), np.mean(tokens[True])
    assert (found.right, found.wrong) == pytest.approx(expected, nan_ok=True)


def test_votes_against_a_loop():
    rng = np.random.default_rng(1)
    top_tokens, answer = rng.integers(4, size=(15, 30)), rng.integers(4, size=30)
    top_tokens[:, 0] = answer[0]  # all agree
    found = mechanism.votes(top_tokens, answer)
    assert len(found) == 30
    for position, vote in enumerate(found):
        tokens, own = top_tokens[:, position].tolist(), answer[position]
        assert vote.agree == pytest.approx(sum(token == own for token in tokens) / 15)
        others = Counter(token for token in tokens if token != own)
        most = max(others.values(), default=0)
        assert others[vote.alternative] == most
        assert vote.share == pytest.approx(most / 15)
