"""Deciding computes what its signal needs, and no more."""

import copy
import json
from dataclasses import replace
from itertools import product

import pandas as pd
import pyarrow as pa
import pytest
import torch

from lm_polygraph_asmi import algorithm, decide, score_batch
from lm_polygraph_asmi.decisions import BatchDecider, Decider
from lm_polygraph_asmi.decisions.decision import COLUMNS
from lm_polygraph_asmi.model import attention_of
from lm_polygraph_asmi.scoring.rows import Row, line_of, score_rows
from lm_polygraph_asmi.scoring.scorer import Scorer
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
        found, expected = scorer.read(prompt, answer), scorer.score(prompt, answer)
        for name in FREE:
            assert found.signals[name] == pytest.approx(expected.signals[name], rel=2e-5)
        for name in ("ids", "answer", "scored_text", "counted", "answered", "warnings",
                     "ending", "prompt_tokens", "compared_settings"):  # fmt: skip
            assert getattr(found, name) == getattr(expected, name), name


@pytest.mark.usefixtures("no_masks")
@pytest.mark.parametrize("signal", ["msp", "learned"])
def test_no_masked_pass_where_none_is_needed(model, tokenizer, calibration, signal):
    decider = Decider(model, limited(calibration, 1e9, signal), tokenizer=tokenizer)
    for answer in (" Brask", None):
        one = decider.decide(PROMPT, answer)
        assert (one.score, one.signal) == (None, signal)
        assert set(one.signals) == {*FREE, signal}
    assert decider.decide(PROMPT, " Brask").accept is True


def test_a_masked_signal_comes_with_its_score(model, tokenizer, calibration, scorer):
    decider = Decider(model, limited(calibration, 1e9, "sem"), tokenizer=tokenizer)
    one, expected = decider.decide(PROMPT, " Brask"), scorer.score(PROMPT, " Brask")
    assert one.value == one.score.score == pytest.approx(float(expected), rel=1e-6)
    assert one.accept is True
    assert one.score.settings.items() >= scorer.fingerprints().items()


def test_one_call(model, tokenizer, by_msp, tmp_path):
    by_msp.save(tmp_path / "c.json")
    one = decide(model, PROMPT, " Brask", calibration=tmp_path / "c.json", tokenizer=tokenizer)
    assert one == Decider(model, by_msp, tokenizer=tokenizer).decide(PROMPT, " Brask")
    assert one.accept is True


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
def test_many_rows_in_each_form(model, tokenizer, calibration, signal, tmp_path):
    decider = Decider(
        model, limited(calibration, 1e9, signal), tokenizer=tokenizer, max_new_tokens=3,
        result_cache=tmp_path,
    )  # fmt: skip
    found = list(decider.decide_many(ROWS))
    assert [(one.index, one.id, one.error is None) for one in found] == [
        (0, "a", True), (1, "b", True), (2, "c", False), (3, "d", True),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="expected a text"):
        list(decider.decide_many(ROWS, on_error="raise"))
    frame = pd.DataFrame(ROWS)
    table = score_batch({name: frame[name].to_numpy() for name in frame}, decider)
    assert set(table) == {*frame, *COLUMNS}
    for one, accept, value, score in zip(
        found, table["asmi_accept"], table["asmi_value"], table["asmi_score"], strict=True
    ):
        assert accept == (one.result and one.result.accept)
        assert value == (one.result and pytest.approx(one.result.value, rel=1e-5))
        assert (score is None) == (one.result is None or signal != "sem")
    with pytest.raises(ValueError, match="would be overwritten"):
        score_batch(table, decider)
    rows = [Row(number, row) for number, row in enumerate(ROWS[:2])]
    (first, second), cached = (
        [json.loads(line_of(row, outcome, decider)) for row, outcome in score_rows(decider, rows)]
        for _ in range(2)
    )
    assert [first, second] == cached  # from the result cache
    assert first["accept"] is True
    assert second["reason"].startswith("No decision")  # it was cut off
    ((_, clashing),) = score_rows(decider, [Row(0, {"prompt": PROMPT, "accept": 1})])
    assert "expected no fields ['accept']" in clashing.error


def test_a_table_of_arrow(calibration, tmp_path):
    model = tiny_lm.save(tmp_path / "tiny")
    scorer = Scorer(str(model), **SETTINGS)
    known = calibration.settings | scorer.fingerprints()
    known |= {"attention_in_use": attention_of(scorer.model)}
    run = replace(limited(calibration, 1e9, "entropy"), model=str(model), settings=known)
    table = pa.table({"prompt": [PROMPT, None], "answer": [" Brask", None]})
    decided = BatchDecider(str(model), run, "none")(table)
    assert decided.column_names == [*table.column_names, *COLUMNS]
    assert decided["asmi_accept"].to_pylist() == [True, None]
    assert decided["asmi_error"][1].as_py() is not None
