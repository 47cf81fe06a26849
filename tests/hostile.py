"""Rows as logs, spreadsheets and other libraries write them, drawn with a seed."""
# ruff: noqa: ARG005  # each kind of row is given a question and an answer

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO, StringIO
from random import Random
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]

QUESTIONS = [
    "Who built the ferry?", 'Which: "red"; or blue,\nand why?\nA:', "007", " 1931", "=1+1", "NA",
    "a\tb", "Où est Huế?", "[1, 2]", '{"a": 1}', "None", "x\r\ny", "a\u2028b\x85c", "５ “%”",
    "Human: hi\nAI:", "'it's", '5" pipes', "-", "#N/A", "content=1", "[]",
]  # fmt: skip
ANSWERS = [
    " Brask", " red.", "", " 1931", "-5", " a, b; c", ' "so"', "TRUE", "nan", "null", "1,5", "Huế.",
    "at", "a\tb", "x\ry", "[]", "{'a': 1}",
]  # fmt: skip
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": 1}'}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
NULLS = {
    "refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": None,
    "reasoning_content": None, "name": None,
}  # fmt: skip


def user(content: object, **more: object) -> Row:
    return {"role": "user", "content": content, **more}


def says(content: object, role: str = "assistant", **more: object) -> Row:
    return {"role": role, "content": content, **more}


def text(words: str, kind: str = "text", **more: object) -> Row:
    return {"type": kind, "text": words, **more}


