"""What is checked of an output before anything is computed for it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.validation import check_writable


def test_outputs_that_can_be_written(tmp_path):
    (tmp_path / "old").write_text("kept")
    for name, folder in (("old", False), ("new.json", False), ("a/b", True), ("", True)):
        check_writable(tmp_path / name, folder)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["kept"]  # nothing is left behind


@pytest.mark.parametrize(
    ("out", "folder", "word"),
    [
        ("missing/x.json", False, r"does not exist \(.*missing\)"),
        ("file/x.json", False, "its folder is a file"),
        ("file", True, "its folder is a file"),
        ("sub", False, "a folder"),
        ("n" * 300, False, "too long"),
        ("/proc/x.json", False, "/proc/x.json: "),  # not even the root user can
        ("/proc/deep/folder", True, "/proc/deep/folder: "),
    ],
)
def test_outputs_that_cannot_be_written(tmp_path, out, folder, word):
    (tmp_path / "file").touch()
    (tmp_path / "sub").mkdir()
    with pytest.raises(ValueError, match=word):
        check_writable(tmp_path / out, folder)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that no user can write")
@pytest.mark.parametrize(
    "command",
    [
        "score {rows} --model nowhere --out /proc/o.jsonl",
        "score {rows} --model nowhere --html /proc/o.html",
        "calibrate {rows} --risk .1 --out /proc/c.json",
        "merge {rows} --out /proc/merged",
        "report {rows} --out /proc/report",
        "heads probe {run} --model x --out /proc/p.json",
    ],
)
def test_every_command_checks_its_output_first(tmp_path, command):
    """The models and runs do not exist: whatever is read first would be named instead."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Who?", "answer": " a", "correct": true}\n' * 2)
    (tmp_path / "ue_manager_seed1").touch()
    done = CliRunner().invoke(main, command.format(rows=rows, run=tmp_path).split())
    assert done.exit_code != 0
    assert "cannot write /proc/" in done.output, done.output
