"""The tiny model and its tokenizer, as for scores; labelled rows and a calibration on them."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lm_polygraph_asmi.decisions import calibrate_rows
from lm_polygraph_asmi.decisions.learned import LearnedScore
from lm_polygraph_asmi.files import to_json
from lm_polygraph_asmi.scoring import Score
from lm_polygraph_asmi.scoring.rows import Row, score_rows
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.tables import columns_of, record_of
from lm_polygraph_asmi.scoring.unmasked import known_fingerprints
from tests.scoring.conftest import PROMPT, model, tokenizer  # noqa: F401 - fixtures

SETTINGS = {"num_masks": 4, "mask_rate": 0.3, "top_k": 8, "stop": "\n"}
N = 76
WORDS = ("Brask", "1931", "kites", "blue", "Ondine", "True", "passage", "ferry")


def labelled(n=N):
    """Two answers to each prompt; the label has nothing to do with anything."""
    draw = np.random.default_rng(0)
    return [
        {
            "prompt": f"Question {i // 2}: {PROMPT}",
            "answer": f" {word} {word}",
            "correct": bool(draw.random() < 0.7),
            "cluster": i // 2,
            "id": f"q{i}",
        }
        for i, word in enumerate(draw.choice(WORDS, N)[:n].tolist())
    ]


@pytest.fixture(scope="session")
def scorer(model, tokenizer):  # noqa: F811
    return Scorer(model, tokenizer=tokenizer, **SETTINGS)


def lines_of(scorer, rows):
    """Rows as they are written with their scores."""
    given = [Row(number, row) for number, row in enumerate(rows, start=1)]
    rest = columns_of(Score), known_fingerprints(getattr(scorer, "scorer", scorer))
    return [
        json.loads(to_json(record_of(*found, *rest), str)) for found in score_rows(scorer, given)
    ]


@pytest.fixture(scope="session")
def scored(scorer):
    """The labelled rows with their scores: scored once for all tests."""
    return lines_of(scorer, labelled())


@pytest.fixture(scope="session")
def scores(scored):
    """As `score` returns them: only files record what identifies the model."""
    own = [Score.from_dict(line) for line in scored]
    hashes = ("weights", "tokenizer")
    kept = [{n: v for n, v in one.settings.items() if n not in hashes} for one in own]
    return [replace(one, settings=settings) for one, settings in zip(own, kept, strict=True)]


@pytest.fixture(scope="session")
def calibration(scored):
    return calibrate_rows(scored, 0.4, 0.8, signal="perplexity", resamples=50)


LEARNED_SCORE = LearnedScore({"free": [0.1] * 11, "hidden last": [0.01] * 32}, 0.5)


def limited(calibration, threshold, signal=None):
    """The calibration with another threshold, and perhaps another signal, learned or not."""
    known = {"threshold": threshold, "coverage": 0.5, "error_rate": 0.1}
    if threshold is None:
        known = {"threshold": None, "coverage": 0.0, "error_rate": None}
    return replace(
        calibration,
        signal=signal or calibration.signal,
        learned=LEARNED_SCORE if signal == "learned" else None,
        signals=calibration.signals | {"learned score": calibration.signals["MSP"]},
        guarantee=replace(calibration.guarantee, **known),
    )
