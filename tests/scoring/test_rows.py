"""Many answers from a file, and the command."""

import itertools
import json
import re
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from lm_polygraph_asmi import Scorer, score, score_file
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.files import locked, parse_json
from lm_polygraph_asmi.scoring import Score, UnmaskedAnswer, tables
from lm_polygraph_asmi.scoring.rows import Row, read_rows
from lm_polygraph_asmi.scoring.unmasked import fingerprints
from tests import tiny_lm
from tests.scoring.conftest import PROMPT
from tests.scoring.test_text import CHAT

pytestmark = pytest.mark.usefixtures("unseen")

SUFFIXES = (".jsonl", ".csv", ".parquet")
ROWS = [
    {"prompt": PROMPT, "answer": " Brask", "id": "007", "gold": "Brask"},
    {"prompt": 'Where do the "blue kites" start,\nand when?', "gold": "NA", "id": "2"},
    {"prompt": "True or False?", "answer": [7, 8], "gold": "true", "id": "3"},
]
TOO_LONG = {"prompt": PROMPT * 100, "id": "long"}


def write(path, lines):
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def contents(path):
    return [row.content for row in read_rows(path)]


@pytest.fixture
def scorer(model, tokenizer):
    return Scorer(model, tokenizer=tokenizer, max_new_tokens=3)


@pytest.fixture
def calls(monkeypatch):
    """Prompts in the order they were scored."""
    seen, plain = [], Scorer.score

    def counted(self, prompt, *rest):
        seen.append(prompt)
        return plain(self, prompt, *rest)

    monkeypatch.setattr(Scorer, "score", counted)
    return seen


def test_rows_of_a_file(tmp_path):
    lines = [ROWS[0], "", "  ", "{not json", '["a list"]', {"answer": "no prompt"}, ROWS[1]]
    found = list(read_rows(write(tmp_path / "in.jsonl", lines)))
    assert [row.number for row in found] == [1, 4, 5, 6, 7]  # as an editor counts
    assert (found[0].content, found[4].content) == (ROWS[0], ROWS[1])
    assert "not JSON" in found[1].error
    expected = 'expected an object with a "prompt", got '
    assert found[2] == Row(5, {"line": '["a list"]'}, expected + "a list")
    assert found[3] == Row(6, {"answer": "no prompt"}, expected + "the fields answer")
    prompts = ["Who?", "a\u2028b", "c\x85d", "e\u2029"]  # line breaks to Python, not to JSON lines
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) for prompt in prompts]
    for end, mark in itertools.product(("\n", "\r\n"), ("", "\ufeff")):
        (tmp_path / "rows.ndjson").write_bytes((mark + end.join([*lines, "{", ""])).encode())
        *rows, last = read_rows(tmp_path / "rows.ndjson")
        assert [row.content["prompt"] for row in rows] == prompts
        assert (last.number, last.content) == (len(lines) + 1, {"line": "{"})


def test_a_prompt_as_text(tmp_path):
    for text in ("Passage\n\nWho?\n\n", "\ufeffPassage\r\n\r\nWho?\r\n\r\n"):
        (tmp_path / "prompt.txt").write_bytes(text.encode())
        assert list(read_rows(tmp_path / "prompt.txt")) == [Row(1, {"prompt": "Passage\n\nWho?\n"})]


