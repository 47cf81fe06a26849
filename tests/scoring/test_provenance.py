"""Saved scores belong to what stands beside them, and a threshold to answers like its own."""

import copy
import io
import json
import warnings
from dataclasses import replace

import pandas as pd
import pytest
import torch

from lm_polygraph_asmi.scoring import Score, calibrate, calibrate_rows
from lm_polygraph_asmi.scoring.provenance import answer_end, digest_of, made_from
from lm_polygraph_asmi.scoring.rows import Row, in_chat, line_of, score_rows
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.streaming import Streamer
from tests.scoring.conftest import PROMPT

SETTINGS = {"num_masks": 4, "mask_rate": 0.3, "top_k": 8, "stop": "\n", "max_new_tokens": 3}
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS = [
    {"prompt": f"Question {i // 2}: {PROMPT}", "answer": f" {answer} {i}", "correct": i % 2 == 0}
    for i, answer in enumerate(["Brask", "1931", "kites", "blue", "Ondine", "ferry"] * 2)
]


@pytest.fixture(scope="module")
def chatty(tokenizer):
    """The tokenizer with a chat template."""
    with_template = copy.deepcopy(tokenizer)
    with_template.chat_template = TEMPLATE
    return with_template


@pytest.fixture(scope="module")
def scorer(model, chatty):
    return Scorer(model, tokenizer=chatty, **SETTINGS)


@pytest.fixture(scope="module")
def lines(scorer):
    rows = [Row(number, row) for number, row in enumerate(ROWS, start=1)]
    return [json.loads(line_of(row, outcome)) for row, outcome in score_rows(scorer, rows)]


@pytest.fixture
def anew(scorer, monkeypatch):
    """Numbers of the rows that a calibration scores."""

    def numbers(rows):
        scored = []

        def counted(scorer, rows):
            scored.extend(row.number for row in rows)
            return score_rows(scorer, rows)

        monkeypatch.setattr(calibrate, "score_rows", counted)
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always")
            calibrate_rows(rows, scorer, 0.4, 0.8, resamples=20)
        said = [str(note.message) for note in notes if "rows again" in str(note.message)]
        saved = sum("tokens" in row for row in rows)
        expected = [f"Scored {len(scored)} of {saved} rows again: prompt, answer or"]
        assert [text[: len(expected[0])] for text in said] == (expected if scored else [])
        return scored

    return numbers


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({11: {"prompt": "Who sailed it?"}}, [11]),
        ({3: {"answer": " Sorell"}}, [3]),
        ({4: {"samples": [" Brask"]}}, [4]),
        ({4: {"context": "Who built"}}, []),
        ({5: {"offsets": [[0, 3]]}}, [5]),
        ({6: {"model": "another"}}, [6]),
        ({6: {"digest": None}}, [6]),
        ({1: {"correct": False}, 2: {"correct": True}, 7: {"note": "kept"}}, []),
        ({8: {"msp": 0.1}}, [8]),
        ({9: {"score": 0.1}}, [9]),
    ],
    ids=str,
)
def test_scores_are_kept_only_beside_what_made_them(lines, anew, changes, expected):
    rows = [line | changes.get(number, {}) for number, line in enumerate(lines, start=1)]
    assert anew(rows) == expected


def test_prompts_that_changed_places_and_settings(lines, anew):
    swapped = copy.deepcopy(lines)
    swapped[0]["prompt"], swapped[-1]["prompt"] = lines[-1]["prompt"], lines[0]["prompt"]
    assert anew(swapped) == [1, len(lines)]
    assert anew([in_chat(line) for line in lines]) == list(range(1, len(lines) + 1))
    numbers = ("score", "msp", "tokens", "counted", "scored_text", "content_end", "signals")
    exchanged = [dict(line) for line in lines]
    for name in numbers:
        exchanged[0][name], exchanged[-1][name] = lines[-1][name], lines[0][name]
    assert anew(exchanged) == [1, len(lines)]
    other = copy.deepcopy(lines)
    other[1]["settings"]["depth"] = 0.9
    assert anew(other) == [2]
    released = copy.deepcopy(lines)
    for line in released:
        del line["digest"]
    assert len(anew(released)) == len(lines)


def test_a_file_that_passed_through_a_table(lines, anew):
    frame = pd.DataFrame(lines)
    text = frame.sample(frac=1, random_state=0).to_json(orient="records", lines=True)
    rows = [json.loads(line) for line in io.StringIO(text)]
    assert rows != lines
    assert anew(rows) == []


