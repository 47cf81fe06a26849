"""Sheets of labels: what a person needs to label answers, in a CSV that any spreadsheet opens.

A sheet is joined to its scores by `key` alone, whose letters no spreadsheet changes. Prompts,
answers and signals in it are for people, and a spreadsheet may change them. Only one thing is
checked: a key beside the prompt and the answer of another key has been moved by a person.
"""

import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lm_polygraph_asmi.files import writing
from lm_polygraph_asmi.inputs import LABELS, ROW, meant_field, text_of
from lm_polygraph_asmi.scoring.provenance import short_hash
from lm_polygraph_asmi.tables import Row, read_table

COLUMNS = ("key", "prompt", "answer", "correct")
READ = (*LABELS, "cluster")
"""Columns that are read of a sheet, beside the key."""
RANK = "rank by "
"""Beginning of the name of a column that numbers answers, the surest first, by a signal."""
LONGEST = 30_000
"""Characters of a cell: a spreadsheet has room for 32,767, and breaks a longer cell in two."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""Characters with which a formula begins; a spreadsheet would compute it."""


class Sheet(NamedTuple):
    """What is read of a sheet."""

    labels: dict[str, dict[str, Any]]  # key -> the columns `READ`; a row without a label has none
    order: str | None  # the signal by which it is sorted, the surest answer first; None: it is not


def key_of(record: Mapping[str, Any]) -> str:
    """The key of a scored row: 16 letters, from its digest and its number."""
    text = f"{record['digest']} {record.get('row')}"
    return "".join(chr(ord("a") + int(digit, 16)) for digit in short_hash(text))


def is_sheet(content: Mapping[str, Any]) -> bool:
    """Whether a row is one of a sheet."""
    named = {*COLUMNS} <= content.keys()
    return named and re.fullmatch("[a-p]{16}", str(content["key"])) is not None


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
            shown = {"key": key_of(record), rank: number, **_texts(record)}
            table.writerow({**record, **(record.get("signals") or {}), **shown})


def _texts(record: Mapping[str, Any]) -> dict[str, str]:
    """Prompt and answer of a scored row, as a sheet shows them."""
    answer = record.get("answer")
    if not isinstance(answer, str):  # token ids
        answer = record.get("scored_text") or record.get("text")
    prompt = record.get("prompt") or f"id {record.get('id')}"
    return {"prompt": _shown(prompt), "answer": _shown(answer)}


def _letters(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Letters and digits of prompt and answer: much of what a spreadsheet changes is left out."""
    return tuple(re.sub(r"\W", "", str(content.get(n) or "")).lower() for n in ("prompt", "answer"))


def _shown(content: Any) -> str:
    """A text for people: not too long for a cell, and no formula."""
    text = text_of(content)
    if len(text) > LONGEST:
        half = LONGEST // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    return f" {text}" if text.startswith(FORMULA) else text


def read_sheet(path: str | Path, records: Iterable[Mapping[str, Any]]) -> Sheet:
    """Labels and order of a sheet.

    `records`: the scored rows. Raises ValueError, naming the row: a key that is missing, unknown,
    seen before, or beside the prompt and answer of another key; a column whose name is nearly that
    of a label.
    """
    if Path(path).suffix.lower() not in (".csv", ".tsv"):
        raise ValueError(f"{path}: expected a sheet of labels, a .csv file")
    texts = {key_of(each): _letters(_texts(each)) for each in records if each.get("digest")}
    rows = dict[str, Row]()
    order: str | None = None
    for row in read_table(path, ("key",), strict_text=False):
        place = f"{path}, row {row.number}"
        if row.error is not None:
            raise ValueError(f"{place}: {row.error}")
        if row.number == 1:
            _check_columns(path, row.content)
            order = _order_of(row.content)
        if all(value is None for value in row.content.values()):
            continue  # spreadsheets add blank rows
        key = str(row.content["key"] or "").strip().lower()
        if key not in texts:
            problem = f"the key {key!r} is of no row" if key else "no key"
            raise ValueError(
                f"{place}: {problem} of the scored file: pass the sheet that was written with it"
            )
        if (first := rows.setdefault(key, row)) is not row:
            raise ValueError(
                f"{place}: the key is that of row {first.number}, too: keep one of them"
            )
    shown = {key: _letters(row.content) for key, row in rows.items()}
    every, elsewhere = {*texts.values()}, {*shown.values()}
    # A key was moved only if its own texts stand beside another key; else texts were changed.
    for key, found in shown.items():
        if found != texts[key] and all(found) and found in every and texts[key] in elsewhere:
            raise ValueError(
                f"{path}, row {rows[key].number}: prompt and answer are those of another key: undo "
                "what moved the keys, or remove both columns if only texts were changed"
            )
    labels = {
        key: {n: row.content[n] for n in READ if row.content.get(n) is not None}
        for key, row in rows.items()
    }
    return Sheet(labels, order)


def _order_of(names: Iterable[str]) -> str | None:
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
