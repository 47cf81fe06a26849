"""The tiny model and its tokenizer, as for scores; labelled rows and a calibration on them."""

from dataclasses import replace

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import LearnedScore
from lm_polygraph_asmi.calibration import calibrate_rows
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.scoring.conftest import PROMPT, model, tokenizer  # noqa: F401 - fixtures

SETTINGS = {"num_masks": 4, "mask_rate": 0.3, "top_k": 8, "stop": "\n"}
WORDS = ("Brask", "1931", "kites", "blue", "Ondine", "True", "passage", "ferry")


def labelled(n=90):
    """Two answers to each prompt; the label has nothing to do with anything."""
    draw = np.random.default_rng(0)
    return [
        {
            "prompt": f"Question {i // 2}: {PROMPT}",
            "answer": f" {draw.choice(WORDS)} {draw.choice(WORDS)}",
            "correct": bool(draw.random() < 0.7),
            "cluster": i // 2,
            "id": f"q{i}",
        }
        for i in range(n)
    ]


@pytest.fixture(scope="session")
def scorer(model, tokenizer):  # noqa: F811
    return Scorer(model, tokenizer=tokenizer, **SETTINGS)


@pytest.fixture(scope="session")
def calibration(scorer):
    return calibrate_rows(labelled(), scorer, 0.4, 0.8, signal="perplexity", resamples=50)


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


def ranking(calibration, low=0.1):
    """The calibration with a PRR interval that begins here."""
    own = calibration.signals[calibration.title]
    signals = calibration.signals | {calibration.title: own._replace(prr=own.prr._replace(low=low))}
    return replace(calibration, signals=signals)
