"""Commands on consoles that cannot print all, or whose reader has gone."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from tests import tiny_lm
from tests.scoring.conftest import PROMPT

COFFEE = " 1931 \u2615"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("console")
    tiny_lm.save(folder / "model")
    row = {"prompt": PROMPT, "answer": COFFEE, "id": "\u2615"}
    (folder / "one.jsonl").write_text(json.dumps(row) + "\n")
    bad = {"prompt": "x" * 5000, "id": "\u2615"}
    (folder / "two.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"id": 2}) + "\n")
    (folder / "bad.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(bad) + "\n")
    return folder


def run(folder, *arguments, encoding="utf-8"):
    """Exit status and output on a console with this encoding."""
    with contextlib.chdir(folder):
        result = CliRunner(charset=encoding).invoke(main, list(map(str, arguments)))
    return result.exit_code, result.output


def unread(folder, *arguments):
    """Exit status of a process whose reader has gone."""
    code = "from lm_polygraph_asmi.commands import main; main()"
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-c", code, *map(str, arguments)]
    found = subprocess.run(command, cwd=folder, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    return found.returncode, found.stderr.decode()


def written(folder, name):
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "cp437"])
def test_what_a_console_lacks_is_replaced(folder, encoding):
    out, page = f"{encoding}.jsonl", f"{encoding}.html"
    given = ("score", "one.jsonl", "--model", "model", "--num-masks", 2)
    code, text = run(folder, *given, "--out", out, "--html", page, encoding=encoding)
    assert code == 0, text
    assert "1931 ?" in text
    (line,) = written(folder, out)
    assert line["answer"] == COFFEE
    assert COFFEE.strip()[-1] in (folder / page).read_text("utf-8")


def test_errors_are_replaced_too(folder):
    given = ("score", "bad.jsonl", "--model", "model", "--num-masks", 2, "--out", "bad.out.jsonl")
    code, text = run(folder, *given, encoding="ascii")
    assert code == 1, text
    assert "row 2 (?): expected a prompt" in text
    assert [line["row"] for line in written(folder, "bad.out.jsonl")] == [1, 2]


def test_a_reader_that_has_gone_changes_no_file(folder):
    given = ("score", "two.jsonl", "--model", "model", "--num-masks", 2, "--out", "unread.jsonl")
    code, text = unread(folder, *given)
    assert (code, "Broken pipe" in text) == (1, False)
    assert len(written(folder, "unread.jsonl")) == 2
    assert not [*folder.glob("unread.jsonl.*")]
