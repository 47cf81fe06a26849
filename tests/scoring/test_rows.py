"""Rows are read as they were written, and refused where a file's name hides what it holds."""

import gzip
import json

import numpy as np
import pandas as pd
import pytest

from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.scoring.rows import read_rows
from lm_polygraph_asmi.tables import Row
from tests.scoring.conftest import MESSAGES, PROMPT

ROWS = [{"prompt": f"Who built ferry {i}?", "answer": " Brask", "correct": True} for i in range(3)]
MIXED = [
    {"id": "a", "prompt": PROMPT, "answer": " Brask"},
    {"id": "b", "prompt": PROMPT},
    {"id": "c", "prompt": None, "answer": ""},
    {"id": "d", "prompt": "Where?", "answer": [7, 8]},
]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def contents(path):
    return [row.content for row in read_rows(path)]


def test_lines_of_json(tmp_path):
    """Numbered as in an editor; what cannot be read is a row with its error."""
    lines = [json.dumps(ROWS[0]), "", "  ", "{not json", '["a list"]', '{"answer": "no prompt"}']
    lines += ['{"prompt": "Who?", "x": NaN}', '{"prompt": "a", "prompt": "b"}']
    lines += ['{"prompt": ' + "[" * 10**5, '{"prompt": ' + "1" * 5000 + "}", json.dumps(ROWS[1])]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    first, *wrong, last = read_rows(tmp_path / "in.jsonl")
    assert (first, last) == (Row(1, ROWS[0]), Row(11, ROWS[1]))
    assert [row.number for row in wrong] == [4, 5, 6, 7, 8, 9, 10]
    expected = 'expected an object with a "prompt", got '
    assert wrong[1] == Row(5, {"line": '["a list"]'}, expected + "a list")
    assert wrong[2] == Row(6, {"answer": "no prompt"}, expected + "the fields answer")
    fields = ["the field 'x': expected a finite number", "the field 'prompt' occurs twice"]
    said = ["not JSON", *fields, "not JSON", "not JSON"]
    for row, words in zip((wrong[0], *wrong[3:]), said, strict=True):
        assert words in row.error


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_ends_of_lines(tmp_path, end, mark):
    """Others are line breaks to Python, not to JSON lines."""
    prompts = ["Who?", "a\u2028b", "c\x85d", "e\u2029"]
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    (tmp_path / "rows.ndjson").write_bytes((mark + end.join([*lines, "{", ""])).encode())
    *rows, last = read_rows(tmp_path / "rows.ndjson")
    assert [row.content["prompt"] for row in rows] == prompts
    assert (last.number, last.content) == (len(lines) + 1, {"line": "{"})
    text = f"{mark}Passage{end}{end}Who?{end}{end}"
    (tmp_path / "prompt.txt").write_bytes(text.encode())
    assert list(read_rows(tmp_path / "prompt.txt")) == [Row(1, {"prompt": "Passage\n\nWho?\n"})]


def test_tables(tmp_path):
    """Cells of CSV are texts, of Parquet values; missing ones are None."""
    chat = [{"role": "user", "content": 'Who,\r\n"so"?'}]
    given = [{"prompt": json.dumps(chat), "answer": "NA", "id": "007", "note": " x, y "},
             {"prompt": "a", "answer": None, "id": "1", "note": "[1]"}]  # fmt: skip
    expected = [given[0] | {"prompt": chat}, given[1]]
    pd.DataFrame(given).to_csv(tmp_path / "in.csv", index=False, encoding="utf-8-sig")
    assert contents(tmp_path / "in.csv") == expected
    frame = pd.DataFrame([{"answer": np.array([7, 8]), "x": 1.5}, {}])
    frame["prompt"] = [chat, [{"role": "user", "content": "a"}]]
    frame.to_parquet(tmp_path / "in.parquet")
    first, second = contents(tmp_path / "in.parquet")
    assert first == {"prompt": chat, "answer": [7, 8], "x": 1.5}
    assert (second["answer"], second["x"]) == (None, None)


MISNAMED = {
    "rows.log": "# exported today\n\n" + LINES,
    "cut.txt": LINES + '{"prompt": "Who',
    "commas.txt": '{"prompt": "Who?"},\n{"prompt": "When?"},\n',
    "bom.txt": "\ufeff" + LINES.replace("\n", "\r\n"),
    "chats.txt": 2 * (json.dumps({"messages": MESSAGES}) + "\n"),
    "array.txt": json.dumps(ROWS),
    "pretty.jsonl": json.dumps(ROWS, indent=2),
    "lines.ndjson": "[\n" + ",\n".join(LINES.splitlines()) + "\n]\n",
    "object.jsonl": json.dumps(ROWS[0], indent=2),
    "table.txt": "prompt,answer\nWho?, Brask\n",
    "tabs.txt": '"id"\t"Prompt"\n1\tWho?\n',
    "semicolons": "id;prompt\r\n1;Who?\r\n",
}
OTHER_BYTES = "expected text in UTF-8, got other bytes"
REFUSED = [
    *((name, text.encode(), "the file holds rows: name it .csv, or write one JSON object per line")
      for name, text in MISNAMED.items()),
    ("utf-16-without-a-mark.txt", LINES.encode("utf-16-le"), OTHER_BYTES),
    ("rows.jsonl.gz", gzip.compress(LINES.encode()), OTHER_BYTES),
    ("blank.txt", b" \n", "expected a prompt, got an empty file"),
    ("latin-1.csv", "prompt\nné\n".encode("latin-1"), "expected a table in csv and UTF-8: "),
    ("in.parquet", b"PAR1", "expected a table in parquet and UTF-8: "),
    ("in.csv", b"question,answer\na,b\n", "expected a column 'prompt', got question, answer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_file_whose_name_hides_what_it_holds(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / name}: {said}"):
        list(read_rows(tmp_path / name))


@pytest.mark.parametrize(
    "text",
    [
        "Convert to YAML:\n" + LINES.rstrip(),
        LINES + "Which is the odd one?",
        "Given a question, prompt, and answer, rate the answer.\nQuestion: Who?",
        '{"name": "Ondine", "built": 1931}',
        "prompt: Who built it, and when?",
        "Name, prompt and answer.\nWho?",
    ],
)
def test_prompts_that_hold_data_are_prompts(tmp_path, text):
    (tmp_path / "prompt.txt").write_text(text)
    assert contents(tmp_path / "prompt.txt") == [{"prompt": text}]


def test_outcomes_come_as_their_rows_do(model, tokenizer):
    given, taken = json.loads(json.dumps(MIXED)), []
    scorer = Scorer(model, tokenizer=tokenizer, num_masks=6, max_new_tokens=3)
    outcomes = scorer.score_many(taken.append(row["id"]) or row for row in given)
    found = [next(outcomes)]
    assert taken == ["a"]  # no row is taken before its turn
    found += outcomes
    assert given == MIXED
    assert [(one.index, one.id) for one in found] == list(enumerate("abcd"))
    for one, row in zip(found, MIXED, strict=True):
        assert (one.error is None, one.result is None) == (row["id"] != "c", row["id"] == "c")
        if one.result is not None:
            assert one.result.tokens == scorer.score(row["prompt"], row.get("answer")).tokens
    assert next(scorer.score_many([{"key": 7}], id_field="key")).id == 7
    with pytest.raises(ValueError, match="expected a text"):
        list(scorer.score_many(MIXED, on_error="raise"))
