"""Strict JSON, in and out, and one writer for each file."""

import json
import math
import os
import signal
from functools import reduce
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from filelock import FileLock

from lm_polygraph_asmi.files import parse_json, partial_of, to_json, write_whole, writing
from tests.forks import exit_code


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"x": NaN}', "the field 'x': expected a finite number, got nan"),
        ('{"x": [{"y": -Infinity}]}', r"the field 'x\[0\]\.y': expected a finite number, got -inf"),
        ('{"x": 1e999}', "the field 'x': expected a finite number, got inf"),
        ("NaN", "^expected a finite number"),
        ('{"correct": true, "correct": false}', "the field 'correct' occurs twice in one object"),
        (r'{"x": "Who \ud800?"}', "the field 'x': expected text, got .* at character 5, half of a"),
        (r'{"\udfff": 1}', "expected text, got .* half of a surrogate pair"),
        ('{"x": 1} {"y": 2}', "not JSON: Extra data"),
        ('\ufeff{"x": 1}', "not JSON: .*BOM"),
        ('{"x": ' + "1" * 5000 + "}", "not JSON: a number of thousands of digits"),
        ("[" * 10**5, "not JSON: nested too deeply"),
        ("[" * 202 + "]" * 202, "at most 200 nested lists and objects"),
        (b'{"x": "\xff"}', "not JSON: .*codec can't decode"),
        ("", "not JSON"),
    ],
)
def test_what_readers_understand_differently(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_strict_texts_come_back():
    for text in (
        '{"x": -0.0, "y": 12345678901234567890123, "z": 1e-400, "n": null, "t": [true, false]}',
        r'{"x": "\ud83d\ude00", "y": "\u2028", "z": "NaN", "\u00e9": ""}',
        '[{"a": 1}, {"a": 2}]',
    ):
        value = parse_json(text)
        assert value == json.loads(text)
        assert parse_json(to_json(value)) == value
    assert "-0.0" in to_json({"x": -0.0})


def test_what_has_no_json_is_not_written():
    for value in (math.nan, np.float64("inf"), np.float32("nan"), np.array([1, math.nan])):
        with pytest.raises(ValueError, match="expected a finite number"):
            to_json({"x": [value]}, str)
    with pytest.raises(ValueError, match="the field 'x': expected text"):
        to_json({"x": "\ud800"})
    with pytest.raises(ValueError, match="at most 200 nested lists and objects"):
        to_json(reduce(lambda inner, _: [inner], range(2000), 0))
    with pytest.raises(TypeError, match="a value that JSON has, got a"):
        to_json({"x": Path()})
    assert to_json({"x": Path("a")}, str) == '{"x": "a"}'
    numbers = {"a": np.float32(0.5), "b": np.int64(2), "c": np.bool_(True), "d": np.arange(2)}
    assert parse_json(to_json(numbers)) == {"a": 0.5, "b": 2, "c": True, "d": [0, 1]}


def test_a_file_is_written_whole(tmp_path):
    out = tmp_path / "out.json"
    with writing(out) as partial:
        partial.write_text("new")
        assert not out.exists()
        with pytest.raises(ValueError, match=r"out\.json is being written by another"):
            write_whole(out, "other")
    assert (out.read_text(), os.listdir(tmp_path)) == ("new", ["out.json"])
    with pytest.raises(ValueError, match="exists"), writing(out):
        pass
    write_whole(out, "newer")
    assert (out.read_text(), os.listdir(tmp_path)) == ("newer", ["out.json"])


def test_what_was_computed_stays(tmp_path):
    out = tmp_path / "out.json"

    def compute(text, then):
        with writing(out) as partial:
            partial.write_text(text)
            then()

    with pytest.raises(OSError, match="disk full"):
        compute("half", Mock(side_effect=OSError("disk full")))
    assert (out.exists(), partial_of(out).read_text()) == (False, "half")
    with pytest.raises(ValueError, match=r"exists: the result is in .*partial"):
        compute("computed", lambda: out.write_text("meanwhile"))
    assert (out.read_text(), partial_of(out).read_text()) == ("meanwhile", "computed")


def killed_while_writing(out):
    with writing(out) as partial:
        partial.write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_lock_dies_with_its_process(tmp_path):
    out = tmp_path / "out.jsonl"
    assert exit_code(killed_while_writing, out) == -signal.SIGKILL
    assert partial_of(out).read_text() == "half"
    with writing(out) as partial:
        partial.write_text("whole")
    assert out.read_text() == "whole"


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    unsupported = Mock(side_effect=NotImplementedError("no flock"))
    monkeypatch.setattr(FileLock, "acquire", unsupported)  # newer releases lock by existence
    write_whole(tmp_path / "out", "text")
    assert (tmp_path / "out").read_text() == "text"
    assert "cannot be locked (no flock): do not write it from two" in caplog.text
