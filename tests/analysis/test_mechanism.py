from collections import Counter

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.mechanism import (
    OVER_ROBUST,
    error_separation,
    masking_response,
    votes,
)
from tests.analysis.simulation import keys

INFORMATION = [np.array([0.1, 0.3]), np.array([0.2]), np.array([0.9, 0.6, 0.0]), np.array([])]


def test_masking_response_is_over_tokens():
    """Not over answers: a long answer counts as its tokens."""
    found = masking_response(INFORMATION)
    tokens = [0.1, 0.3, 0.2, 0.9, 0.6, 0.0]
    assert found.mean == pytest.approx(sum(tokens) / 6)
    assert found.median == pytest.approx(0.25)
    assert found.tokens == 6


@pytest.mark.parametrize(
    ("mean", "over_robust"),
    [(0.016, False), (0.025, False), (0.002, True)],
    ids=["Qwen3-4B", "Qwen3-8B", "Llama-2-7B"],
)
def test_the_screen_tells_the_papers_cells_apart(mean, over_robust):
    """Table "babiqa-mechanism"."""
    assert masking_response([np.array([mean / 2, 3 * mean / 2])]).over_robust == over_robust


def test_the_screen_is_of_the_mean():
    median_below = [np.array([0.0, 0.0, 3.1 * OVER_ROBUST])]
    assert not masking_response(median_below).over_robust


def test_error_separation_against_loops():
    rng = np.random.default_rng(0)
    wrong = rng.random(40) < 0.4
    information = [rng.random(rng.integers(1, 6)) * (1 + w) for w in wrong]
    scores = {"ASMI": [i.mean() for i in information], "MSP": rng.normal(size=40)}
    found = error_separation(information, scores, Labelled(wrong, keys(20, 2), resamples=50))
    by_label = {label: [] for label in (False, True)}
    for answer, label in zip(information, wrong.tolist(), strict=True):
        by_label[label].extend(answer.tolist())
    assert found.right == pytest.approx(np.mean(by_label[False]))
    assert found.wrong == pytest.approx(np.mean(by_label[True]))
    assert found.mean == pytest.approx(np.mean(by_label[False] + by_label[True]))
    assert found.wrong > found.right
    assert list(found.auroc) == ["ASMI", "MSP"]
    for name, score in scores.items():
        assert found.auroc[name].value == pytest.approx(roc_auc_score(wrong, score))
        assert found.auroc[name].low < found.auroc[name].high


@pytest.mark.parametrize("label", [0, 1])
def test_without_wrong_or_right_answers_their_mean_is_undefined(label):
    found = error_separation(
        INFORMATION[:3], {"ASMI": [1, 2, 3]}, Labelled([label] * 3, keys(3, 1), resamples=20)
    )
    absent, present = (found.right, found.wrong) if label else (found.wrong, found.right)
    assert np.isnan(absent)
    assert present == found.mean == pytest.approx(0.35)
    assert np.isnan(found.auroc["ASMI"]).all()


def test_votes_against_a_loop():
    rng = np.random.default_rng(1)
    top_tokens, answer = rng.integers(4, size=(15, 30)), rng.integers(4, size=30)
    found = votes(top_tokens, answer)
    assert len(found) == 30
    for position, vote in enumerate(found):
        tokens = top_tokens[:, position].tolist()
        own = answer[position]
        assert vote.agree == pytest.approx(sum(token == own for token in tokens) / 15)
        others = Counter(token for token in tokens if token != own)
        assert others[vote.alternative] == max(others.values())
        assert vote.alternative != own
        assert vote.share == pytest.approx(max(others.values()) / 15)


def test_unanimous_and_lost_votes():
    unanimous, lost = votes(np.array([[7, 3], [7, 3], [7, 5]]), [7, 4])
    assert unanimous == (1, None, 0)
    assert lost == (0, 3, pytest.approx(2 / 3))
    # The paper's case: the answer is bedroom, a minority of subnetworks says garden.
    bedroom, garden = 11, 12
    (vote,) = votes(np.array([[bedroom]] * 30 + [[garden]] * 10), [bedroom])
    assert vote == (0.75, garden, 0.25)


def test_an_empty_answer_has_no_votes():
    assert votes(np.empty((5, 0), dtype=int), []) == []
