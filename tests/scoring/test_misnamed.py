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
    "rows.jsonl.txt": LINES,
    "rows": LINES,
    "rows.log": "# exported today\n\n" + LINES,
    "cut.txt": LINES + '{"prompt": "Who',
    "commas.txt": '{"prompt": "Who?"},\n{"prompt": "When?"},\n',
    "one.md": LINES.splitlines()[0],
    "bom.txt": "\ufeff" + LINES.replace("\n", "\r\n"),
    "chats.txt": CHATS,
    "array.txt": json.dumps(ROWS),
    "pretty.text": json.dumps(ROWS, indent=2),
    "array.jsonl": json.dumps(ROWS),
    "pretty.jsonl": json.dumps(ROWS, indent=2),
    "lines.ndjson": "[\n" + ",\n".join(LINES.splitlines()) + "\n]\n",
    "object.jsonl": json.dumps(ROWS[0], indent=2),
    "table.txt": "prompt,answer\nWho?, Brask\n",
    "tabs.txt": '"id"\t"Prompt"\n1\tWho?\n',
    "semicolons": "id;prompt\r\n1;Who?\r\n",
}
SAID = "the file holds rows: name it .csv, or write one JSON object per line, to .jsonl"
OTHER_BYTES = {
    "UTF-16": LINES.encode("utf-16"),
    "UTF-16 without a mark": LINES.encode("utf-16-le"),
    "Latin-1": "né\n".encode("latin-1") * 3,
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
    path = tmp_path / name
    path.write_bytes(MISNAMED[name].encode())
    with pytest.raises(ValueError, match=f"{path}: {SAID}"):
        list(read_rows(path))


@pytest.mark.parametrize("kind", OTHER_BYTES)
@pytest.mark.parametrize("name", ["rows.jsonl", "prompt.txt", "rows.jsonl.gz", "rows"])
def test_bytes_that_are_no_text_are_named(tmp_path, kind, name):
    path = tmp_path / name
    path.write_bytes(OTHER_BYTES[kind])
    with pytest.raises(ValueError, match=f"{path}: expected text in UTF-8, got other bytes"):
        list(read_rows(path))


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
    content = OTHER_BYTES.get(name) or MISNAMED[name].encode()
    said = "expected text in UTF-8, got other bytes" if name == "gzip" else SAID
    rows = tmp_path / name
    rows.write_bytes(content)
    (tmp_path / "calibration.json").write_text("{}")
    monkeypatch.setattr("lm_polygraph_asmi.decisions.calibration.Calibration.load", lambda *_: None)
    out, calibration = str(tmp_path / "out.jsonl"), str(tmp_path / "calibration.json")
    for arguments in (
        ["score", rows, "--model", "m", "--out", out],
        ["calibrate", rows, "--risk", 0.1, "--out", tmp_path / "new.json"],
        ["gate", calibration, rows],
    ):
        result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exit_code == 1
        assert said in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "calibration.json"])
