"""Answers of a finished run, scored again."""

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from lm_polygraph.stat_calculators import GreedyProbsCalculator

from lm_polygraph_asmi.results.manifest import write_manifest
from lm_polygraph_asmi.stat_calculators import MaskedHeadsCalculator
from lm_polygraph_asmi.stat_calculators.greedy import SavedAnswersCalculator
from tests.rounding import allowed
from tests.tiny_lm import UNMASKABLE, unmaskable, whitebox

TEXTS = ["Who built the ferry?", "Where do the blue kites start?"]


@pytest.fixture
def finished(tmp_path, model):
    """The folder of a manager file with answers, and what LM-Polygraph said of them."""
    rows = [GreedyProbsCalculator(False, False)({}, [text], model, 5) for text in TEXTS]
    stats = {name: [row[name][0] for row in rows] for name in ("greedy_tokens", "greedy_texts")}
    content = {
        "state": "Initialized", "metrics": {}, "gen_metrics": {("sequence", "Rouge"): [1.0, 0.0]},
        "estimations": {("sequence", "Perplexity"): [1.0, 2.0]},
        "stats": stats | {"input_texts": TEXTS},
    }  # fmt: skip
    torch.save(content, tmp_path / "ue_manager_seed1")
    return tmp_path, rows


def test_saved_answers_are_scored_as_they_are(finished, model):
    folder, rows = finished
    saved = SavedAnswersCalculator(folder)({}, TEXTS[::-1], model)
    for mine, row in enumerate(rows[::-1]):
        for name in ("greedy_tokens", "greedy_texts", "input_tokens"):
            assert saved[name][mine] == row[name][0]
        ids = torch.tensor([*row["input_tokens"][0], *row["greedy_tokens"][0]])
        most = allowed(model.model, ids)
        # Generation forbids the end token at the first two positions, scoring does not.
        for name in ("greedy_log_probs", "greedy_log_likelihoods"):
            np.testing.assert_allclose(saved[name][mine][2:], row[name][0][2:], rtol=0, atol=most)
    half = whitebox()
    half.model.bfloat16()
    log_probs = SavedAnswersCalculator(folder)({}, TEXTS, half)["greedy_log_probs"][0]
    np.testing.assert_allclose(np.exp(log_probs).sum(-1), 1, rtol=1e-5)  # in 32 bits


def test_answers_that_are_not_there(finished, model, tmp_path):
    with pytest.raises(FileNotFoundError, match="none"):
        SavedAnswersCalculator(tmp_path / "none")
    with pytest.raises(KeyError, match=r"'Is it blue\?'"):
        SavedAnswersCalculator(finished[0])({}, ["Is it blue?"], model)


@pytest.mark.parametrize("more", [-1, 1])
def test_a_prompt_of_another_length_than_in_the_run(finished, model, more):
    (folder, rows), file = finished, finished[0] / "ue_manager_seed1"
    first, second = (len(row["input_tokens"][0]) for row in rows)
    content = torch.load(file, weights_only=False)
    content["stats"]["asmi_prompt_length"] = [first, second + more]
    torch.save(content, file)
    calculator = SavedAnswersCalculator(folder)
    assert calculator({}, TEXTS[:1], model)["greedy_texts"] == rows[0]["greedy_texts"]
    with pytest.raises(ValueError, match=f"{second + more} tokens"):
        calculator({}, TEXTS[1:], model)


@pytest.mark.parametrize(("saved", "same"), [("other", False), ("tiny", True), (".", False)])
def test_answers_of_another_model(finished, model, monkeypatch, saved, same):
    """A folder may hold other weights than it did."""
    folder, rows = finished
    monkeypatch.chdir(folder)
    manifest = {"model": {"path": saved, "revision": "sha256:then"}, "rows": {"clusters": []}}
    write_manifest(manifest, folder / "ue_manager_seed1")
    monkeypatch.setattr(model, "model_path", "." if saved == "." else "tiny")
    with nullcontext() if same else pytest.raises(ValueError, match=f"of {re.escape(saved)}"):
        found = SavedAnswersCalculator(folder)({}, TEXTS[:1], model)
        assert found["greedy_tokens"] == rows[0]["greedy_tokens"]


@pytest.mark.parametrize("lacks", UNMASKABLE)
def test_models_whose_heads_cannot_be_masked(finished, lacks):
    """Their answers are scored by LM-Polygraph's methods; masked passes refuse them by name."""
    (folder, rows), model = finished, unmaskable(lacks)
    saved = SavedAnswersCalculator(folder)({}, TEXTS[:1], model)
    assert saved["greedy_texts"] == rows[0]["greedy_texts"]
    with pytest.raises(TypeError, match=f"{type(model.model).__name__}.* {UNMASKABLE[lacks]}"):
        MaskedHeadsCalculator()(saved, TEXTS[:1], model)
