"""Rows of files, against a reader that goes from character to character, and refusals by place."""

import csv
import io
import json
import random
import re
from contextlib import suppress
from datetime import datetime
from functools import partialmethod

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from lm_polygraph_asmi import tables
from lm_polygraph_asmi.tables import LINES, SEPARATORS, Row, read_table, write_parquet
from tests import border

NEEDED = ("prompt", "messages")


def read(path, text, **options):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return list(read_table(path, NEEDED, **options))


PIECES = ["a", "é", " ", "0", "1e3", "NA", "true", "=", ",", ";", "\t", '"', '""', "\n", "\r\n",
          "\r", "\u2028", "\x0b", "\x1c", "\x85", "🪁"]  # fmt: skip


def drawn_csv(draw):
    """A CSV as a program writes it, and the same after some characters went wrong."""
    separator, names = draw.choice(SEPARATORS), ["prompt", "answer", "id", "note; x", "a,b"]
    header = draw.sample(names, 4)[draw.choice([0, 0, 0, 2]) :] + draw.choices(
        names, k=draw.random() < 0.1
    )
    rows = [
        ["".join(draw.choices(PIECES, k=draw.randint(0, 4))) for _ in header]
        for _ in range(draw.randint(0, 4))
    ]
    file = io.StringIO()
    bare = any("\r" in cell for row in rows for cell in row)  # which older writers do not quote
    quoting = csv.QUOTE_ALL if bare else draw.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
    how = {"quoting": quoting, "delimiter": separator}
    csv.writer(file, lineterminator=draw.choice(["\n", "\r\n"]), **how).writerows([header, *rows])
    text = broken = file.getvalue()
    for _ in range(draw.randint(0, 3)):
        at, cut = draw.randint(0, len(broken)), draw.randint(0, 2)
        broken = broken[:at] + draw.choice([*PIECES, ""]) + broken[at + cut :]
    return header, rows, text, broken


def by_hand(text):
    """Rows of a CSV by the slow reader, None for a bad one; a text for a file that is refused."""
    with suppress(border.Refused):
        rows = list(border.csv_rows(text.encode()))
        return [None if isinstance(row, border.Refused) else row for row in rows]
    return "refused"


def as_read(path, text):
    """The same by the package; and every error and its row can be found by a user."""
    with suppress(ValueError):
        rows = read(path, text)
        assert [row.number for row in rows] == [*range(1, len(rows) + 1)]
        assert all("quotes" in row.error and row.content["line"] for row in rows if row.error)
        return [None if row.error else row.content for row in rows]
    return "refused"


@pytest.mark.parametrize("seed", range(4))
def test_drawn_tables(tmp_path, seed):
    draw, seen = random.Random(seed), {"refused": 0, "bad": 0, "good": 0}
    for _ in range(200):
        header, rows, text, broken = drawn_csv(draw)
        path, mark = tmp_path / draw.choice(["a.csv", "a.tsv"]), draw.choice(["", "\ufeff"])
        if {*header} & {*NEEDED} and len({*header}) == len(header) > 1:
            full = [dict(zip(header, (c or None for c in row), strict=True)) for row in rows]
            assert as_read(path, mark + text) == by_hand(mark + text) == full
        found = as_read(path, mark + broken)
        assert found == by_hand(mark + broken), broken
        for row in found if isinstance(found, list) else ["refused"]:
            seen[row if isinstance(row, str) else "good" if row else "bad"] += 1
    assert min(seen.values()) > 5, seen


NO_TABLES = [
    ("in.csv", 'prompt,answer\na,b\n"1","2"x', "row 2.*line 3"),
    ("in.csv", 'prompt,answer\na\r,"b\nWho?,c\nd"\n', "row 1"),
    ("in.csv", "prompt,prompt\n", "'prompt'.*twice"),
    *(("in.csv", f"{header},x\nWho?,a\n", f"'{re.escape(header)}'")
      for header in ("Prompt", " prompt", "a|b")),
    ("in.csv", "", "'prompt'.*none"),
    *(("in.csv", "prompt,key\né,x\n".encode(encoding), "UTF-8")
      for encoding in ("cp1252", "utf-16-be", "utf-32", "mac-roman")),
    *((name, "", r"\.jsonl.*\.csv.*\.parquet")
      for name in ("in.xlsx", "in.json", "in", "in.csv.gz")),
    *(("in.jsonl", text, "per line") for text in
      ('[\n{"prompt": "a"},\n{"prompt": "b"}\n]', '{\n "prompt": "a"\n}', '\n  [{"a": 1}]')),
    *(("in.parquet", content, "Parquet") for content in (b"", b"PAR1", b"PAR1" + bytes(50))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "words"), NO_TABLES)
