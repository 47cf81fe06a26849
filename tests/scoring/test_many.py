"""Many rows: one after the other, and as columns."""

import json
from copy import deepcopy

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from lm_polygraph_asmi import score_batch
from lm_polygraph_asmi.scoring.batches import BatchScorer
from lm_polygraph_asmi.scoring.many import OUTPUT, attempts
from lm_polygraph_asmi.scoring.rows import Row, score_rows
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests import tiny_lm
from tests.scoring.conftest import PROMPT

pytestmark = pytest.mark.usefixtures("unseen")

SETTINGS = {"scope": "response", "num_masks": 6, "mask_rate": 0.4}
PASSAGE = "The ferry Ondine was built in Brask in 1931. "
ROWS = [
    {"id": "a", "prompt": PASSAGE + "Who built it?", "answer": " Brask"},
    {"id": "b", "prompt": PASSAGE + "A question about the passage."},
    {"id": "c", "prompt": None, "answer": ""},
    {"id": "d", "prompt": PASSAGE + "A question about the passage.", "answer": " True"},
    {"id": "e", "prompt": PROMPT, "answer": [7, 8]},
]


@pytest.fixture
def scorer(model, tokenizer):
    return Scorer(model, tokenizer=tokenizer, **SETTINGS, max_new_tokens=3)


def test_rows_come_out_as_they_went_in(scorer):
    given = json.loads(json.dumps(ROWS))
    taken = []

    def rows():
        for row in given:
            taken.append(row["id"])
            yield row

    found = scorer.score_many(rows())
    assert next(found).id == "a"
    assert taken == ["a"]  # no row is taken before its turn
    found = [None, *found]
    assert given == ROWS
    assert [(one.index, one.id) for one in found[1:]] == list(zip(range(1, 5), "bcde", strict=True))
    assert [one.error is None for one in found[1:]] == [True, False, True, True]
    for one, row in zip(found[1:], ROWS[1:], strict=True):
        if one.result is None:
            continue
        alone = scorer.score(row["prompt"], row.get("answer"))
        assert one.result.tokens == alone.tokens
    with pytest.raises(ValueError, match="expected a text"):
        list(scorer.score_many(ROWS, on_error="raise"))
    with pytest.raises(ValueError, match="on_error"):
        scorer.score_many(ROWS, on_error="ignore")


def test_columns_in_columns_out(scorer):
    frame = pd.DataFrame(ROWS[:4])
    given = {name: frame[name].to_numpy() for name in frame}
    found = score_batch(given, scorer)
    assert list(found) == [*given, *OUTPUT]
    for name, column in given.items():
        assert found[name] is column
    each = list(scorer.score_many(ROWS[:4]))
    expected = [None if one.result is None else one.result.score for one in each]
    assert found["asmi_score"].tolist() == pytest.approx(expected)
    assert [error is None for error in found["asmi_error"]] == [True, True, False, True]
    # The model's own answer stands where none was given, and a given one stays.
    assert [text is None for text in found["asmi_answer"]] == [True, False, True, True]
    assert set(json.loads(found["asmi_tokens"][0])[0]) >= {"text", "u", "alternative"}
    assert score_batch(given, scorer, tokens="none")["asmi_tokens"].tolist() == [None] * 4
    ragged = {"prompt": [PROMPT] * 2, "answer": [[7], [8, 9]], "note": [1, "a"]}
    found_ragged = score_batch(ragged | {"samples": [pd.NA, None]}, scorer)
    assert found_ragged["asmi_error"].tolist() == [None, None]
    assert found_ragged["note"] == [1, "a"]
    with pytest.raises(ValueError, match="would be overwritten"):
        score_batch(found, scorer)
    with pytest.raises(ValueError, match="expected a column 'prompt'"):
        score_batch({}, scorer)


def test_a_table_of_arrow(tmp_path):
    model = tiny_lm.save(tmp_path / "tiny")
    scorer = BatchScorer(str(model), "none", **SETTINGS, max_new_tokens=3)
    table = pa.table({name: [row.get(name) for row in ROWS[:4]] for name in ("prompt", "answer")})
    scored = scorer(table)
    assert scored.column_names == [*table.column_names, *OUTPUT]
    columns = {name: table[name].to_pylist() for name in table.column_names}
    expected = score_batch(columns, scorer.scorer, "none")
    for name in OUTPUT:
        assert scored[name].to_pylist() == expected[name].tolist()
    empty = scorer(table.slice(2, 1))  # the columns of a batch without a score have their types
    assert empty.schema == scored.schema
    with pytest.raises(ValueError, match="tokens must be one of"):
        BatchScorer("no such model", "some")