def test_digests(lines):
    assert all(made_from(line) for line in lines)
    assert len({digest_of(line) for line in lines}) == len(lines)
    assert made_from(Score.from_dict(lines[0]).to_dict())
    assert not made_from({})


@pytest.fixture(scope="module")
def calibration(scorer):
    found = calibrate_rows(ROWS, scorer, 0.4, 0.8, signal="msp", resamples=20)
    guarantee = found.decision.guarantee
    guarantee = replace(guarantee, threshold=1e9, coverage=1.0, error_rate=0.1)
    return replace(found, decision=replace(found.decision, guarantee=guarantee))


@pytest.fixture(scope="module")
def deciding(model, chatty, calibration):
    return Scorer(model, tokenizer=chatty, calibration=calibration)


CHAT = [{"role": "user", "content": PROMPT}]


def test_a_threshold_for_texts_decides_on_no_chat(deciding, calibration):
    assert deciding.score(PROMPT, " Brask").accept is True
    chat = deciding.score(CHAT, " Brask")
    assert (chat.accept, chat.error_probability, chat.percentile) == (None, None, None)
    assert "prompt_format text there, chat here" in chat.accept_reason
    old = {name: v for name, v in calibration.settings.items() if name != "prompt_format"}
    unknown = replace(
        deciding.score(PROMPT, " Brask"), calibration=replace(calibration, settings=old)
    )
    assert unknown.accept is None
    assert "prompt_format not recorded there: write a new one" in unknown.accept_reason


def test_a_threshold_for_complete_answers_decides_on_no_other(deciding):
    for answer, end in ((None, "cut off after 3 tokens"), ([7, 8], "without an end")):
        score = deciding.score(PROMPT, answer)
        assert score.accept is None
        assert f"answers complete there, {end} here" in score.accept_reason
    assert deciding.score(PROMPT, [7, 8, deciding.tokenizer.eos_token_id]).accept is True
    assert [answer_end(True, 3, 3), answer_end(False, 2, 3)] == ["complete", "without an end"]


def test_a_threshold_for_chats(model, chatty, scorer, calibration):
    system = {"role": "system", "content": "Be brief."}
    rows = [row | {"prompt": [system, {"role": "user", "content": row["prompt"]}]} for row in ROWS]
    found = calibrate_rows(rows, scorer, 0.4, 0.8, signal="msp", resamples=20)
    found = replace(found, decision=calibration.decision)
    score = Scorer(model, tokenizer=chatty, calibration=found).score
    assert score([system, *CHAT], " Brask").accept is True
    other = score([{"role": "system", "content": "Be kind."}, *CHAT], " Brask")
    for result, reason in (
        (score(CHAT, " Brask"), "the system message differs"),
        (other, "the system message differs"),
        (score(PROMPT, " Brask"), "prompt_format chat there, text here"),
    ):
        assert result.accept is None
        assert reason in result.accept_reason
    with pytest.raises(ValueError, match="row 13 is a text, that of row 1 a chat"):
        calibrate_rows([*rows, ROWS[0]], scorer, 0.4)


def test_attention_and_unknown_weights(model, chatty, calibration, lines):
    used = calibration.settings["attention_in_use"]
    other = {"eager": "sdpa", "sdpa": "eager"}[used]
    score = Scorer(model, tokenizer=chatty, calibration=calibration, attention=other).score
    result = score(PROMPT, " Brask")
    assert result.accept is None
    assert f"attention_in_use {used} there, {other} here" in result.accept_reason
    read = Score.from_dict(lines[0], calibration)
    assert read.accept is None
    assert "weights, tokenizer not recorded here: score again" in read.accept_reason


def test_scores_of_files_record_the_weights(model, chatty, tmp_path, calibration):
    scorer = Scorer(model, tokenizer=chatty, result_cache=tmp_path, **SETTINGS)
    read = Score.from_dict(
        json.loads(json.dumps(scorer.score(PROMPT, " Brask").to_dict())), calibration
    )
    assert read.settings.items() >= scorer.fingerprints().items()
    assert read.accept is True


def test_prompts_of_another_call(model, deciding):
    streamer = Streamer(deciding, shown=lambda _: None)
    ids = torch.tensor([deciding.tokenizer(PROMPT)["input_ids"]])
    model.generate(ids, max_new_tokens=2, do_sample=False, streamer=streamer)
    result = streamer.stream.result
    assert result.compared_settings["prompt_format"] == "token ids"
    assert result.accept is None