def test_rows_of_tables(tmp_path):
    """Cells of CSV are texts, of Parquet values; missing ones are None."""
    chat = [{"role": "user", "content": 'Who,\r\n"so"?'}]
    given = [{"prompt": json.dumps(chat), "answer": "NA", "id": "007", "note": " x, y "},
             {"prompt": "a", "answer": None, "id": "1", "note": "[1]"}]  # fmt: skip
    expected = [given[0] | {"prompt": chat}, given[1]]
    pd.DataFrame(given).to_csv(tmp_path / "in.csv", index=False, encoding="utf-8-sig")
    assert contents(tmp_path / "in.csv") == expected
    frame = pd.DataFrame([{"prompt": chat, "answer": np.array([7, 8]), "x": 1.5}, {"prompt": "a"}])
    frame["prompt"] = [chat, [{"role": "user", "content": "a"}]]
    frame.to_parquet(tmp_path / "in.parquet")
    first, second = contents(tmp_path / "in.parquet")
    assert first == {"prompt": chat, "answer": [7, 8], "x": 1.5}
    assert (second["answer"], second["x"]) == (None, None)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_what_is_written(scorer, model, tokenizer, tmp_path, suffix):
    source, out, seen = write(tmp_path / "in.jsonl", ROWS), tmp_path / f"out{suffix}", []
    assert score_file(scorer, source, out, seen=lambda *found: seen.append(found)) == 0
    assert [outcome.error for _, outcome in seen] == [None] * 3
    rows = contents(out)
    for number, (row, given) in enumerate(zip(rows, ROWS, strict=True), start=1):
        alone = score(
            model, given["prompt"], given.get("answer"), tokenizer=tokenizer, max_new_tokens=3
        )
        assert row.items() >= given.items()
        assert (row["row"], row["correct"], row["score"]) == (number, None, float(alone))
        found = Score.from_dict(row)
        assert found.settings == alone.settings | fingerprints(scorer)
        assert found.tokens == alone.tokens
        assert UnmaskedAnswer.of_row(row).signals == alone.signals
    assert (rows[0]["scored_text"], rows[2]["answer"]) == (" Brask</s>", [7, 8])
    assert rows[1]["scored_text"].startswith(rows[1]["answer"])
    assert [path.name for path in tmp_path.iterdir() if path.name[:3] == "out"] == [out.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_killed_run_resumes(scorer, calls, tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(tables, "BATCH", 2)
    given = [{"prompt": f"{PROMPT} {i % 4}", "answer": " Brask", "id": str(i)} for i in range(7)]
    given[2] = {"prompt": None, "id": "2"}
    source, out = write(tmp_path / "in.jsonl", given), tmp_path / f"killed{suffix}"

    def interrupt(row, _):
        if row.number == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_file(scorer, source, out, seen=interrupt)
    assert [row["row"] for row in contents(out)] == [1, 2, 3, 4]
    if suffix != ".parquet":
        text = out.read_text().replace('"correct": null', '"correct": true')
        out.write_text(text + text.splitlines()[-1][:9] * (suffix == ".jsonl"))  # cut by the kill
    calls.clear()
    assert score_file(scorer, source, out) == 1
    assert len(calls) == 3  # of 5 to 7: the row without a prompt fails before
    rows = contents(out)
    assert [row["row"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert rows[0]["correct"] is (True if suffix == ".jsonl" else None)  # labels are kept
    assert "expected a text" in rows[2]["error"]
    given[2] = {"prompt": PROMPT, "id": "2"}
    write(source, given)
    calls.clear()
    assert score_file(scorer, source, out) == 0  # a row that failed is tried again
    assert calls == [PROMPT]
    if suffix == ".csv":  # columns of others stay, and the order does not matter
        frame = pd.read_csv(out, dtype=str, keep_default_na=False)[::-1]
        frame.assign(mine="x").to_csv(out, index=False)
        assert score_file(scorer, write(source, [*given, given[0]]), out) == 0
        assert {row["mine"] for row in contents(out)[:7]} == {"x"}
        assert contents(out).pop()["scored_text"] == rows[0]["scored_text"]
        write(source, given)
    score_file(scorer, source, tmp_path / f"whole{suffix}")
    for row, other in zip(contents(out)[:7], contents(tmp_path / f"whole{suffix}"), strict=True):
        for name in other.keys() - {"seconds", "correct"}:
            assert row[name] == other[name], name


def test_a_table_that_was_labelled_elsewhere(scorer, tmp_path):
    """Other programs write true in their own way, and a mark at the start."""
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.csv"
    score_file(scorer, source, out)
    frame = pd.read_csv(out, dtype=str, keep_default_na=False)
    frame["correct"] = ["TRUE", "False", "1"]
    frame["answered"] = frame["answered"].str.upper()
    frame["score"] = [f"{float(value):.14g}" for value in frame["score"]]
    frame.to_csv(out, index=False, encoding="utf-8-sig", lineterminator="\r\n")
    rows = contents(out)
    assert [row["correct"] for row in rows] == [True, False, 1]
    assert all(UnmaskedAnswer.of_row(row) for row in rows)
    rows[0]["signals"]["msp"] += 0.001
    assert UnmaskedAnswer.of_row(rows[0]) is None


def test_what_a_file_does_not_go_on_with(scorer, model, tokenizer, tmp_path):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    score_file(scorer, source, out)
    before = out.read_bytes()
    other = Scorer(model, tokenizer=tokenizer, max_new_tokens=3, depth=0.9, stop="?")
    with pytest.raises(ValueError, match=r"other settings \(depth 0.6 there, 0.9 here; stop"):
        score_file(other, source, out)
    for changed in ({"prompt": "Who?"}, {"answer": " 1931"}):
        write(source, [ROWS[0] | changed, *ROWS[1:]])
        with pytest.raises(ValueError, match="row 1 has another prompt or answer than in"):
            score_file(scorer, source, out)
    write(source, ROWS)
    with (
        locked(out),
        pytest.raises(ValueError, match=r"out\.jsonl is being written by another program"),
    ):
        score_file(scorer, source, out)
    clashing = write(tmp_path / "c.jsonl", [ROWS[0] | {"score": 77, "tokens": "mine"}])
    with pytest.raises(ValueError, match=r"expected no fields \['score', 'tokens'\]"):
        score_file(scorer, clashing, tmp_path / "new.csv")
    assert out.read_bytes() == before
    assert not (tmp_path / "new.csv").exists()


def test_json_that_readers_understand_differently(scorer, tmp_path):
    """NaN would be written as it came; of a field that occurs twice, the last would win."""
    lines = [
        '{"prompt": "Who built it?", "answer": " Brask", "x": NaN}',
        '{"prompt": "Who?", "answer": " a", "correct": true, "correct": false}',
        '{"prompt": "Who?", "answer": " a", "x": -0.0, "y": 123456789012345678901234567890}',
        '{"prompt": ' + "[" * 10**5,
        '{"prompt": ' + "1" * 5000 + "}",
    ]
    score_file(scorer, write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    text = (tmp_path / "out.jsonl").read_text()
    first, second, third, *unreadable = map(parse_json, text.splitlines())
    assert "the field 'x': expected a finite number" in first["error"]
    assert "the field 'correct' occurs twice" in second["error"]
    assert ("error" in third, third["y"]) == (False, 123456789012345678901234567890)
    assert '"x": -0.0' in text
    assert all("not JSON" in line["error"] for line in unreadable)
    table = pd.DataFrame({"prompt": ["Who?", None], "answer": [" a", None], "x": [np.nan, 1.0]})
    table.to_parquet(tmp_path / "in.parquet")
    for suffix in SUFFIXES:
        score_file(scorer, tmp_path / "in.parquet", tmp_path / f"nan{suffix}")
        assert "NaN" not in str(contents(tmp_path / f"nan{suffix}"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def command(folder):
    def run(*arguments, model=folder):
        words = ["score", "--model", str(model), "--max-new-tokens", "3", *map(str, arguments)]
        return CliRunner().invoke(main, words, env={"COLUMNS": "200"})

    return run


def test_command_on_many_rows(command, calls, model, tokenizer, tmp_path, monkeypatch):
    source = write(tmp_path / "in.jsonl", [ROWS[0], *ROWS[1:], TOO_LONG])
    out, page = tmp_path / "out.csv", tmp_path / "page.html"
    arguments = [source, "--out", out, "--html", page, "--depth", "0.9"]
    done = command(*arguments)
    assert done.exit_code == 1, done.output
    assert "row 4 (long): expected a prompt shorter than" in done.stderr
    said = r"3 scored, 1 failed, 1 with warnings, [\d.e+-]+ rows per second\.\nResults: "
    assert re.search(said, done.stdout)
    expected = score(model, PROMPT, " Brask", tokenizer=tokenizer, depth=0.9)
    assert contents(out)[0]["score"] == pytest.approx(float(expected), rel=1e-5)
    assert page.read_text(encoding="utf-8").count('<section class="asmi" id=') == 3
    calls.clear()
    write(source, [*ROWS, {"prompt": "Who?"}, {"prompt": "When?"}])
    monkeypatch.setattr(sys.modules["lm_polygraph_asmi.commands.score"], "MINUTE", 0)
    done = command(*arguments)
    assert (done.exit_code, calls) == (0, ["Who?", "When?"])
    assert "2 rows\n" in done.stderr
    assert command(*arguments[:3]).exit_code == 1  # of another depth
    assert "no row left to score" in command(*arguments[:3], "--depth", "0.9").stdout


def test_command_on_one_prompt(command, model, tokenizer, tmp_path):
    source = tmp_path / "prompt.txt"
    source.write_text(PROMPT + "\n")
    done = command(source, "--answer", " Brask", "--html", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    expected = score(model, PROMPT, " Brask", tokenizer=tokenizer)
    assert f"Sem-ASMI: {float(expected):.4f} nats" in done.stdout
    assert "Scores have no common scale" in done.stdout
    assert " Brask" in (tmp_path / "page.html").read_text(encoding="utf-8")
    plain = command(source, "--method", "asmi", "--scope", "response")
    expected = score(
        model, PROMPT, tokenizer=tokenizer, method="asmi", scope="response", max_new_tokens=3
    )
    assert f"\nASMI: {float(expected):.4f} nats" in "\n" + plain.stdout
    out = tmp_path / "out.jsonl"
    assert command(source, "--answer", " Brask", "--stop", "\\n", "--out", out).exit_code == 0
    assert contents(out)[0]["scored_text"] == " Brask\n"


def test_command_with_a_chat_template(command, tmp_path):
    source = tmp_path / "prompt.txt"
    source.write_text(PROMPT)
    refused = command(source, "--chat")
    assert refused.exit_code == 1
    assert "row 1: the prompt is a list of messages" in refused.stderr
    whitebox, tokenizer = tiny_lm.whitebox(), tiny_lm.tokenizer()
    whitebox.model.save_pretrained(tmp_path / "chat")
    try:
        tokenizer.chat_template = CHAT
        tokenizer.save_pretrained(tmp_path / "chat")
        messages = [{"role": "user", "content": PROMPT}]
        expected = score(whitebox.model, messages, " Brask", tokenizer=tokenizer)
    finally:
        tokenizer.chat_template = None
    out = tmp_path / "out.csv"
    for _ in range(2):
        done = command(source, "--chat", "--answer", " Brask", "--out", out,
                       model=tmp_path / "chat")  # fmt: skip
        assert done.exit_code == 0, done.output
        (row,) = contents(out)
        assert row["prompt"] == messages
        assert row["score"] == pytest.approx(float(expected), rel=1e-5)


def test_command_with_all_settings(command, folder, tmp_path):
    source, out = tmp_path / "prompt.txt", tmp_path / "out.jsonl"
    source.write_text(PROMPT)
    settings = {
        "method": "adapt", "depth": 0.9, "scope": "response", "num_masks": 9, "mask_rate": 0.3,
        "mask_sampler": "balanced", "top_k": 8, "seed": 3, "num_samples": 4, "tau": 0.1,
        "beta": 2.0, "closing_token": False,
    }  # fmt: skip
    words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    done = command(source, "--answer", " Brask", "--out", out, *words[:-1], "--no-closing-token")
    assert done.exit_code == 0, done.output
    scorer = Scorer(str(folder), max_new_tokens=3, **settings)
    expected = scorer.score(PROMPT, " Brask")
    (row,) = contents(out)
    assert row["score"] == pytest.approx(float(expected), rel=1e-6)
    assert row["settings"] == json.loads(json.dumps(expected.settings | fingerprints(scorer)))
    assert row["settings"].items() >= settings.items()


def test_command_says_what_is_wrong(command, calls, tmp_path, monkeypatch):
    """Before a model is loaded."""
    source, many = tmp_path / "prompt.txt", write(tmp_path / "in.jsonl", ROWS)
    source.write_text(PROMPT)
    precious, page = tmp_path / "notes.txt", tmp_path / "page.jsonl"
    precious.write_text("my notes")
    monkeypatch.setattr("lm_polygraph_asmi.scoring.scorer.load_named", pytest.fail)
    for arguments, message in (
        ([many, "--answer", "x"], "--answer needs a single prompt"),
        ([many], "name a file with --out or --html"),
        ([write(tmp_path / "none.jsonl", [])], "has no rows"),
        ([source, "--out", precious], "expected a .jsonl, .csv or .parquet file"),
        ([source, "--depth", "60"], "depth must lie in (0, 1)"),
        (
            [write(tmp_path / "odd.jsonl", [{"q": "Who?"}]), "--html", tmp_path / "p.html"],
            'row 1: expected an object with a "prompt", got the fields q',
        ),
        ([many, "--out", many], "it is the file of prompts"),
        ([source, "--out", tmp_path / "out.jsonl", "--html", page], "the name of an .html file"),
        ([source, "--html", tmp_path / "no" / "page.html"], "its folder does not exist"),
    ):
        done = command(*arguments)
        assert done.exit_code == 1
        assert message in done.stderr.replace("\n", " ")
        assert isinstance(done.exception, SystemExit)
    monkeypatch.undo()
    for arguments, name, message in (
        ([source, "--dtype", "float99"], None, "got 'float99'"),
        ([source, "--dtype", "nn"], None, "expected dtype auto or a torch dtype"),
        ([source], tmp_path / "no model", "cannot load the model"),
    ):
        done = command(*arguments, **({"model": name} if name else {}))
        assert (done.exit_code, message in done.stderr) == (1, True)
    assert calls == []
    assert precious.read_text() == "my notes"


def test_load(folder):
    assert Scorer(str(folder)).model.dtype == torch.float32
    scorer = Scorer(str(folder), dtype="bfloat16", method="asmi", seed=3)
    assert scorer.model.dtype == torch.bfloat16
    assert (scorer.config.method, scorer.config.seed) == ("asmi", 3)
    assert not scorer.model.training
    assert len(scorer.score(PROMPT, " Brask").tokens) > 1
