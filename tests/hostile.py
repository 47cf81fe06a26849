"""Rows as logs and other libraries write them, drawn with a seed.

`tests/test_tables.py` has files of them.
"""
# ruff: noqa: ARG005  # each kind of row is given a question and an answer

import json
from collections.abc import Callable, Iterator
from itertools import islice
from random import Random
from typing import Any

import pandas as pd

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
LABELS = [
    *[{}] * 12,
    {"correct": True},
    {"correct": False},
    {"quality": 0.25},
    {"correct": None},
    *({"correct": value} for value in ("TRUE", "true", "False", "WAHR", "yes", "", 1, 2)),
]


def drawn(rng: Random, kind: Callable[[str, str], object]) -> object:
    row = kind(rng.choice(QUESTIONS), rng.choice(ANSWERS))
    return {**rng.choice(LABELS), **row} if isinstance(row, dict) else row


def sources(seed: int, rounds: int) -> Iterator[tuple[str, Any]]:
    """Doors and what comes through them: lists of one or two rows, or data frames of such.

    Every kind comes once in a round.
    """
    rng, kinds = Random(seed), [*KINDS, *3 * PLAIN]
    rows = (drawn(rng, kind) for _ in range(rounds) for kind in rng.sample(kinds, len(kinds)))
    while some := list(islice(rows, rng.choice([1, 1, 2]))):
        fields = [row for row in some if isinstance(row, dict)]
        if rng.random() < 0.6 or not fields:
            yield "python", some
        else:
            # pandas' own texts hold no half of a surrogate pair.
            kind = object if "\\ud" in json.dumps(fields) or rng.random() < 0.5 else None
            yield "batch", pd.DataFrame(fields, dtype=kind)
