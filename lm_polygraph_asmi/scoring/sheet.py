"""Sheets of labels: what a person needs to label answers, in a CSV that any spreadsheet opens.

A sheet is joined to its scores by `key` alone, whose letters no spreadsheet changes; prompts,
answers and signals in it are for people, and whatever a spreadsheet does to them has no effect.
"""

import csv
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lm_polygraph_asmi.files import writing
from lm_polygraph_asmi.inputs import LABELS, ROW, meant_field, text_of
from lm_polygraph_asmi.scoring.provenance import short_hash
from lm_polygraph_asmi.tables import read_table

COLUMNS = ("key", "prompt", "answer", "correct")
READ = (*LABELS, "cluster")
"""Columns that are read of a sheet, beside the key."""
RANK = "rank by "
"""Beginning of the name of a column that numbers answers, the surest first, by a signal."""
LONGEST = 30_000
"""Characters of a cell: a spreadsheet has room for 32,767, and breaks a longer cell in two."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""With what a formula begins, which a spreadsheet would compute."""


def key_of(record: Mapping[str, Any]) -> str:
    """The key of a scored row: 16 letters, from its digest and its number."""
    text = f"{record['digest']} {record.get('row')}"
    return "".join(chr(ord("a") + int(digit, 16)) for digit in short_hash(text))


def is_sheet(content: Mapping[str, Any]) -> bool:
    """Whether a row is one of a sheet."""
    key = content.get("key")
    return {*COLUMNS} <= content.keys() and re.fullmatch("[a-p]{16}", str(key)) is not None


def write_sheet(records: Iterable[Mapping[str, Any]], path: str | Path, rank: str = "") -> None:
    """Write a sheet of rows that `score_file` wrote; those without a result are left out.

    `rank`: name of a column that numbers the rows. Raises ValueError: the file exists, since it may
    have labels.
    """
    scored = [record for record in records if record.get("digest")]
    first = scored[0] if scored else {}
    more = [rank] * bool(rank) + ["accept"] * ("accept" in first)
    names = [*COLUMNS, *more, *(first.get("signals") or {})]
    with writing(path) as partial, partial.open("w", encoding="utf-8-sig", newline="") as file:
        # Its own line ends have carriage returns, so it quotes them in cells.
        table = csv.DictWriter(file, names, extrasaction="ignore")
        table.writeheader()
        for number, record in enumerate(scored, start=1):
            answer = record.get("answer")
            if not isinstance(answer, str):  # token ids
                answer = record.get("scored_text") or record.get("text")
            prompt = record.get("prompt") or f"id {record.get('id')}"
            shown = {"key": key_of(record), "prompt": _shown(prompt), "answer": _shown(answer)}
            table.writerow({**record, **(record.get("signals") or {}), rank: number, **shown})


def _shown(content: Any) -> str:
    """A text for people: not too long for a cell, and no formula."""
    text = text_of(content)
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    return f" {text}" if text.startswith(FORMULA) else text


def read_sheet(path: str | Path, keys: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Keys of the rows of a sheet, and their labels, of `READ`; empty without one.

    `keys`: those of the scored rows. Raises ValueError, naming the row: a key that is missing,
    unknown or seen before; a column whose name is nearly that of a label.
    """
    if Path(path).suffix.lower() not in (".csv", ".tsv"):
        raise ValueError(f"{path}: expected a sheet of labels, a .csv file")
    known = dict[str, int]()
    for row in read_table(path, ("key",), strict_text=False):
        place = f"{path}, row {row.number}"
        if row.error is not None:
            raise ValueError(f"{place}: {row.error}")
        if row.number == 1:
            _check_columns(path, row.content)
        if all(value is None for value in row.content.values()):
            continue  # spreadsheets add blank rows
        key = str(row.content["key"] or "").strip().lower()
        if key not in keys:
            problem = f"the key {key!r} is of no row" if key else "no key"
            raise ValueError(
                f"{place}: {problem} of the scored file: pass the sheet that was written with it"
            )
        if (first := known.setdefault(key, row.number)) != row.number:
            raise ValueError(f"{place}: the key is that of row {first}, too: keep one of them")
        given = {name: row.content.get(name) for name in READ}
        yield key, {name: value for name, value in given.items() if value is not None}


def order_of(sheet: str | Path) -> str | None:
    """The signal by which a sheet was sorted, the surest answer first; None: it was not."""
    names = next((row.content for row in read_table(sheet, ("key",), strict_text=False)), {})
    found = (name.strip() for name in names if name.strip().lower().startswith(RANK))
    return next((name[len(RANK) :].lower() for name in found), None)


def _check_columns(path: str | Path, names: Iterable[str]) -> None:
    for name in names:
        if (meant := meant_field(name)) is not None:
            raise ValueError(f"{path}: the column {name!r}: write {meant!r}, or rename it")
        if name in ROW and name not in (*COLUMNS, *READ, "id"):
            raise ValueError(
                f"{path}: the column {name!r} is not read from a sheet: add it to the rows that "
                "are scored, and remove it here"
            )
