"""Sheets of labels: CSV files in which people label answers with any spreadsheet program.

A sheet is joined to its scores by the column `key` alone, which consists of letters that no
spreadsheet changes. The key also tells which signal sorts the sheet, if one does. Prompts, answers
and signals are there for people to read, and a spreadsheet may change them. Two mistakes are
detected: a key beside the prompt and answer of another key, and an answer that a person rewrote.
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

COLUMNS = ("key", "answer", "correct", "prompt")
READ = (*LABELS, "cluster")  # columns that are read from a sheet, besides the key
RANK = "rank by "  # prefix of a column that numbers the answers by a signal, the most certain first
LONGEST, ASKED = 30_000, 300
"""Most characters in a cell, since a spreadsheet splits those longer than 32,767, and of a question
in the column of its own."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # they begin what a spreadsheet would compute


class Sheet(NamedTuple):
    """The content of a sheet."""

    labels: dict[str, dict[str, Any]]  # key -> the columns `READ`; empty for an unlabelled row
    order: str | None  # the signal that sorts the sheet, the most certain answer first; None: none


def key_of(record: Mapping[str, Any], order: str = "") -> str:
    """The key of a scored row: 16 letters that encode a hash of its digest and row number.

    `order`: the signal that sorts the sheet; empty for the key in an unsorted sheet.
    """
    text = f"{record['digest']} {record.get('row')}{order and f' by {order}'}"
    return "".join(chr(ord("a") + int(digit, 16)) for digit in short_hash(text))


def is_sheet(content: Mapping[str, Any]) -> bool:
    """Whether a row is from a sheet of labels."""
    return {*COLUMNS} <= content.keys() and bool(re.fullmatch("[a-p]{16}", str(content["key"])))


def write_sheet(records: Iterable[Mapping[str, Any]], path: str | Path, order: str = "") -> None:
    """Write a sheet from rows that `score_file` wrote. Rows without a result are left out.

    `order`: the signal by which the rows are sorted, the most certain answer first; a column
    numbers them. Raises ValueError: the file exists and may hold labels.
    """
    scored = [record for record in records if record.get("digest")]
    first, rank = scored[0] if scored else {}, order and f"{RANK}{order}"
    names = [
        *("key", "question", *COLUMNS[1:], *filter(None, [rank])),
        *(name for name in ("accept", "id") if name in first),
        *(first.get("signals") or {}),
    ]
    with writing(path) as partial, partial.open("w", encoding="utf-8-sig", newline="") as file:
        # The writer's own line ends have carriage returns, so it quotes cells that contain them.
        table = csv.DictWriter(file, names, extrasaction="ignore")
        table.writeheader()
        for number, record in enumerate(scored, start=1):
            table.writerow(
                {**record, **(record.get("signals") or {})}
                | {"key": key_of(record, order), rank: number, **_texts(record)}
            )


def _texts(record: Mapping[str, Any]) -> dict[str, str]:
    """Prompt, question, answer and id of a scored row, as a sheet shows them.

    The question is the last short line with a question mark, or else the last that is no label such
    as "Answer:", of the text or of a chat's last message; if there is none, the end.
    """
    answer, scored = record.get("answer"), record.get("scored_text") or record.get("text")
    prompt = record.get("prompt") or f"id {record.get('id')}"
    last = text_of(prompt[-1] if isinstance(prompt, list) else prompt)
    short = [
        line
        for line in map(str.strip, last.split("\n"))
        if 0 < len(line) <= ASKED and not line.endswith(":")
    ] or [last.strip()[-ASKED:]]
    return {
        "question": _shown(([line for line in short if {*"?？؟"} & {*line}] or short)[-1]),
        "answer": _shown(answer if isinstance(answer, str) else scored),  # of token ids: their text
        "prompt": _shown(prompt),
        "id": _shown(str(record.get("id", ""))),
    }