def test_a_file_that_is_refused_is_named_with_its_fault(tmp_path, name, content, words):
    with pytest.raises(ValueError, match=rf"{name}.*{words}"):
        read(tmp_path / name, content)


def test_a_long_cell(tmp_path):
    before, long = csv.field_size_limit(), "x" * 300_000
    assert read(tmp_path / "in.csv", f'prompt\n"{long}"') == [Row(1, {"prompt": long})]
    assert csv.field_size_limit() == before < len(long)


BAD_LINES = [
    "{not json", '["a list"]', '"a"', '{"x": NaN}', '{"a": 1, "a": 2}', '{"p": ' + "[" * 10**5,
    '{"p": ' + "1" * 5000 + "}",
]  # fmt: skip


@pytest.mark.parametrize(("mark", "end"), [("", "\n"), ("\ufeff", "\r\n")])
@pytest.mark.parametrize("suffix", LINES)
def test_lines_of_json(tmp_path, suffix, mark, end):
    """Numbered as in an editor; what cannot be read is a row with its error."""
    good = {"prompt": "a\u2028b\x85c", "n": [1, 2.0, None], "big": 123456789012345678901234567890}
    lines = [json.dumps(good, ensure_ascii=False), "", " \t", *BAD_LINES, ""]
    first, *wrong = read(tmp_path / f"in{suffix}", mark + end.join(lines))
    assert first == Row(1, good)
    assert [(row.number, row.content) for row in wrong] == [
        (number, {"line": line}) for number, line in enumerate(BAD_LINES, start=4)
    ]
    assert all(row.error for row in wrong)


def test_types_of_parquet(tmp_path):
    """Values are those that the file says; what is missing is None."""
    chat, path = [{"role": "user", "content": "Who?"}], tmp_path / "in.parquet"
    columns = {
        "prompt": pa.array(["a", ""], pa.large_string()),
        "messages": pa.array([chat, chat]),
        "answer": pa.array(["1931", "007"]).dictionary_encode(),
        "label": pa.array([True, None]), "byte": pa.array([1, -1], pa.int8()),
        "half": pa.array(np.array([0.5, np.nan], np.float16)),
        "pair": pa.array([{"a": [1.0, None]}, None]),
        "when": pa.array([pd.Timestamp("2024-01-01"), None]),
    }  # fmt: skip
    parquet.write_table(pa.table(columns), path)
    assert list(read_table(path, NEEDED)) == [
        Row(1, {"prompt": "a", "messages": chat, "answer": "1931", "label": True, "byte": 1,
                "half": 0.5, "pair": {"a": [1.0, None]}, "when": datetime(2024, 1, 1)}),
        Row(2, {"prompt": "", "messages": chat, "answer": "007", "label": None, "byte": -1,
                "half": None, "pair": None, "when": None}),
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"in\.parquet.*Parquet"):
        read(path, path.read_bytes()[:-9])


VALUES = [
    lambda _: None, lambda draw: draw.random() < 0.5, lambda draw: draw.randint(-3, 3),
    lambda draw: draw.choice([2**63 - 1, 2**63, -(2**63), 10**30, 0]),
    lambda draw: draw.choice([0.1, -0.0, 1e300, 5e-324, 1.0]),
    lambda draw: draw.choice(["", "é🪁", "null", "[1]", '{"a": 1}', "\x00\r\n"]),
    lambda draw: draw.choice([[], [1, "a", None], [[]], [{"a": 1.0}]]),
    lambda draw: draw.choice([{}, {"a": None}, {"b": [1, 2.0]}, {"a": {"": True}}]),
]  # fmt: skip


def test_drawn_rows_come_back_from_parquet(tmp_path, monkeypatch):
    """Each value as it was, with its type, in columns of one kind or of several."""
    monkeypatch.setattr(tables, "AT_ONCE", 3)
    in_batches = partialmethod(parquet.ParquetFile.iter_batches, batch_size=3)
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", in_batches)
    draw, path = random.Random(1), tmp_path / "out.parquet"
    for _ in range(80):
        kinds = {n: draw.sample(VALUES, draw.choice([1, 1, 2, 4])) for n in "abcd"}
        rows = [
            {n: draw.choice(kind)(draw) for n, kind in kinds.items() if draw.random() < 0.8}
            for _ in range(draw.randint(1, 8))
        ]
        names = {name for row in rows for name in row}
        write_parquet(lambda rows=rows: rows, path)
        numbers, found, _ = zip(*read_table(path), strict=True)
        assert numbers == tuple(range(1, len(rows) + 1))
        expected = [dict.fromkeys(names) | row for row in rows] if names else []
        assert list(map(typed, found)) == list(map(typed, expected))
    assert [each.name for each in tmp_path.iterdir()] == ["out.parquet"]


def typed(value):
    return json.dumps(value, sort_keys=True)
