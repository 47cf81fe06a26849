"""`polygraph_asmi score`, and what all commands share."""

import os
import re
import signal
import sys

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi import __version__, score
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.files import parse_json
from lm_polygraph_asmi.host import loading
from lm_polygraph_asmi.scoring import Scorer
from lm_polygraph_asmi.scoring.sheet import key_of
from lm_polygraph_asmi.tables import read_table
from tests.scoring.conftest import MESSAGES, PROMPT
from tests.scoring.test_output import ROWS, calls, lines_of, write  # noqa: F401 - a fixture
from tests.scoring.test_rows import SHEET, contents

pytestmark = pytest.mark.usefixtures("unseen")


@pytest.fixture
def command(tiny):
    def run(*arguments, model=tiny):
        words = ["score", "--model", str(model), "--max-new-tokens", "3", *map(str, arguments)]
        return CliRunner().invoke(main, words, env={"COLUMNS": "200"})

    return run


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT + "\n")
    return path


LONG = {"prompt": PROMPT * 400, "id": "long", "answer": " Brask"}
GIVEN = [{"answer": "Brask"} | row for row in ROWS]


def test_many_rows(command, calls, model, tokenizer, tmp_path, monkeypatch):  # noqa: F811
    source = write(tmp_path / "in.jsonl", [*GIVEN, LONG])
    source.write_text(source.read_text() + "{\n")
    out, page, sheet = (tmp_path / name for name in ("out.parquet", "page.html", "labels.csv"))
    arguments = [source, "--out", out, "--html", page, "--depth", "0.9"]
    done = command(*arguments)
    assert (done.exit_code, "3 scored, 2 failed, 1 with warnings, " in done.stdout) == (1, True)
    assert f"Results: {out}\n" in done.stdout
    told = "First warning, row 2 (2): ", "row 4 (long): prompt and response", "row 5: not"
    assert [text for text in told if text not in done.stderr] == []
    expected = score(model, PROMPT, " Brask", tokenizer=tokenizer, depth=0.9)
    assert contents(out)[0]["score"] == pytest.approx(float(expected), rel=1e-5)
    assert page.read_text(encoding="utf-8").count('<section class="asmi" id=') == 3
    calls.clear()
    write(source, [*GIVEN, *({"prompt": text, "answer": " x"} for text in ("Who?", "When?"))])
    monkeypatch.setattr(sys.modules["lm_polygraph_asmi.commands.score"], "MINUTE", 0)
    done = command(*arguments, "--sheet", sheet, "--surest-first", "msp")
    assert (done.exit_code, calls, "2 rows\n" in done.stderr) == (0, ["Who?", "When?"], True)
    assert f"Sheet: {sheet}, rows: 5\n" in done.stdout
    surest_first = sorted(contents(out), key=lambda row: row["signals"]["msp"])
    keys = [key_of(row, "msp") for row in surest_first]
    assert [row.content["key"] for row in read_table(sheet)] == keys
    assert "no row left to score" in command(*arguments).stdout


@pytest.mark.parametrize("answers", [[None, None], [" Brask", None], [None, " Brask"]])
def test_a_row_that_lost_its_answer_fails(command, tmp_path, answers):
    """The model answers all or none: its answer would be taken for the lost one."""
    rows = [{"prompt": f"{PROMPT} {n}", "answer": text} for n, text in enumerate(answers)]
    done = command(write(tmp_path / "in.jsonl", rows), "--out", out := tmp_path / "out.jsonl")
    lost = [answers.index(None) + 1] * any(answers)
    assert ([row["row"] for row in contents(out) if row.get("error")], done.exit_code) == (
        lost,
        len(lost),
    )
    told = re.findall(r"row \d: expected an answer, as in other|No row has an answer", done.stderr)
    assert told == (
        [f"row {n}: expected an answer, as in other" for n in lost] or ["No row has an answer"]
    )


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        (["--answer", " Brask"], {"answer": " Brask"}),
        (["--method", "asmi"], {"method": "asmi"}),
        (["--answer", " Brask", "--stop", "\\n"], {"answer": " Brask", "stop": "\n"}),
    ],
)
def test_one_prompt(command, prompt, model, tokenizer, tmp_path, options, settings):
    out, page = tmp_path / "out.jsonl", tmp_path / "page.html"
    expected = score(model, PROMPT, tokenizer=tokenizer, max_new_tokens=3, **settings)
    done = command(prompt, *options, "--html", page, "--out", out)
    assert f"ASMI: {float(expected):.4f} nats" in done.stdout
    assert (done.exit_code, contents(out)[0]["scored_text"]) == (0, expected.scored_text)
    assert "Brask" in page.read_text(encoding="utf-8") or "answer" not in settings


