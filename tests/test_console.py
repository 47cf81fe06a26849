"""Commands on consoles that cannot print all, or whose reader has gone."""

import gc
import json
import os
import re
import sys

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.host.configs import configs_path
from tests import tiny_lm
from tests.forks import exit_code
from tests.scoring.conftest import PROMPT

COFFEE = " 1931 \u2615"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and files of rows; the second of `bad` is longer than the model's window."""
    folder = tmp_path_factory.mktemp("console")
    tiny_lm.save(folder / "model")
    row = {"prompt": PROMPT, "answer": COFFEE, "id": "\u2615"}
    bad = {"prompt": "x" * 5000, "id": "\u2615", "answer": "x"}
    for name, rows in (("one", [row]), ("good", [row, row | {"id": 2}]), ("bad", [row, bad])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture(autouse=True)
def inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def command(name, *more):
    """Scoring of a file of rows."""
    return ["score", f"{name}.jsonl", "--model", "model", "--num-masks", "2", *more]


def run(*arguments):
    """Exit status and output on a console that has ASCII alone."""
    result = CliRunner(charset="ascii").invoke(main, arguments)
    return result.exit_code, result.output


def unread(arguments):
    """In a fork: the command's output has no reader, its errors go to a file."""
    gc.freeze()
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    with open(1, "w") as sys.stdout, open("errors", "w") as sys.stderr:
        main(arguments)


def written(folder, name):
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


def test_what_a_console_lacks_is_replaced(folder):
    code, text = run(*command("bad", "--out", "out.jsonl", "--html", "page.html"))
    assert (code, "row 2 (?): prompt and response are" in text) == (1, True), text
    assert "1931 ?" in run(*command("one"))[1]
    assert [(line["row"], line.get("answer")) for line in written(folder, "out.jsonl")] == [
        (1, COFFEE), (2, "x")
    ]  # fmt: skip
    assert COFFEE.strip()[-1] in (folder / "page.html").read_text("utf-8")


def test_a_reader_that_has_gone_changes_no_file(folder):
    assert exit_code(unread, command("good", "--out", "unread.jsonl")) == 1
    assert "Broken pipe" not in (folder / "errors").read_text()
    assert len(written(folder, "unread.jsonl")) == 2
    assert not [*folder.glob("unread.jsonl.*")]


def test_what_is_shipped_is_listed_with_a_whole_sentence_each():
    listed, short = (
        CliRunner(env={"COLUMNS": "80"} | colour).invoke(main, ["configs"], color=bool(colour))
        for colour in ({}, {"FORCE_COLOR": "1"})
    )
    lines = [line.strip() for line in listed.stdout.splitlines()[1:] if line.strip()]
    shipped = [
        path
        for group in ("benchmark", "model", "estimators", "add", ".")
        for path in (configs_path() / group).glob("*.yaml")
    ]
    assert len(lines) == len(shipped) - 1  # asmi_base
    assert re.search("--config-name asmi_demo  .*SmolLM2-135M-Instruct .* CPU", listed.stdout)
    assert len(short.stdout.splitlines()) == len(listed.stdout.splitlines())  # a line each
    for line in lines:
        assert line.split("  ")[0] in short.stdout
        assert re.fullmatch(r"(--config-name |\+?[a-z]+=)asmi\w*  +[A-Za-z].*[.?]", line), line
