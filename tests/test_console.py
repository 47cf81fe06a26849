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
    """A model, and files of rows; the second of `bad` is longer than the model's window."""
    folder = tmp_path_factory.mktemp("console")
    tiny_lm.save(folder / "model")
    row = {"prompt": PROMPT, "answer": COFFEE, "id": "\u2615"}
    bad = {"prompt": "x" * 5000, "id": "\u2615"}
    (folder / "one.jsonl").write_text(json.dumps(row))
    for name, second in (("good", row | {"id": 2}), ("bad", bad)):
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(second)}\n")
    return folder


def command(name, *more):
    """Scoring of a file of rows."""
    return ["score", f"{name}.jsonl", "--model", "model", "--num-masks", "2", *more]


def run(folder, *arguments, encoding):
    """Exit status and output on a console with this encoding."""
    with contextlib.chdir(folder):
        result = CliRunner(charset=encoding).invoke(main, arguments)
    return result.exit_code, result.output


def unread(folder, *arguments):
    """Exit status of a process whose reader has gone."""
    code = "from lm_polygraph_asmi.commands import main; main()"
    read, write = os.pipe()
    os.close(read)
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    return found.returncode, found.stderr.decode()


def written(folder, name):
    return [json.loads(line) for line in (folder / name).read_text("utf-8").splitlines()]


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_what_a_console_lacks_is_replaced(folder, encoding):
    out, page = f"{encoding}.jsonl", f"{encoding}.html"
    given = command("bad", "--out", out, "--html", page)
    code, text = run(folder, *given, encoding=encoding)
    assert code == 1, text
    assert "row 2 (?): expected a prompt" in text
    assert "1931 ?" in run(folder, *command("one"), encoding=encoding)[1]
    lines = written(folder, out)
    assert [line["row"] for line in lines] == [1, 2]
    assert lines[0]["answer"] == COFFEE
    assert COFFEE.strip()[-1] in (folder / page).read_text("utf-8")


def test_a_reader_that_has_gone_changes_no_file(folder):
    code, text = unread(folder, *command("good", "--out", "unread.jsonl"))
    assert (code, "Broken pipe" in text) == (1, False)
    assert len(written(folder, "unread.jsonl")) == 2
    assert not [*folder.glob("unread.jsonl.*")]