def test_a_chat_template(command, prompt, model, chat, tmp_path):
    refused = command(prompt, "--chat")
    assert (refused.exit_code, "no chat template" in refused.stderr) == (1, True)
    for part in (model, chat):
        part.save_pretrained(tmp_path / "chat")
    words = (prompt, "--chat", "--answer", " Brask", "--out", tmp_path / "out.jsonl")
    expected = pytest.approx(float(score(model, MESSAGES, " Brask", tokenizer=chat)), rel=1e-5)
    for _ in range(2):  # and goes on with what it has written
        assert command(*words, model=tmp_path / "chat").exit_code == 0
        rows = [(row["prompt"], row["score"]) for row in contents(tmp_path / "out.jsonl")]
        assert rows == [(MESSAGES, expected)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("in.jsonl --answer x", "--answer needs a single prompt"),
        ("in.jsonl", "name a file with --out or --html"),
        ("none.jsonl", "has no rows"),
        *((f"prompt.txt --out {name}", "--sheet") for name in ("notes.txt", "o.csv", "o.json")),
        ("prompt.txt --sheet labels.csv", "--out"),
        ("prompt.txt --out o.jsonl --sheet labels.xlsx", ".csv"),
        ("prompt.txt --out o.jsonl --sheet notes.txt", ".csv"),
        ("prompt.txt --out o.jsonl --sheet old.csv", "old.csv exists: it may have labels"),
        ("old.csv --out o.jsonl", "old.csv is a sheet of labels"),
        *(
            (f"in.jsonl --out o.jsonl --stop {stop}", "stop")
            for stop in ("$", "\\t", "'\\n'", "$\\n")
        ),
        ("odd.jsonl --html p.html", "odd.jsonl, row 1"),
        ("chat.csv --html p.html", "list of messages"),
        ("in.jsonl --out in.jsonl", "it is the file of prompts"),
        ("in.jsonl --out link.jsonl", "it is the file of prompts"),
        ("prompt.txt --html page.jsonl", "a file name that ends in .html"),
        ("prompt.txt --html no/page.html", "its folder does not exist"),
    ],
)
@pytest.mark.usefixtures("prompt")
def test_what_is_wrong_is_said(command, tmp_path, monkeypatch, arguments, message):
    """Before a model is loaded, and nothing is overwritten."""
    write(tmp_path / "in.jsonl", ROWS)
    texts = {"none.jsonl": "", "odd.jsonl": '{"q": "Who?"}\n', "notes.txt": "my notes"}
    for name, text in (texts | {"old.csv": SHEET, "chat.csv": f'prompt\n"{MESSAGES}"\n'}).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    before = {path.name: path.read_text() for path in tmp_path.iterdir()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load_model", None)
    done = command(*arguments.split())
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert message in done.stderr.replace("\n", " ")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    ("sent", "suffix"), [(signal.SIGINT, ".parquet"), (signal.SIGTERM, ".jsonl")]
)
def test_a_signal_stops_and_loses_no_row(command, tmp_path, monkeypatch, suffix, sent):
    """Amid the third row: rows before stay, and the file is named."""
    source, out, plain = (
        write(tmp_path / "in.jsonl", GIVEN),
        tmp_path / f"out{suffix}",
        Scorer.score,
    )

    def stopped(self, prompt, **rest):
        if prompt == ROWS[2]["prompt"]:
            os.kill(os.getpid(), sent)
        return plain(self, prompt, **rest)

    monkeypatch.setattr(Scorer, "score", stopped)
    of_pytest = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background
    done = command(source, "--out", out)
    signal.signal(signal.SIGINT, of_pytest)
    grown = lines_of(out)  # which the same call goes on with, as after any stop
    assert (done.exit_code, "Traceback" in done.stderr) == (128 + sent, False)
    assert re.search(rf"2 rows .*{grown}: run the same command again", done.stderr)
    assert [parse_json(line)["row"] for line in grown.read_text().splitlines()] == [1, 2]
    assert {*tmp_path.iterdir()} == {source, grown}  # it holds no lock


def test_the_model_is_missing():
    done = CliRunner().invoke(main, ["score", __file__])
    assert (done.exit_code, "--model" in done.stderr) == (2, True)


def test_the_version_and_words_that_are_completed_as_the_help_says():
    assert CliRunner().invoke(main, ["--version"]).stdout.split()[-1] == __version__
    (variable,) = re.findall(r"(_\w+_COMPLETE)=bash", CliRunner().invoke(main, ["-h"]).stdout)
    typed = {"COMP_WORDS": "polygraph_asmi sco", "COMP_CWORD": "1", variable: "bash_complete"}
    assert CliRunner().invoke(main, prog_name="polygraph_asmi", env=typed).stdout == "plain,score\n"
