"""Strict JSON, in and out, and one writer for each file."""

import json
import math
import os
from functools import reduce
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from filelock import FileLock

from lm_polygraph_asmi.files import parse_json, to_json, write_whole, writing


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"x": NaN}', "'x': .*nan"), ('{"x": [{"y": -Infinity}]}', r"'x\[0\]\.y': .*-inf"),
        ('{"x": 1e999}', "'x': .*inf"), ("NaN", "finite"),
        ('{"correct": true, "correct": false}', "'correct' occurs twice"),
        (r'{"x": "Who \ud800?"}', "'x': .*character 5"), (r'{"\udfff": 1}', "surrogate"),
        ('{"x": 1} {"y": 2}', "not JSON"), ('\ufeff{"x": 1}', "BOM"), ("", "not JSON"),
        ('{"x": ' + "1" * 5000 + "}", "digits"), ("[" * 10**5, "nested"),
        (b'{"x": "\xff"}', "decode"),
    ],
)  # fmt: skip
def test_what_readers_understand_differently(text, word):
    with pytest.raises(ValueError, match=word):
        parse_json(text)


@pytest.mark.parametrize("inner", ["null", "1", '"x"'])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"x": ', "}")])
def test_lists_and_objects_are_nested_200_times_at_most(begin, end, inner):
    text = begin * 200 + inner + end * 200
    assert to_json(parse_json(text)) == text
    with pytest.raises(ValueError, match="nested"):
        parse_json(begin + text + end)


@pytest.mark.parametrize(
    "text",
    [
        '{"x": -0.0, "y": 12345678901234567890123, "z": 1e-400, "n": null, "t": [true, false]}',
        r'{"x": "\ud83d\ude00", "y": "\u2028", "z": "NaN", "\u00e9": ""}',
        '[{"a": 1}, {"a": 2}]',
    ],
)
def test_strict_texts_come_back(text):
    value = parse_json(text)
    assert value == json.loads(text)
    assert repr(parse_json(to_json(value))) == repr(value)  # -0.0, too


@pytest.mark.parametrize(
    ("value", "error", "word"),
    [
        *(({"x": [value]}, ValueError, "finite") for value in
          (math.nan, np.float64("inf"), np.float32("nan"), np.array([1, math.nan]))),
        ({"x": "\ud800"}, ValueError, "'x'"),
        (reduce(lambda inner, _: [inner], range(2000), 0), ValueError, "nested"),
        ({"x": Path()}, TypeError, "Path"),
    ],
)  # fmt: skip
def test_what_has_no_json_is_not_written(value, error, word):
    with pytest.raises(error, match=word):
        to_json(value, str if error is ValueError else None)


def test_what_is_converted():
    numbers = {"a": np.float32(0.5), "b": np.int64(2), "c": np.bool_(True), "d": np.arange(2)}
    assert parse_json(to_json(numbers)) == {"a": 0.5, "b": 2, "c": True, "d": [0, 1]}
    assert to_json({"x": Path("a")}, str) == '{"x": "a"}'


def test_a_file_is_written_whole(tmp_path):
    out = tmp_path / "out.json"
    with writing(out) as partial:
        partial.write_text("new")
        assert not out.exists()
        with pytest.raises(ValueError, match=r"out\.json is being written"):
            write_whole(out, "other")
    with pytest.raises(ValueError, match="exists"), writing(out):
        pass
    assert (out.read_text(), os.listdir(tmp_path)) == ("new", ["out.json"])
    write_whole(out, "newer")
    assert (out.read_text(), os.listdir(tmp_path)) == ("newer", ["out.json"])


def disk_full(_):
    raise OSError("disk full")


def other_writer(out):
    out.write_text("meanwhile")


def half_written(out, then, text):
    with writing(out) as partial:
        partial.write_text(text)
        then(out)


@pytest.mark.parametrize(
    ("written", "then", "word", "left"),
    [
        ("half", disk_full, "disk full", {"out.json.partial": "half"}),
        ("", disk_full, "disk full", {}),
        ("half", other_writer, r"the result is in .*partial",
         {"out.json": "meanwhile", "out.json.partial": "half"}),
    ],
)  # fmt: skip
def test_what_was_computed_stays(tmp_path, written, then, word, left):
    with pytest.raises((OSError, ValueError), match=word):
        half_written(tmp_path / "out.json", then, written)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == left


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    unsupported = Mock(side_effect=NotImplementedError("no flock"))
    monkeypatch.setattr(FileLock, "acquire", unsupported)  # newer releases lock by existence
    write_whole(tmp_path / "out", "text")
    assert (tmp_path / "out").read_text() == "text"
    assert "no flock" in caplog.text