CALL = {"type": "function", "function": {"name": "sail", "arguments": "{}"}}
HOSTILE = [
    5, None, [], "", b"Who?", object(), {}, {"prompt": 5}, {"prompt": float("nan")},
    {"prompt": b"Who?"}, {"prompt": {"role": "user"}}, {"prompt": []}, {"prompt": ["Who?"]},
    {"prompt": [["role", "user"]]}, {"prompt": [{}]}, {"prompt": [{"content": "Who?"}]},
    {"prompt": [{"role": 5, "content": "Who?"}]}, {"prompt": [{"role": "user", "content": 5}]},
    {"prompt": [{"role": ["user"], "content": "Who?"}]}, {"prompt": [{"role": "user"}]},
    {"prompt": [{"role": "user", "content": [5]}]}, {"prompt": [{"role": "user", "content": {}}]},
    {"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, {"prompt": "x" * 5000},
    {"prompt": [{"role": "user", "content": "Who?", 5: "x"}], "answer": 5},
    {"prompt": [{"role": "tool", "content": None, "tool_calls": [CALL]}], "answer": []},
    {"prompt": PROMPT, "answer": {}}, {"prompt": PROMPT, "answer": 5},
    {"prompt": PROMPT, "answer": 0.5}, {"prompt": PROMPT, "answer": True},
    {"prompt": PROMPT, "answer": [[1]]}, {"prompt": PROMPT, "answer": [None]},
    {"prompt": PROMPT, "answer": ["a"]}, {"prompt": PROMPT, "answer": [1.0]},
    {"prompt": PROMPT, "answer": [True]}, {"prompt": PROMPT, "answer": [-1]},
    {"prompt": PROMPT, "answer": [10**6]}, {"prompt": PROMPT, "answer": [2**70]},
    {"prompt": PROMPT, "answer": np.ones((2, 2), int)}, {"prompt": PROMPT, "answer": np.array(5)},
    {"prompt": PROMPT, "answer": np.array([0.5])}, {"prompt": PROMPT, "answer": "\ud800"},
    *({"prompt": PROMPT, "answer": " Brask", "samples": samples} for samples in (
        5, "x", {}, {"a": 1}, [1], [None], [["a"]], [[1.5]], [[-1], [5]], [[10**6], [5]],
        ["a", {}], [[5], [2**70]], np.array(5), iter("a"), ["\ud800"],
    )),
]  # fmt: skip


@pytest.mark.parametrize("method", ["sem", "adapt"])
def test_bad_content_of_a_row_is_a_value_error(model, tokenizer, method):
    """Whatever stands in a row, no error of ours comes out: the next row is scored."""
    chat = deepcopy(tokenizer)
    chat.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    scorer = Scorer(model, tokenizer=chat, num_masks=2, max_new_tokens=2, method=method)
    rows = [*HOSTILE, {"prompt": PROMPT, "answer": " Brask"}]
    failures = [failure for _, failure in attempts(scorer.score_request, rows)]
    assert failures.pop() is None
    for row, failure in zip(HOSTILE, failures, strict=True):
        assert failure is None or (type(failure) is ValueError and str(failure)), (row, failure)
    scored = [row for row, failure in zip(HOSTILE, failures, strict=True) if failure is None]
    texts = [row for row in scored if isinstance(row, str)]
    assert texts == [""]
    # Token ids of samples are looked up by the method that reads them.
    assert [row["samples"] for row in scored if row not in texts] == (
        [[[-1], [5]], [[10**6], [5]]] if method == "sem" else []
    )


@pytest.mark.parametrize("bug", [TypeError, KeyError, IndexError, ZeroDivisionError, NameError])
@pytest.mark.parametrize("where", ["prompt_tokens", "spans", "sequence_uncertainty", "tokens_of"])
def test_a_bug_of_ours_is_no_bad_row(scorer, monkeypatch, bug, where):
    def broken(*_, **__):
        raise bug("ours")

    monkeypatch.setattr(f"lm_polygraph_asmi.scoring.scorer.{where}", broken)
    with pytest.raises(bug, match="ours"):
        list(scorer.score_many(ROWS[:1]))
    with pytest.raises(bug, match="ours"):
        score_batch({"prompt": [PROMPT], "answer": [" Brask"]}, scorer)
    with pytest.raises(bug, match="ours"):
        list(score_rows(scorer, [Row(1, ROWS[0])]))


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, FloatingPointError])
def test_what_a_row_asks_too_much_of(scorer, monkeypatch, error):
    def broken(*_, **__):
        raise error("too much")

    monkeypatch.setattr("lm_polygraph_asmi.scoring.scorer.prompt_tokens", broken)
    (outcome,) = scorer.score_many(ROWS[:1])
    assert (outcome.result, outcome.error) == (None, "too much")
