"""`polygraph_asmi score`, and what all commands share."""

import os
import re
import signal
import sys

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi import __version__, score
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.commands.decide import decide
from lm_polygraph_asmi.files import parse_json
from lm_polygraph_asmi.host import loading
from lm_polygraph_asmi.scoring import Scorer
from lm_polygraph_asmi.scoring.sheet import key_of
from lm_polygraph_asmi.tables import read_table
from tests.forks import exit_code
from tests.scoring.conftest import MESSAGES, PROMPT
from tests.scoring.test_output import ROWS, calls, write  # noqa: F401 - a fixture
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


def test_many_rows(command, calls, model, tokenizer, tmp_path, monkeypatch):  # noqa: F811
    source = write(tmp_path / "in.jsonl", [*ROWS, {"prompt": PROMPT * 400, "id": "long"}])
    source.write_text(source.read_text() + "{\n")
    out, page, sheet = (tmp_path / name for name in ("out.parquet", "page.html", "labels.csv"))
    arguments = [source, "--out", out, "--html", page, "--depth", "0.9"]
    done = command(*arguments)
    assert done.exit_code == 1, done.output
    assert all(text in done.stderr for text in ("row 4 (long): expected a prompt", "row 5: not"))
    said = r"3 scored, 2 failed, 1 with warnings, [\d.e+-]+ rows per second\.\nResults: "
    assert re.search(said, done.stdout)
    expected = score(model, PROMPT, " Brask", tokenizer=tokenizer, depth=0.9)
    assert contents(out)[0]["score"] == pytest.approx(float(expected), rel=1e-5)
    assert page.read_text(encoding="utf-8").count('<section class="asmi" id=') == 3
    calls.clear()
    write(source, [*ROWS, {"prompt": "Who?"}, {"prompt": "When?"}])
    monkeypatch.setattr(sys.modules["lm_polygraph_asmi.commands.score"], "MINUTE", 0)
    done = command(*arguments, "--sheet", sheet)
    assert (done.exit_code, calls) == (0, ["Who?", "When?"])
    assert f"Sheet: {sheet}, rows: {len(contents(out))}\n" in done.stdout
    assert [row.content["key"] for row in read_table(sheet)] == list(map(key_of, contents(out)))
    assert "2 rows\n" in done.stderr
    assert "no row left to score" in command(*arguments).stdout


def test_one_prompt(command, prompt, model, tokenizer, tmp_path):
    done = command(prompt, "--answer", " Brask", "--html", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    expected = score(model, PROMPT, " Brask", tokenizer=tokenizer)
    assert f"Sem-ASMI: {float(expected):.4f} nats" in done.stdout
    assert "Scores have no common scale" in done.stdout
    assert " Brask" in (tmp_path / "page.html").read_text(encoding="utf-8")
    expected = score(model, PROMPT, tokenizer=tokenizer, method="asmi", max_new_tokens=3)
    assert f"ASMI: {float(expected):.4f} nats" in command(prompt, "--method", "asmi").stdout
    out = tmp_path / "out.jsonl"
    assert command(prompt, "--answer", " Brask", "--stop", "\\n", "--out", out).exit_code == 0
    assert contents(out)[0]["scored_text"] == " Brask\n"


def test_a_chat_template(command, prompt, model, chat, tmp_path):
    refused = command(prompt, "--chat")
    assert (refused.exit_code, "no chat template" in refused.stderr) == (1, True)
    for part in (model, chat):
        part.save_pretrained(tmp_path / "chat")
    words = (prompt, "--chat", "--answer", " Brask", "--out", tmp_path / "out.jsonl")
    expected = score(model, MESSAGES, " Brask", tokenizer=chat)
    for _ in range(2):  # and goes on with what it has written
        done = command(*words, model=tmp_path / "chat")
        assert done.exit_code == 0, done.output
        (row,) = contents(tmp_path / "out.jsonl")
        assert (row["prompt"], row["score"]) == (MESSAGES, pytest.approx(float(expected), rel=1e-5))


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
        ("in.jsonl --out o.jsonl --stop $\n", "stop '$'"),
        ("odd.jsonl --html p.html", "odd.jsonl, row 1"),
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
    write(tmp_path / "none.jsonl", [])
    write(tmp_path / "odd.jsonl", [{"q": "Who?"}])
    (tmp_path / "notes.txt").write_text("my notes")
    (tmp_path / "old.csv").write_text(SHEET)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load_model", None)
    done = command(*arguments.split())
    assert done.exit_code == 1
    assert message in done.stderr.replace("\n", " ")
    assert isinstance(done.exception, SystemExit)
    assert (tmp_path / "notes.txt").read_text() == "my notes"
    assert (tmp_path / "old.csv").read_text() == SHEET
    assert not {path.suffix for path in tmp_path.iterdir()} & {".html", ".lock", ".partial"}
    assert contents(tmp_path / "in.jsonl") == ROWS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_and_loses_no_row(command, calls, tmp_path, monkeypatch, suffix, sent):  # noqa: F811
    """In a process of its own, amid the third row: rows before stay, the file is named."""
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / f"out{suffix}"
    told, plain = tmp_path / "told.txt", Scorer.score

    def stopped(self, prompt, **rest):
        if prompt == ROWS[2]["prompt"]:
            os.kill(os.getpid(), sent)
        return plain(self, prompt, **rest)

    def run():
        monkeypatch.setattr(Scorer, "score", stopped)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        done = command(source, "--out", out)
        told.write_text(done.stderr)
        os._exit(done.exit_code)

    assert exit_code(run) == 128 + sent
    grown = out if suffix == ".jsonl" else tmp_path / "out.parquet.partial"
    assert re.search(rf"2 rows .*{grown}: run the same command again", told.read_text())
    assert "Traceback" not in told.read_text()
    rows = list(map(parse_json, grown.read_text().splitlines()))
    assert [row["row"] for row in rows] == [1, 2]
    done = command(source, "--out", out)
    assert (done.exit_code, calls) == (0, [ROWS[2]["prompt"]])
    assert contents(out)[:2] == rows
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", out.name, "told.txt"}


def test_the_model_is_an_option_of_score_alone():
    """`decide` has options of its name, with other defaults."""
    assert not next(p for p in decide.params if p.name == "model").required
    done = CliRunner().invoke(main, ["score", __file__])
    assert (done.exit_code, "Missing option '--model'" in done.stderr) == (2, True)


def test_the_version_and_words_that_are_completed_as_the_help_says():
    assert CliRunner().invoke(main, ["--version"]).stdout.split()[-1] == __version__
    (variable,) = re.findall(r"(_\w+_COMPLETE)=bash", CliRunner().invoke(main, ["-h"]).stdout)
    typed = {"COMP_WORDS": "polygraph_asmi sco", "COMP_CWORD": "1", variable: "bash_complete"}
    shown = CliRunner().invoke(main, prog_name="polygraph_asmi", env=typed)
    assert shown.stdout == "plain,score\n"
