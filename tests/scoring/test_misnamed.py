"""Files whose name hides what they hold are refused wherever rows are read."""

import gzip
import io
import json
import zipfile

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.scoring.rows import read_rows

ROWS = [{"prompt": f"Who built ferry {i}?", "answer": " Brask", "correct": True} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CHATS = "".join(
    json.dumps({"messages": [{"role": "user", "content": "Who?"}]}) + "\n" for _ in "12"
)


def zipped():
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("rows.jsonl", LINES)
    return buffer.getvalue()


MISNAMED = {
    "rows.jsonl.txt": (LINES, "holds JSON objects, one per line: rename it to .jsonl"),
    "rows": (LINES, "holds JSON objects, one per line"),
    "rows.log": ("# exported today\n\n" + LINES, "holds JSON objects, one per line"),
    "cut.txt": (LINES + '{"prompt": "Who', "holds JSON objects, one per line"),
    "cut early.txt": ('{"prompt": "Who?"}\n{"prompt": "Wh', "holds JSON objects, one per line"),
    "commas.txt": ('{"prompt": "Who?"},\n{"prompt": "When?"},\n', "holds JSON objects"),
    "one.md": (LINES.splitlines()[0], "holds JSON objects, one per line"),
    "bom.txt": ("\ufeff" + LINES.replace("\n", "\r\n"), "holds JSON objects, one per line"),
    "chats.txt": (CHATS, "holds JSON objects, one per line"),
    "questions.txt": ('{"question": "a"}\n{"question": "b"}\n', "holds JSON objects, one per line"),
    "array.txt": (json.dumps(ROWS), "holds a JSON array or object: write one object per line"),
    "pretty.text": (json.dumps(ROWS, indent=2), "holds a JSON array or object"),
    "object.txt": (json.dumps(ROWS[0], indent=2), "holds a JSON array or object"),
    "array.jsonl": (json.dumps(ROWS), "holds a JSON array or object: write one object per line"),
    "pretty.jsonl": (json.dumps(ROWS, indent=2), "holds a JSON array or object"),
    "lines.ndjson": ("[\n" + ",\n".join(LINES.splitlines()) + "\n]\n", "holds a JSON array or"),
    "object.jsonl": (json.dumps(ROWS[0], indent=2), "holds a JSON array or object"),
    "table.txt": ("prompt,answer\nWho?, Brask\n", "holds a table with a column 'prompt'"),
    "tabs.txt": ('"id"\t"Prompt"\n1\tWho?\n', "holds a table with a column 'prompt'"),
    "semicolons": ("id;prompt\r\n1;Who?\r\n", "holds a table with a column 'prompt'"),
}
OTHER_BYTES = {
    "UTF-16": LINES.encode("utf-16"),
    "UTF-16 without a mark": LINES.encode("utf-16-le"),
    "UTF-16 of the other order": LINES.encode("utf-16-be"),
    "UTF-32": LINES.encode("utf-32"),
    "gzip": gzip.compress(LINES.encode()),
    "zip": zipped(),
    "Parquet": b"PAR1" + bytes(20) + b"PAR1",
    "Zstandard": bytes.fromhex("28b52ffd") + b"\x04\x00\xff",
    "bzip2": b"BZh91AY&SY\xff\x00",
    "xz": b"\xfd7zXZ\x00\xff",
}


@pytest.mark.parametrize("name", MISNAMED)
def test_text_that_is_no_prompt(tmp_path, name):
    text, said = MISNAMED[name]
    path = tmp_path / name
    path.write_bytes(text.encode())
    with pytest.raises(ValueError, match=f"{path}: the file {said}"):
        list(read_rows(path))


@pytest.mark.parametrize("kind", OTHER_BYTES)
@pytest.mark.parametrize("name", ["rows.jsonl", "prompt.txt", "rows.jsonl.gz", "rows"])
def test_bytes_that_are_no_text_are_named(tmp_path, kind, name):
    path = tmp_path / name
    path.write_bytes(OTHER_BYTES[kind])
    with pytest.raises(ValueError, match=f"{path}: expected text in UTF-8, got other bytes"):
        list(read_rows(path))


def test_bytes_of_no_known_kind(tmp_path):
    for name in ("rows.jsonl", "prompt.txt"):
        (tmp_path / name).write_bytes("né\n".encode("latin-1") * 3)
        with pytest.raises(ValueError, match=f"{name}: expected text in UTF-8, got .*position 1"):
            list(read_rows(tmp_path / name))


@pytest.mark.parametrize(
    "text",
    [
        'Convert:\n{"prompt": "Who?"}\nto YAML, please.\nAnswer:',
        "Convert to YAML:\n" + LINES.rstrip(),
        LINES + "Which is the odd one?",
        "Given a question, prompt, and answer, rate the answer.\nQuestion: Who?",
        '{"name": "Ondine", "built": 1931}',
        'Ferries:\n{"name": "Ondine"}\n{"name": "Edda"}\n{"name": "Holm"}\nWhich is older?',
        '{\n  "name": "Ondine"\n}\nWhich ferry is this?',
        "prompt: Who built it, and when?",
        "[1, 2, 3]",
        "Name, prompt and answer.\nWho?",
    ],
)
def test_prompts_that_hold_data_are_prompts(tmp_path, text):
    (tmp_path / "prompt.txt").write_text(text)
    assert [row.content["prompt"] for row in read_rows(tmp_path / "prompt.txt")] == [text]


@pytest.mark.parametrize("name", ["rows.jsonl.txt", "array.jsonl", "gzip"])
def test_every_command_that_reads_rows_refuses_them(tmp_path, name, monkeypatch):
    content = OTHER_BYTES.get(name) or MISNAMED[name][0].encode()
    said = "expected text in UTF-8, got other bytes" if name == "gzip" else MISNAMED[name][1]
    rows = tmp_path / name
    rows.write_bytes(content)
    (tmp_path / "calibration.json").write_text("{}")
    monkeypatch.setattr("lm_polygraph_asmi.decisions.calibration.Calibration.load", lambda *_: None)
    out, calibration = str(tmp_path / "out.jsonl"), str(tmp_path / "calibration.json")
    for arguments in (
        ["score", rows, "--model", "m", "--out", out],
        ["calibrate", rows, "--model", "m", "--risk", 0.1, "--out", tmp_path / "new.json"],
        ["gate", calibration, rows],
    ):
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code == 1
        assert said in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "calibration.json"])
