"""Deciding computes what its signal needs, and no more."""

import copy
from dataclasses import replace
from itertools import product

import pandas as pd
import pytest
import torch

from lm_polygraph_asmi import algorithm, decide
from lm_polygraph_asmi.decisions import Decider, Decision
from lm_polygraph_asmi.model import attention_of
from lm_polygraph_asmi.scoring import BatchScorer, score_file
from lm_polygraph_asmi.scoring.rows import read_rows
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.unmasked import fingerprints, read
from tests import tiny_lm
from tests.decisions.conftest import SETTINGS, limited
from tests.scoring.conftest import PROMPT, ending_model

FREE = ("msp", "perplexity", "entropy")


@pytest.fixture
def no_masks(monkeypatch):
    """Masked passes fail."""
    monkeypatch.setattr(
        algorithm, "run_subnetworks", lambda *_: pytest.fail("a masked pass was run")
    )


@pytest.fixture(scope="module")
def by_msp(calibration):
    return limited(calibration, 1e9, "msp")


@pytest.mark.parametrize(("scope", "closing"), [("all", True), ("response", False)])
def test_unmasked_signals_are_those_of_the_score(scope, closing):
    """Given as text, as ids, and the model's own; twice, since the first answer is checked."""
    whole = ending_model(["\n"])
    scorer = Scorer(whole, scope=scope, closing_token=closing, max_new_tokens=8, **SETTINGS)
    others = [(PROMPT, answer) for answer in (" Brask", [7, 8, 9], "\n")]
    for prompt, answer in (*others, *product((PROMPT, f"{PROMPT} Where?"), [None])):
        found, expected = read(scorer, prompt, answer), scorer.score(prompt, answer)
        for name in FREE:
            assert found.signals[name] == pytest.approx(expected.signals[name], rel=2e-5)
        for name in ("ids", "answer", "scored_text", "counted", "answered", "warnings",
                     "ending", "prompt_tokens", "compared_settings"):  # fmt: skip
            assert getattr(found, name) == getattr(expected, name), name


@pytest.mark.usefixtures("no_masks")
@pytest.mark.parametrize("signal", ["msp", "learned"])
def test_no_masked_pass_where_none_is_needed(model, tokenizer, calibration, signal, tmp_path):
    decider = Decider(model, limited(calibration, 1e9, signal), tokenizer=tokenizer)
    for answer in (" Brask", None):
        one = decider.decide(PROMPT, answer)
        assert (one.score, one.signal) == (None, signal)
        assert set(one.signals) == {*FREE, signal}
    one = decider.decide(PROMPT, " Brask")
    assert one.accept is True
    decider.calibration.save(tmp_path / "c.json")
    again = decide(model, PROMPT, " Brask", calibration=tmp_path / "c.json", tokenizer=tokenizer)
    assert again == one


def test_a_masked_signal_comes_with_its_score(model, tokenizer, calibration, scorer):
    decider = Decider(model, limited(calibration, 1e9, "sem"), tokenizer=tokenizer)
    one, expected = decider.decide(PROMPT, " Brask"), scorer.score(PROMPT, " Brask")
    assert one.value == one.score.score == pytest.approx(float(expected), rel=1e-6)
    assert one.accept is True
    assert one.score.settings.items() >= fingerprints(scorer).items()


def test_a_scorer_brings_its_settings(scorer, by_msp, model, tokenizer):
    assert Decider(scorer, by_msp).scorer is scorer
    with pytest.raises(ValueError, match="a Scorer has settings"):
        Decider(scorer, by_msp, depth=0.3)
    other = Scorer(model, tokenizer=tokenizer, stop="?")
    with pytest.raises(ValueError, match="settings differ from the calibration"):
        Decider(other, by_msp)


def test_other_weights_and_tokenizers_are_refused_by_name(by_msp, model, tokenizer):
    def reason(some_model, some_tokenizer):
        one = Decider(some_model, by_msp, tokenizer=some_tokenizer).decide(PROMPT, " Brask")
        assert one.reason.startswith("No decision") == (one.accept is None)
        return one.reason

    assert "No decision" not in reason(copy.deepcopy(model), tokenizer)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    assert "weights or their precision differ" in reason(other, tokenizer)
    assert "weights or their" in reason(copy.deepcopy(model).bfloat16(), tokenizer)
    turned = copy.deepcopy(tokenizer)
    turned.chat_template = "{{ messages[0]['content'] }}"
    assert "chat template or end tokens differ" in reason(model, turned)
    longer = copy.deepcopy(model)
    longer.generation_config.eos_token_id = [2, 7]
    assert "chat template or end tokens differ" in reason(longer, tokenizer)


ROWS = [
    {"id": "a", "prompt": PROMPT, "answer": " Brask"},
    {"id": "b", "prompt": PROMPT},
    {"id": "c"},
    {"id": "d", "prompt": PROMPT, "answer": " In. It."},
]


@pytest.mark.parametrize("signal", ["msp", "sem", "learned"])
def test_many_rows_and_files(model, tokenizer, calibration, signal, tmp_path):
    decider = Decider(
        model, limited(calibration, 1e9, signal), tokenizer=tokenizer, max_new_tokens=3
    )
    found = list(decider.score_many(ROWS))
    assert [(one.index, one.id, one.error is None) for one in found] == [
        (0, "a", True), (1, "b", True), (2, "c", False), (3, "d", True),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="expected a text"):
        list(decider.score_many(ROWS, on_error="raise"))
    pd.DataFrame(ROWS[:3]).to_json(tmp_path / "in.jsonl", orient="records", lines=True)
    for suffix in (".jsonl", ".csv", ".parquet"):
        out = tmp_path / f"out{suffix}"
        for _ in range(2):  # then nothing is left but the row that fails
            assert score_file(decider, tmp_path / "in.jsonl", out) == 1
            first, second, third = (row.content for row in read_rows(out))
            assert (first["accept"], second["accept"]) == (True, None)
            assert second["reason"].startswith("No decision")  # it was cut off
            assert third["error"].startswith("expected")
            assert first["value"] == pytest.approx(found[0].result.value, rel=1e-5)
            assert (first["score"] is None) == (signal != "sem")
            assert first["digest"] == Decision.digest(first)
        other = Decider(decider.scorer, limited(calibration, 5.0, signal))
        with pytest.raises(ValueError, match=r"other settings \(threshold\)"):
            score_file(other, tmp_path / "in.jsonl", out)


def test_a_table(calibration, tmp_path):
    model = tiny_lm.save(tmp_path / "tiny")
    scorer = Scorer(str(model), **SETTINGS)
    known = calibration.settings | fingerprints(scorer)
    known |= {"attention_in_use": attention_of(scorer.model)}
    run = replace(limited(calibration, 1e9, "entropy"), model=str(model), settings=known)
    table = pd.DataFrame({"prompt": [PROMPT, None], "answer": [" Brask", None]})
    decided = BatchScorer(Decider, str(model), run)(table)
    assert decided["accept"].tolist() == [True, pd.NA]
    assert decided["error"].notna().tolist() == [False, True]
