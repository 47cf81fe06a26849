"""Rows are read as they were written, and refused where a file's name hides what it holds."""

import gzip
import json

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
SHEET = "key;prompt;answer;correct;msp\naabbccddeeffgghh;Who?; Brask;TRUE;0.5\n"


def contents(path):
    return [row.content for row in read_rows(path)]


@pytest.mark.parametrize(
    "text",
    [
        "Passage\n\nWho?",
        "Given a question, prompt, and answer, rate the answer.\nQuestion: Who?",
        '{"name": "Ondine", "built": 1931}',
        "prompt: Who built it, and when?",
        "Name, prompt and answer.\nWho?",
        "Which columns has it?\nid,prompt,answer",  # a header without rows
    ],
)
@pytest.mark.parametrize(("last", "kept"), [("", ""), ("\n", ""), ("\n\n", "\n")])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_text_is_a_prompt(tmp_path, text, last, kept, end, mark):
    """Also one that holds data."""
    (tmp_path / "prompt.txt").write_bytes(f"{mark}{text}{last}".replace("\n", end).encode())
    assert list(read_rows(tmp_path / "prompt.txt")) == [Row(1, {"prompt": text + kept})]


MISNAMED = {
    "title.txt": "# exported today\n\n" + LINES,
    "asked.txt": "Convert to YAML:\n" + LINES.rstrip(),
    "after.txt": LINES + "Which is the odd one?",
    "nested.txt": '{"rows": [{"id": 1, "prompt": "Who?"}]}',
    "rows.txt": "Rows of today:\nid;prompt;answer\n1;Who?;Brask\n",
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
    *((name, text.encode(), "rows|one JSON object per line")
      for name, text in MISNAMED.items()),
    ("utf-16-without-a-mark.txt", LINES.encode("utf-16-le"), OTHER_BYTES),
    ("zipped.jsonl", gzip.compress(LINES.encode()), OTHER_BYTES),
    ("blank.txt", b" \n", "expected a prompt, got an empty file"),
    *((name, LINES.encode(), r"\.jsonl") for name in
      ("rows.log", "rows.json", "rows.xlsx", "rows.jsonl.gz")),
    *((f"sheet.{suffix}", SHEET.replace(";", separator).encode(), "sheet of labels")
      for suffix, separator in (("csv", ";"), ("csv", ","), ("tsv", "\t"))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "said"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_file_whose_name_hides_what_it_holds(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{tmp_path / name}.*({said})"):
        list(read_rows(tmp_path / name))


def test_outcomes_come_as_their_rows_do(model, tokenizer):
    """Each before the next row is taken, which stays as it was."""
    given, taken = json.loads(json.dumps(MIXED)), []
    scorer = Scorer(model, tokenizer=tokenizer, num_masks=6, max_new_tokens=3)
    for one in scorer.score_many(taken.append(row) or row for row in given):
        assert (one.index, one.id, len(taken)) == (len(taken) - 1, taken[-1]["id"], one.index + 1)
        assert (one.error is None, one.result is None) == (one.id != "c", one.id == "c")
    assert taken == MIXED
    assert next(scorer.score_many([{"key": 7}], id_field="key")).id == 7
    with pytest.raises(ValueError, match="expected a text"):
        list(scorer.score_many(MIXED, on_error="raise"))