KINDS: list[Callable[[str, str], object]] = [
    # Plain rows
    lambda q, a: {"prompt": q, "answer": a},
    lambda q, a: {"prompt": q, "answer": a, "id": 7, "context": q},
    lambda q, a: {"prompt": q},
    lambda q, a: {"prompt": [user(q)], "answer": a},
    lambda q, a: {"messages": [says("Be brief.", "system"), user(q)], "answer": a},
    lambda q, a: {"messages": [says("Be brief.", "developer"), user(q), says(a)]},
    lambda q, a: {"messages": [user(q), says("Which?"), user("The old."), says(a)]},
    lambda q, a: {"prompt": None, "messages": [user(q)], "answer": a},
    # Logs of servers
    lambda q, a: {"messages": [user(q, **NULLS), says(a, **NULLS)]},
    lambda q, a: {"messages": [user(q), says(a, reasoning_content="It is red.")]},
    lambda q, a: {"messages": [user(q), says(a, reasoning="It is red.", **NULLS)]},
    lambda q, a: {"messages": [user(q), says(f"{a}.", thinking="It is red.")]},
    lambda q, a: {"messages": [user(q, name="Ann"), says("So.", thinking="Red?"), user(q)],
                  "answer": a},
    lambda q, a: {"messages": [user(q), says(None, refusal="I cannot.")]},
    lambda q, a: {"messages": [user(q), says(a, refusal="I cannot.")]},
    lambda q, a: {"messages": [user(q), says(a, annotations=[{"type": "url_citation"}])]},
    lambda q, a: {"messages": [user(q), says(a, annotations=[], tool_calls=[])]},
    lambda q, a: {"messages": [user(q), says(None, tool_calls=[CALL])]},
    lambda q, a: {"messages": [user(q), says(a, tool_calls=[CALL])]},
    lambda q, a: {"messages": [
        user(q), says(None, tool_calls=[CALL]), says(q, "tool", tool_call_id="c1"), says(a)]},
    lambda q, a: {"messages": [
        user(q), says("Wait.", tool_calls=[CALL]), says("1", "tool", tool_call_id="c1")]},
    lambda q, a: {"messages": [user(q), says(None, function_call={"name": "f"}),
                               says("1", "function", name="f"), says(a)]},
    lambda q, a: {"messages": [user(q)], "choices": [{"index": 0, "message": says(a)}]},
    lambda q, a: {"request": {"messages": [user(q)]}, "response": {"choices": [says(a)]}},
    lambda q, a: {"messages": [user(q)], "response": {"choices": [{"message": says(a)}]}},
    lambda q, a: {"prompt": q, "choices": [{"text": a}], "object": "text_completion"},
    # Parts of a message
    lambda q, a: {"messages": [user([text(q)]), says([text(a)])]},
    lambda q, a: {"messages": [user([text(q, "input_text"), text(" B?", "input_text")])],
                  "answer": a},
    lambda q, a: {"messages": [user([text("A: "), text(q)]), says([text(a, "output_text")])]},
    lambda q, a: {"messages": [user(q), says([text(a, "output_text", annotations=[])])]},
    lambda q, a: {"messages": [user(q), says([text("Red.", "reasoning"), text(a)])]},
    lambda q, a: {"messages": [user(q), says([{"type": "thinking", "thinking": "R"}, text(a)])]},
    lambda q, a: {"messages": [user([{"type": "image_url", "image_url": {"url": "x"}}, text(q)])],
                  "answer": a},
    lambda q, a: {"messages": [user([text(q, cache_control={"type": "ephemeral"})])], "answer": a},
    lambda q, a: {"messages": [user([{"type": "tool_result", "content": q}])], "answer": a},
    lambda q, a: {"messages": [user(q), says([text(a), {"type": "tool_use", "name": "f"}])]},
    lambda q, a: {"messages": [user([q]), says(a)]},
    lambda q, a: {"messages": [user([{"text": q}]), says(a)]},
    lambda q, a: {"messages": [user([]), says(a)]},
    lambda q, a: {"messages": [user(text(q)), says(a)]},
    # Other libraries
    lambda q, a: {"messages": [user(q), says(a, "model")]},
    lambda q, a: {"messages": [user(q), says(a, "ai")]},
    lambda q, a: {"messages": [user(q), says(a, "Assistant")]},
    lambda q, a: {"messages": [says(q, "human"), says(a)]},
    lambda q, a: {"messages": [says(q, " user"), says(a)]},
    lambda q, a: {"messages": [{"content": q}], "answer": a},
    lambda q, a: {"messages": [user(q), says(a, None)]},
    lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    lambda q, a: {"messages": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
    lambda q, a: {"messages": [{"role": "user", "value": q}, {"role": "assistant", "value": a}]},
    lambda q, a: {"contents": [{"role": "user", "parts": [{"text": q}]}], "answer": a},
    lambda q, a: {"messages": [{"role": "user", "parts": [{"text": q}]}], "answer": a},
    lambda q, a: {"prompt": [{"role": "model", "parts": [q]}], "answer": a},
    lambda q, a: {"messages": [{"type": "human", "content": q}, {"type": "ai", "content": a}]},
    lambda q, a: {"messages": [{"type": "human", "data": {"content": q}}], "answer": a},
    lambda q, a: {"messages": [{"lc": 1, "kwargs": {"content": q}}], "answer": a},
    lambda q, a: {"prompt": f"content={q!r} additional_kwargs={{}} response_metadata={{}}",
                  "answer": a},
    lambda q, a: {"prompt": f"[HumanMessage(content={q!r}, additional_kwargs={{}})]", "answer": a},
    lambda q, a: {"prompt": q, "answer": f"content={a!r} additional_kwargs={{}} id='run-1'"},
    lambda q, a: {"prompt": [q, a]},
    lambda q, a: {"messages": [[user(q)]], "answer": a},
    lambda q, a: {"messages": {"role": "user", "content": q}, "answer": a},
    # A chat as text
    lambda q, a: {"prompt": json.dumps([user(q)]), "answer": a},
    lambda q, a: {"prompt": " " + str([user(q)]), "answer": a},
    lambda q, a: {"messages": json.dumps([user(q)]), "answer": a},
    lambda q, a: {"messages": q, "answer": a},
    lambda q, a: {"prompt": json.dumps({"messages": [user(q)]}), "answer": a},
    lambda q, a: {"prompt": q, "answer": str(says(a))},
    lambda q, a: {"prompt": q, "answer": json.dumps([says(a)], indent=1)},
    lambda q, a: {"messages": [user(q), says(str([text(a)]))]},
    # An answer under another name, twice, or none beside a label
    *(lambda q, a, name=name: {"prompt": q, name: a, "correct": True}
      for name in ("response", "output", "completion", "prediction", "generated_text")),
    *(lambda q, a, name=name: {"prompt": q, name: a}
      for name in ("response", "output", "completion", "prediction", "Response", "Answer")),
    lambda q, a: {"prompt": q, "response": a, "answer": a + "."},
    lambda q, a: {"prompt": q, "response": None, "answer": a},
    lambda q, a: {"prompt": q, "correct": True},
    lambda q, a: {"prompt": q, "answer": None, "correct": False},
    lambda q, a: {"messages": [user(q)], "quality": 0.5},
    lambda q, a: {"messages": [user(q), says(a)], "answer": a},
    lambda q, a: {"messages": [user(q), says(a)], "answer": a + "!"},
    lambda q, a: {"messages": [user(q)], "prompt": q, "answer": a},
    lambda q, a: {"messages": [says(a)]},
    lambda q, a: {"messages": [], "answer": a},
    # Names and types
    lambda q, a: {"Prompt": q, "answer": a},
    lambda q, a: {"question": q, "answer": a},
    lambda q, a: {" prompt": q, "answer": a},
    lambda q, a: {"prompt": q, "answer": a, "score": 1.5},
    lambda q, a: {"prompt": 7, "answer": a},
    lambda q, a: {"prompt": "", "answer": a},
    lambda q, a: {"prompt": True, "answer": a},
    lambda q, a: {"prompt": float("nan"), "answer": a},
    lambda q, a: {"prompt": q, "answer": 1931},
    lambda q, a: {"prompt": q, "answer": 3.5, "correct": True},
    lambda q, a: {"prompt": q, "answer": True},
    lambda q, a: {"prompt": q, "answer": [a]},
    lambda q, a: {"prompt": q, "answer": {"text": a}},
    lambda q, a: {"prompt": q + "\ud83d", "answer": a},
    lambda q, a: {"prompt": q, "answer": a + "\udc80"},
    lambda q, a: {"messages": [user(q + "\ud83d")], "answer": a},
    lambda q, a: [q, a],
    lambda q, a: q,
    lambda q, a: None,
    # What else a template is given
    lambda q, a: {"messages": [user(q)], "tools": [TOOL], "answer": a},
    lambda q, a: {"messages": [user(q)], "tools": None, "answer": a},
    lambda q, a: {"messages": [user(q)], "tools": [], "answer": a},
    lambda q, a: {"messages": [user(q)], "tools": json.dumps([TOOL]), "answer": a},
    lambda q, a: {"messages": [user(q)], "documents": [{"text": "Red."}], "answer": a},
    lambda q, a: {"messages": [user(q)], "chat_template_kwargs": {"enable_thinking": False},
                  "answer": a},
    lambda q, a: {"messages": [user(q)], "tools": [TOOL], "documents": [{"text": "R"}]},
    lambda q, a: {"prompt": q, "tools": [TOOL], "answer": a},
    lambda q, a: {"prompt": q, "documents": [{"text": "Red."}], "answer": a},
]  # fmt: skip
# Kinds that are right, most of the time.
PLAIN = KINDS[:9]
DOORS, SIZES = (
    ["python", "python", "python", "batch", "jsonl", "jsonl", "csv", "csv", "parquet"],
    [1, 1, 2],
)
EITHER, FIFTH, ENDS = [True, False], [True, *[False] * 4], ["\n", "\r\n"]
SEPARATORS, QUOTING = [*",,;\t"], [csv.QUOTE_MINIMAL, csv.QUOTE_ALL]
INDEXES = [None, None, "", "Unnamed: 0"]
ENCODINGS = [*["utf-8"] * 8, *["utf-8-sig"] * 3, "utf-16", "cp1252"]
LABELS = [
    *[{}] * 12,
    {"correct": True},
    {"correct": False},
    {"quality": 0.25},
    {"correct": None},
    *({"correct": value} for value in ("TRUE", "true", "False", "WAHR", "yes", "", 1, 2)),
]


class Deck:
    """Draws from lists without repeating a card before all of its list were drawn."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.left: dict[int, list[Any]] = {}

    def draw(self, cards: Sequence[Any]) -> Any:
        left = self.left.setdefault(id(cards), [])
        if not left:
            left += self.rng.sample(cards, len(cards))
        return left.pop()


def drawn(deck: Deck) -> object:
    kinds = PLAIN if deck.rng.random() < 0.15 else KINDS
    row = deck.draw(kinds)(deck.draw(QUESTIONS), deck.draw(ANSWERS))
    return {**deck.draw(LABELS), **row} if isinstance(row, dict) else row


# What becomes of a table, of a separator and line ends: as it is, or with a fault.
IN_CSV: list[Callable[[str, str, str], str]] = [
    *[lambda whole, separator, end: whole] * 6,
    lambda whole, separator, end: separator.join(whole.split(end, 1)) + end,
    lambda whole, separator, end: whole.rstrip().replace(end, separator + end) + end,
    lambda whole, separator, end: whole.replace(end, separator + end).replace(separator, "", 1),
    lambda whole, separator, end: end.join(
        f"{line}{separator}{line.split(separator)[-1]}" for line in whole.split(end)[:-1]
    ),
    lambda whole, separator, end: whole.rstrip() + separator + "more" + end,
    lambda whole, separator, end: whole.split(end, 1)[1],
    lambda whole, separator, end: f"sep={separator}{end}{whole}",
    lambda whole, separator, end: whole.replace(end, "\r"),
    lambda whole, separator, end: whole.rstrip().replace("e", "e\r") + end,
    lambda whole, separator, end: whole.replace('"', ""),
    lambda whole, separator, end: whole.replace('""', '"'),
    lambda whole, separator, end: whole.replace('"', "'"),
    lambda whole, separator, end: whole.rstrip() + '"' + end,
    lambda whole, separator, end: whole.rstrip() + ' "so"' + end,
    lambda whole, separator, end: whole[:-7],
    lambda whole, separator, end: whole.replace("prompt", "Prompt", 1),
    lambda whole, separator, end: whole.replace(separator, "|"),
    lambda whole, separator, end: whole + end,
    lambda whole, separator, end: whole.rsplit(separator, 1)[0] + end,
    lambda whole, separator, end: whole.replace("a", "\0", 1),
]


def in_csv(deck: Deck, rows: list[Row]) -> bytes:
    """As a spreadsheet, pandas or a script writes it, most of the time with a fault."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = [names, *([row.get(name) for name in names] for row in rows)]
    first = deck.draw(INDEXES)
    table = [[first, *row] if first is not None else row for row in table]
    buffer, end = StringIO(newline=""), deck.draw(ENDS)
    separator, quoting = deck.draw(SEPARATORS), deck.draw(QUOTING)
    csv.writer(buffer, delimiter=separator, quoting=quoting, lineterminator=end).writerows(table)
    return encoded(deck, deck.draw(IN_CSV)(buffer.getvalue(), separator, end))


def encoded(deck: Deck, words: str) -> bytes:
    name = deck.draw(ENCODINGS)
    return words.encode(name, "surrogatepass" if "utf" in name else "replace")


# What becomes of one line: as it is, or with a fault.
IN_JSON: list[Callable[[str], str]] = [
    *[lambda line: line] * 6,
    lambda line: line[: len(line) // 2],
    lambda line: line[:-1] + ', "answer": "x"}',
    lambda line: line[:-1] + ', "prompt": "y"}',
    lambda line: line[:-1] + ', "weight": NaN}',
    lambda line: line[:-1] + ', "weight": -Infinity}',
    lambda line: str(json.loads(line)),
    lambda line: line + ",",
    lambda line: f"[{line}]",
    lambda line: line + line,
    lambda line: f"# rows\n{line}",
    lambda line: f"\n{line}\n",
    lambda line: line.replace('"', "“"),
    lambda line: "\ufeff" + line,
    lambda line: json.dumps(json.loads(line), indent=1),
]


def in_json_lines(deck: Deck, rows: list[object]) -> bytes:
    lines = [json.dumps(row, ensure_ascii=deck.draw(EITHER)) for row in rows]
    lines = [line.encode("utf-8", "replace").decode() for line in lines]
    place, end = deck.rng.randrange(len(lines)), deck.draw(ENDS)
    lines[place] = deck.draw(IN_JSON)(lines[place])
    return encoded(deck, end.join(lines) + end * deck.draw(EITHER))


def in_parquet(deck: Deck, rows: list[Row]) -> bytes:
    """Null where a row lacks a field, also inside messages; the first row where types differ."""
    try:
        table = pa.Table.from_pylist(rows)
    except (pa.ArrowException, UnicodeError):
        table = pa.Table.from_pylist([{"prompt": "Who?", "answer": 7, "correct": rows[0] is None}])
    if deck.draw(FIFTH):
        name = deck.rng.choice(table.column_names)
        table = table.append_column(name, table[name])
    buffer = BytesIO()
    pq.write_table(table, buffer, use_dictionary=deck.draw(EITHER))
    return buffer.getvalue()


def sources(seed: int, number: int) -> Iterator[tuple[str, Any]]:
    """Doors and what comes through them, until `number` rows: a list, a data frame, or bytes."""
    deck = Deck(Random(seed))
    while number > 0:
        door = deck.draw(DOORS)
        rows = [drawn(deck) for _ in range(deck.draw(SIZES))]
        number -= len(rows)
        fields = [row for row in rows if isinstance(row, dict)] or [{"prompt": "Who?"}]
        if door == "batch":
            # pandas' own texts hold no half of a surrogate pair.
            kind = object if "\\ud" in json.dumps(fields) or deck.draw(EITHER) else None
            yield door, pd.DataFrame(fields, dtype=kind)
        elif door == "csv":
            yield door, in_csv(deck, fields)
        elif door == "parquet":
            yield door, in_parquet(deck, fields)
        else:
            yield door, rows if door == "python" else in_json_lines(deck, rows)
