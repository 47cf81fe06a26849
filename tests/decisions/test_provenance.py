"""Saved scores belong to what stands beside them, and a threshold to answers like its own."""

import copy
import io
import json
from contextlib import suppress

import pandas as pd
import pytest

from lm_polygraph_asmi.decisions import Decider, calibrate_rows
from lm_polygraph_asmi.decisions.rows import saved_answers
from lm_polygraph_asmi.scoring import UnmaskedAnswer
from lm_polygraph_asmi.scoring.provenance import answer_end, digest_of
from lm_polygraph_asmi.scoring.rows import Row, in_chat
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.decisions.conftest import limited, lines_of
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
    return lines_of(scorer, ROWS)


def refused(rows):
    """Numbers of the rows that no calibration takes."""
    return [n for n, row in enumerate(rows, start=1) if not taken(n, row)]


def taken(number, row):
    with suppress(ValueError):
        return bool(saved_answers([Row(number, row)]))
    with pytest.raises(ValueError, match=rf"row {number}: .*score ROWS --model M --out answers"):
        saved_answers([Row(number, row)])
    return False


SIGNALS = ("entropy", "msp", "perplexity", "asmi", "sem")


@pytest.mark.parametrize(
    "change",
    [
        *({name: 1} for name in ("counted", "content_end", "prompt_tokens", "score", "msp")),
        *({"signals": {name: 0.001}} for name in SIGNALS),
        {"answered": False}, {"scored_text": " Brask"}, {"ids": [7]}, {"digest": None},
        {"answer": " Sorell"}, {"settings": {}}, {"model": "another"}, {"prompt": "Who sailed it?"},
    ],
    ids=str,
)  # fmt: skip
def test_a_digest_covers_what_is_read_of_a_row(lines, change):
    """Labels, contexts and other fields may change."""
    first, second, line = copy.deepcopy(lines[:3])
    signals = line["signals"] | change.get("signals", {})
    line |= change | {"signals": signals}
    assert UnmaskedAnswer.of_row(line) is None
    assert refused([first, second | {"correct": True, "context": "C", "note": 1}, line]) == [3]


def test_prompts_and_scores_that_changed_places(lines):
    swapped, exchanged = copy.deepcopy(lines), copy.deepcopy(lines)
    swapped[0]["prompt"], swapped[-1]["prompt"] = lines[-1]["prompt"], lines[0]["prompt"]
    assert refused(swapped) == [1, len(lines)]
    assert refused([in_chat(line) for line in lines[:3]]) == [1, 2, 3]
    for name in ("score", "msp", "counted", "scored_text", "content_end", "signals", "ids"):
        exchanged[0][name], exchanged[-1][name] = lines[-1][name], lines[0][name]
    assert refused(exchanged) == [1, len(lines)]


def test_all_rows_are_scored_alike(scorer, model, chatty, lines):
    for change, said in (
        ({"depth": 0.9}, r"depth 0\.9, not 0\.6"),
        ({"stop": "?"}, r"stop \['\?'\], not \['\\n'\]"),
    ):
        other = Scorer(model, scorer.config.replace(**change), tokenizer=chatty)
        rows = [*lines[:3], *lines_of(other, ROWS[3:4])]
        with pytest.raises(ValueError, match=rf"row 4: scored otherwise than row 1 \(.*{said}"):
            calibrate_rows(rows, 0.4)
        with pytest.raises(ValueError, match="unlabelled row 1: scored otherwise than row 1"):
            calibrate_rows(lines[:4], 0.4, unlabelled=rows[3:])
    bare = {n: v for n, v in lines[0]["settings"].items() if n != "weights"}
    line = lines[0] | {"settings": bare}
    with pytest.raises(ValueError, match="row 1: weights not recorded, as of a model with hooks"):
        saved_answers([Row(1, line | {"digest": digest_of(line)})])


def test_a_file_that_passed_through_a_table(lines):
    frame = pd.DataFrame(lines)
    text = frame.sample(frac=1, random_state=0).to_json(orient="records", lines=True)
    rows = [json.loads(line) for line in io.StringIO(text)]
    assert rows != lines
    assert refused(rows) == []
    assert [UnmaskedAnswer.of_row(line).signals for line in lines] == [x["signals"] for x in lines]


@pytest.fixture(scope="module")
def calibration(lines):
    return limited(calibrate_rows(lines, 0.4, 0.8, signal="msp", resamples=20), 1e9)


@pytest.fixture(scope="module")
def deciding(model, chatty, calibration):
    return Decider(model, calibration, tokenizer=chatty)


CHAT = [{"role": "user", "content": PROMPT}]


def test_a_threshold_for_texts_decides_on_no_chat(deciding):
    assert deciding.decide(PROMPT, " Brask").accept is True
    chat = deciding.decide(CHAT, " Brask")
    assert chat.accept is None
    assert "prompt_format 'text' there, 'chat' here" in chat.reason


def test_a_threshold_for_complete_answers_decides_on_no_other(deciding):
    for answer, end in ((None, "cut off after 3 tokens"), ([7, 8], "without an end")):
        one = deciding.decide(PROMPT, answer)
        assert one.accept is None
        assert f"answers complete there, {end} here" in one.reason
    end = deciding.scorer.tokenizer.eos_token_id
    assert deciding.decide(PROMPT, [7, 8, end]).accept is True
    assert [answer_end(True, 3, 3), answer_end(False, 2, 3)] == ["complete", "without an end"]


def test_a_threshold_for_chats(model, chatty, scorer):
    system = {"role": "system", "content": "Be brief."}
    rows = [
        row | {"prompt": [system, {"role": "user", "content": row["prompt"]}]} for row in ROWS[:6]
    ]
    chats = lines_of(scorer, rows)
    found = limited(calibrate_rows(chats, 0.4, 0.8, signal="msp", resamples=20), 1e9)
    decide = Decider(model, found, tokenizer=chatty).decide
    assert decide([system, *CHAT], " Brask").accept is True
    other = decide([{"role": "system", "content": "Be kind."}, *CHAT], " Brask")
    for result, reason in (
        (decide(CHAT, " Brask"), "the system message differs"),
        (other, "the system message differs"),
        (decide(PROMPT, " Brask"), "prompt_format 'chat' there, 'text' here"),
    ):
        assert result.accept is None
        assert reason in result.reason
    with pytest.raises(
        ValueError, match=r"row 7: scored otherwise than row 1 .*prompt_format 'text', not 'chat'"
    ):
        calibrate_rows([*chats, *lines_of(scorer, ROWS[:1])], 0.4)


def test_another_attention(model, chatty, calibration):
    used = calibration.settings["attention_in_use"]
    other = {"eager": "sdpa", "sdpa": "eager"}[used]
    one = Decider(model, calibration, tokenizer=chatty, attention=other).decide(PROMPT, " Brask")
    assert one.accept is None
    assert f"attention_in_use {used!r} there, {other!r} here" in one.reason
