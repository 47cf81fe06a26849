"""The tiny model and its tokenizer, as for scores; labelled rows and a calibration on them."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.core import algorithm
from lm_polygraph_asmi.decisions import calibrate_rows
from lm_polygraph_asmi.decisions.learned import LearnedScore
from lm_polygraph_asmi.files import to_json
from lm_polygraph_asmi.scoring import Score
from lm_polygraph_asmi.scoring.output import fields_of, record_of
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.tables import Row
from tests.scoring.conftest import PROMPT, chat, model, tokenizer  # noqa: F401 - fixtures
from tests.scoring.test_output import write

SETTINGS = {"num_masks": 4, "mask_rate": 0.3, "top_k": 8, "stop": "\n", "max_new_tokens": 3}
ASKED = {"risk": 0.4, "confidence": 0.8, "signal": "perplexity", "resamples": 50}
ABOUT = {"label_source": "their labels", "model": "m", "settings": {}, "prompt_tokens": [],
         "question_digests": []}  # fmt: skip
"""Fields of a calibration that no test of its threshold reads."""
N = 76
WORDS = ("Brask", "1931", "kites", "blue", "Ondine", "True", "passage", "ferry")


def labelled(n=N):
    """Two answers to each prompt; the label has nothing to do with anything."""
    draw = np.random.default_rng(0)
    return [
        {"prompt": f"Question {i // 2}: {PROMPT}", "answer": f" {word} {word}",
         "correct": bool(draw.random() < 0.7), "cluster": i // 2, "id": f"q{i}"}
        for i, word in enumerate(draw.choice(WORDS, N)[:n].tolist())
    ]  # fmt: skip


def numbered(*contents):
    """Rows as a file has them; prompts differ where none is given."""
    return [Row(n, {"prompt": f"Who {n}?"} | content) for n, content in enumerate(contents, 1)]


def table(path, rows):
    """The rows in the form of the suffix."""
    if path.suffix == ".jsonl":
        return write(path, rows)
    pd.DataFrame(rows, dtype=object).to_csv(path, index=False)
    return path


def run(*arguments):
    found = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    return found.exit_code, " ".join(found.output.split())


def refused(*calls):
    """Each is a function without arguments, and the word of its ValueError."""
    for call, words in calls:
        with pytest.raises(ValueError, match=words):
            call()


def done(*arguments):
    code, said = run(*arguments)
    assert code == 0, said
    return said


@pytest.fixture(scope="session")
def scorer(model, chat):  # noqa: F811
    return Scorer(model, tokenizer=chat, **SETTINGS)


def lines_of(scorer, rows):
    rest = fields_of(Score), scorer.known_fingerprints()
    given = [Row(number, row) for number, row in enumerate(rows, start=1)]
    found = zip(given, scorer.score_many(given), strict=True)
    return [json.loads(to_json(record_of(*one, *rest), str)) for one in found]


@pytest.fixture(scope="session")
def scored(scorer):
    return lines_of(scorer, labelled())


@pytest.fixture(scope="session")
def scores(scored):
    """As `score` returns them: only files record what identifies the model."""
    return [without_hashes(Score.from_dict(line)) for line in scored]


def without_hashes(one):
    """A score or a calibration that does not know its weights and tokenizer."""
    kept = {n: v for n, v in one.settings.items() if n not in ("weights", "tokenizer")}
    return replace(one, settings=kept)


@pytest.fixture(scope="session")
def calibration(scored):
    return calibrate_rows(scored, **ASKED)


@pytest.fixture
def no_masks(monkeypatch):
    monkeypatch.setattr(algorithm, "run_subnetworks", lambda *_: pytest.fail("a masked pass ran"))


def limited(calibration, threshold, signal=None):
    """The calibration with another threshold, and perhaps another signal, learned or not."""
    adapt = calibration.config.replace(method="adapt", num_samples=2, max_new_tokens=3).to_dict()
    known = {"threshold": threshold, "coverage": 0.5, "error_rate": 0.1}
    if threshold is None:
        known = {"threshold": None, "coverage": 0.0, "error_rate": None}
    learned = LearnedScore({"free": [0.1] * 11, "hidden last": [0.01] * 32}, 0.5)
    return replace(
        calibration,
        settings=calibration.settings
        | (adapt | {"samples": "passed"} if signal == "adapt" else {}),
        signal=signal or calibration.signal,
        learned=learned if signal == "learned" else None,
        signals=calibration.signals | {"learned score": calibration.signals["MSP"]},
        guarantee=replace(calibration.guarantee, **known),
    )