def _letters(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Lower-case letters and digits of prompt and answer, which spreadsheets rarely change."""
    return tuple(re.sub(r"\W", "", str(content.get(n) or "")).lower() for n in ("prompt", "answer"))


def _rewritten(scored: str, cell: str, kept: bool) -> bool:
    """Whether a person has changed an answer, so that its label is not of the scored answer.

    A spreadsheet may write an error in the place of a formula, a truth value in another language,
    and a date or a number in another form, but it keeps the digits of a whole number. If its
    encoding did not keep (`kept`) characters that are not in ASCII, the others stand in their
    order, with at most one letter in the place of each that was lost.
    """
    both = scored, cell
    values = all(re.search(r"\d", each) and len(each.split()) <= 4 for each in both)
    whole = all(re.fullmatch(r"[1-9]\d{,14}", each) for each in both)
    if cell.startswith("#") or scored.lower() in ("true", "false") or (values and not whole):
        return False
    before, now = (re.sub(r"[\W_]" if kept else "[^a-z0-9]", "", each.lower()) for each in both)
    lost = 0 if kept else sum(not each.isascii() for each in scored)
    left = iter(now)
    return len(now) > len(before) + lost or not all(each in left for each in before)


def _shown(content: Any) -> str:
    """A text as a cell shows it: shortened if it is too long, and never a formula."""
    text = text_of(content)
    if len(text) > LONGEST:
        text = f"{text[: LONGEST // 2]} [...] {text[-LONGEST // 2 :]}"
    return f" {text}" if text.startswith(FORMULA) else text


def read_sheet(path: str | Path, records: Iterable[Mapping[str, Any]]) -> Sheet:
    """Read labels and order from a sheet.

    `records`: the scored rows. Raises ValueError with the row's number if a key is missing,
    unknown, repeated, or beside the prompt and answer of another key; or if an answer was
    rewritten, or a column's name is almost that of a label; or if rows are of several sheets.
    """
    if Path(path).suffix.lower() not in (".csv", ".tsv"):
        raise ValueError(f"{path}: expected a sheet of labels, a .csv or .tsv file")
    scored = {key_of(each): each for each in records if each.get("digest")}
    ordered = {
        key_of(each, name): (key, name)
        for key, each in scored.items()
        for name in each.get("signals") or ()
    }
    rows, orders = dict[str, Row](), set[str | None]()
    for row in read_table(path, ("key",), strict_text=False):
        place = f"{path}, row {row.number}"
        if row.error is not None:
            raise ValueError(f"{place}: {row.error}")
        if row.number == 1:
            _check_columns(path, row.content)
        if all(value is None for value in row.content.values()):
            continue  # a blank row, which spreadsheets add
        key = str(row.content["key"] or "").strip().lower()
        key, order = ordered.get(key, (key, None))
        if key not in scored:
            problem = f"no scored row has the key {key!r}" if key else "the row has no key"
            raise ValueError(
                f"{place}: {problem}: pass the sheet that was written with the scored file"
            )
        if order is None and any(name.strip().startswith(RANK) for name in row.content):
            raise ValueError(f"{place}: its key is not of a sorted sheet: write the sheet again")
        if (first := rows.setdefault(key, row)) is not row:
            raise ValueError(f"{place}: row {first.number} has the same key: remove one of them")
        orders.add(order)
    if len(orders) > 1:
        raise ValueError(
            f"{path}: the rows are of several sheets: label each sheet in its own file"
        )
    _check_texts(path, rows, {key: _texts(each) for key, each in scored.items()})
    labels = {
        key: {n: row.content[n] for n in READ if row.content.get(n) is not None}
        for key, row in rows.items()
    }
    return Sheet(labels, *orders or (None,))


def _check_texts(
    path: str | Path, rows: Mapping[str, Row], scored: Mapping[str, Mapping[str, str]]
) -> None:
    """Raise ValueError if texts stand beside another key, or if an answer was rewritten.

    A key was moved only if its own texts appear beside another key; otherwise texts changed.
    """
    texts = {key: _letters(each) for key, each in scored.items()}
    shown = {key: _letters(row.content) for key, row in rows.items()}
    every, elsewhere = {*texts.values()}, {*shown.values()}
    # If some answer has them still, the encoding lost none of the characters that are not in ASCII.
    kept = any(here[1] == texts[key][1] and not here[1].isascii() for key, here in shown.items())
    for key, here in shown.items():
        moved = here != texts[key] and all(here) and here in every and texts[key] in elsewhere
        cell, answer = (
            str(each.get("answer") or "").strip() for each in (rows[key].content, scored[key])
        )
        if moved or (cell and _rewritten(answer, cell, kept)):
            name = "prompt" if cell == answer else "answer"
            raise ValueError(
                f"{path}, row {rows[key].number}: prompt and answer are not those of its key: the "
                f"{name} {rows[key].content[name]!r:.60} is not the scored one, "
                f"{scored[key][name]!r:.60}, which a label is of. Undo what moved or changed them; "
                "if only a program changed texts, remove both columns"
            )


def _check_columns(path: str | Path, names: Iterable[str]) -> None:
    for name in names:
        if (meant := meant_field(name)) is not None:
            raise ValueError(f"{path}: unknown column {name!r}: write {meant!r}, or rename it")
        if name in ROW and name not in (*COLUMNS, *READ, "id"):
            raise ValueError(
                f"{path}: the column {name!r} is not read from a sheet: add it to the rows before "
                "they are scored, and remove it from the sheet"
            )
