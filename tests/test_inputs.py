"""What comes in is known, or refused by its name and place: every role, field, part and row field.

What is taken is written out here once more, so that nothing is taken by accident.
"""

import json
import random
import re
from itertools import product

import numpy as np
import pytest
import torch

from lm_polygraph_asmi.inputs import (
    TEMPLATE,
    chat_as_text,
    parse_request,
    parse_row,
    text_of,
)

ASKED = {"role": "user", "content": "Who built it?"}
SAYS = {"role": "assistant", "content": " Brask"}
CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}
VALUES = {
    "name": "Nadia", "tool_calls": [CALL], "tool_call_id": "c1", "reasoning_content": "so",
    "reasoning": "so", "thinking": "so", "refusal": "no", "function_call": CALL["function"],
    "audio": {"id": "a"}, "text": "Who?", "parts": ["Who?"], "weight": 1, "prefix": True,
    "images": ["x"], "Content": "Who?", "tools": [CALL], "documents": [{"text": "x"}], "id": "m1",
}  # fmt: skip
TAKEN = {
    **{role: {"name"} for role in ("system", "developer", "user")},
    "assistant": {"name", "tool_calls", "reasoning_content", "reasoning", "thinking"},
    "tool": {"name", "tool_call_id"},
}


@pytest.mark.parametrize(("role", "field"), [*product(TAKEN, VALUES)])
def test_fields_of_messages(role, field):
    plain = {"role": role, "content": "Blue."}
    message = plain | {field: VALUES[field]}
    if field in TAKEN[role]:
        found = parse_request([ASKED, message, ASKED]).prompt[1]
        assert list(found.items()) == list(message.items())  # in their order, which templates write
    else:
        with pytest.raises(ValueError, match=f"message 2: {field}:"):
            parse_request([ASKED, message, ASKED])
    for empty in (None, []):  # as servers write what is not there
        assert parse_request([ASKED, plain | {field: empty}, ASKED]).prompt[1] == plain


PLACES = [
    ({"content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "content[0]"),
    *(({"content": [{"type": "text", "text": "a"}, {"type": kind, "text": "b"}]}, "content[1].type")
      for kind in ("reasoning", "thinking", "refusal", "image", "Text", "", None, 5)),
    ({"content": [{"text": "a"}]}, "content[0].type"),
    ({"content": [{"type": "text", "text": 5}]}, "content[0].text"),
    ({"content": [{"type": "text", "text": None}]}, "content[0].text"),
    ({"content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}, "cache_control"),
    *(({"content": each}, "content") for each in (3, {}, {"text": "a"}, True, b"a", None, [])),
    *(({"content": [each]}, "content[0]") for each in (5, "a", None, ["a"])),
    ({"text": "a"}, "content"),
    ({"role": "assistant"}, "content"),
    *(({"name": name, "content": "a"}, "name") for name in (5, True, {"a": 1})),
]  # fmt: skip
CALLS = [
    ([CALL | {"type": "custom"}], "tool_calls[0].type"),
    ([CALL, {"name": "find"}], "tool_calls[1].function"),
    ([CALL | {"function": {"name": "find", "arguments": 5}}], "tool_calls[0].function.arguments"),
    ([CALL | {"function": {"arguments": {}}}], "tool_calls[0].function.name"),
    ([CALL | {"function": {"name": "find", "output": "x"}}], "tool_calls[0].function.output"),
    ([CALL | {"custom": {}}], "tool_calls[0].custom"),
    (CALL, "tool_calls"),
    ("find()", "tool_calls"),
    (["find()"], "tool_calls[0]"),
]


ROLES = [
    *((role, f"write {meant!r}") for role, meant in (
        ("Assistant", "assistant"), ("USER", "user"), ("model", "assistant"), ("ai", "assistant"),
        ("bot", "assistant"), ("human", "user"))),
    *((role, "or tool, got") for role in ("function", "", "user ", None, 5, ["user"], "other")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        *PLACES,
        *(({"role": "assistant", "tool_calls": calls}, at) for calls, at in CALLS),
        *(({"role": role, "content": "Blue."}, word) for role, word in ROLES),
    ],
)
def test_what_is_no_message_is_named_by_its_place(fields, place):
    with pytest.raises(ValueError, match=rf"message 2.*{re.escape(place)}"):
        parse_request([ASKED, {"role": "user"} | fields, ASKED])


@pytest.mark.parametrize("number", [1, 2, 3])
def test_parts_are_one_text(number):
    """Of several, it is said that they were joined."""
    parts = [
        {"type": kind, "text": kind[0], "annotations": []}
        for kind in ("text", "input_text", "output_text")[:number]
    ]
    found = parse_request(({"role": "developer", "content": parts}, ASKED))
    assert found.prompt == [{"role": "developer", "content": "tio"[:number]}, ASKED]
    assert ["message 1" in note for note in found.notes] == [True] * (number > 1)


def test_a_call_needs_no_content():
    message = SAYS | {"content": None, "tool_calls": [CALL]}
    said = parse_request([ASKED, message, {"role": "tool", "content": "7"}]).prompt[1]
    assert said == message | {"content": ""}


@pytest.mark.parametrize(
    ("last", "word"),
    [
        (SAYS, None),
        (SAYS | {"tool_calls": [], "reasoning": None, "annotations": []}, None),
        (SAYS | {"content": [{"type": "output_text", "text": " Brask"}]}, None),
        *((SAYS | {name: VALUES[name]}, name) for name in sorted(TAKEN["assistant"])),
        *((SAYS | {"content": of}, "text") for of in (None, "", [])),
        (SAYS | {"content": [{"type": "reasoning", "text": "so"}]}, "reasoning"),
    ],
)
def test_the_assistants_last_message_is_the_answer(last, word):
    if word is None:
        found = parse_request([ASKED, last])
        assert (found.prompt, found.answer, len(found.notes)) == ([ASKED], " Brask", 1)
        with pytest.raises(ValueError, match="two"):
            parse_request([ASKED, last], " Brask")
        return
    with pytest.raises(ValueError, match=word):
        parse_request([ASKED, last])


NO_PROMPTS = [
    7, None, float("nan"), b"Who?", ASKED, [], [ASKED, 5], ["Who?"], ["Who?"] * 2, [[7]], [None],
    [["role", "user"]], [SAYS], [{}],
]  # fmt: skip
NO_ANSWERS = [
    b"green", bytearray(b"green"), 3, 0.5, True, {}, {"a": 1}, ["x"], [1.5], [None], [[1]], [],
    [True, False], np.array([True]), np.array([0.5]), np.array([[7]]), torch.tensor([[7]]),
    np.array(7), [2**70], [-(2**63)],
]  # fmt: skip
BESIDE = [
    *({name: each} for name in ("tools", "documents") for each in ("x", {}, [5], ["x"], 3)),
    *({"chat_template_kwargs": each} for each in ("x", [], [1], {5: 1}, 3)),
    *({"chat_template_kwargs": {name: None}} for name in
      ("tools", "documents", "messages", "tokenize", "add_generation_prompt", "max_length")),
]  # fmt: skip
REQUESTS = [  # what is no request; see tests/scoring/test_refusals.py
    *(({"prompt": each}, "prompt|chat|message 1") for each in NO_PROMPTS),
    *(({"answer": each}, "answer|token") for each in NO_ANSWERS),
    *(({"samples": each}, "samples") for each in (5, "pear", {}, {"a": 1}, np.array(5), iter("a"))),
    *(({"samples": [each, "a"]}, "sample 1") for each in (1, None, ["a"], [1.5], {}, [2**70])),
    *(({"prompt": [ASKED]} | each, next(iter(each))) for each in BESIDE),
    *(({"prompt": "Who?", name: [{}]}, name) for name in TEMPLATE),
    ({"prompt": ["Who?"]}, "score_many"),
    ({"prompt": "Who \ud800?"}, r"prompt.*\\ud800.*character 5"),
    ({"answer": " a\udfff"}, r"answer.*\\udfff.*character 3"),
    ({"samples": [" b", " \udc00"]}, r"sample 2.*\\udc00"),
    ({"prompt": [ASKED | {"content": "\ud800"}]}, "content of message 1"),
    ({"prompt": [ASKED, SAYS | {"content": "\ud800"}]}, "answer"),
    ({"prompt": [ASKED | {"name": "\udc00"}]}, "name of message 1"),
    ({"prompt": [SAYS | {"tool_calls": [CALL | {"id": "\ud800"}]}, ASKED]},
     r"tool_calls\[0\].id of message 1"),
    ({"prompt": [SAYS | {"tool_calls": [{"function": {"name": "f", "arguments": {"\ud800": 1}}}]},
                 ASKED]}, r"name in tool_calls\[0\].function.arguments of message 1"),
]  # fmt: skip


def test_what_stands_beside_messages():
    variables = {"enable_thinking": False}
    beside = {"tools": [CALL], "documents": [{"text": "x"}], "chat_template_kwargs": variables}
    assert parse_request([ASKED], **beside).template == beside
    assert parse_request("Who?", **dict.fromkeys(TEMPLATE)).template == {}
    with pytest.raises(TypeError, match=r"Scorer\(model, stop="):
        parse_request("Who?", stop="\n")


FIELDS = ("prompt", "messages", "answer", "samples", "tools", "documents", "chat_template_kwargs",
          "id", "context", "cluster", "correct", "quality")  # fmt: skip
SPELLED = [str.upper, str.title, "{} ".format, " {}".format, "\ufeff{}".format, "{}:".format,
           "_{}_".format]  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_a_name_that_is_nearly_a_fields(field):
    names = {spell(field) for spell in SPELLED} | {field.replace("_", " "), field.replace("_", "-")}
    for name in names - {field, "ID", "Id"}:
        for row in ({"prompt": "Who?", name: "x"}, {name: "x"}):
            with pytest.raises(ValueError, match=f"{field!r}"):
                parse_row(row)
        assert parse_row({"prompt": "Who?", name: None}) == {"prompt": "Who?"}
    others = () if field == "answer" else (f"my_{field}", f"{field}2")
    for name in (*others, "question", "note"):
        assert parse_row({"prompt": "Who?", name: "x"}) == {"prompt": "Who?"}


ANSWERS = """response output completion prediction generated_text reply choices Response OUTPUT
    predicted_answer final_answer actual_output resps filtered_resps response_text answers
    Model-Output llm_answer assistant_message"""
GOLD = "gold_answer", "expected_output", "reference_answers", "correct_answer", "target"
INSIDE = "system", "system_prompt", "functions", "chat-history", "enable_thinking"


@pytest.mark.parametrize(
    ("name", "without", "beside"),
    [
        *((name, "answer", None) for name in ["Model Output", *ANSWERS.split()]),
        *((name, None, None) for name in GOLD),  # right answers are copied
        *((name, "the model", "the model") for name in INSIDE),
    ],
)
def test_fields_by_their_names(name, without, beside):
    """What stands in a row without an answer, and beside one."""
    for row, word in (({"prompt": "Who?"}, without), ({"prompt": "Who?", "answer": "a"}, beside)):
        assert parse_row(row | {name: None}) == row
        if word is None:
            assert parse_row(row | {name: " Brask"}) == row
        else:
            with pytest.raises(ValueError, match=f"'{name}'.*{word}"):
                parse_row(row | {name: " Brask"})
    assert parse_row({"prompt": "Who?", "answers": {"text": ["Brask"]}}) == {"prompt": "Who?"}


def test_what_is_used_of_a_row():
    """`tests/test_hostile_rows.py` has what is none."""
    empty = {"prompt": "Who?", "answer": ""}
    assert parse_row(empty | {"correct": False, "quality": 0}) == empty
    copied = {"id": 7, "context": "x", "ID": 8, "Id": 9}
    used = {"samples": ["a"], "tools": [CALL]}
    assert parse_row({"messages": [ASKED]} | used | copied) == {"prompt": [ASKED]} | used


CHAT = [ASKED, SAYS]
OTHERS = [
    {"from": "human", "value": "Who?"}, {"role": "user", "parts": [{"text": "Who?"}]},
    {"content": "Who?", "role": "user"}, {"sender": "user", "text": "Who?"},
    {"type": "human", "data": {"content": "Who?"}}, {"role": "model", "content": "Who?"},
]  # fmt: skip
CHATS = [
    *(each for one in (CHAT, CHAT[0], tuple(CHAT), [[*CHAT]], {"messages": CHAT}, {"chat": CHAT})
      for each in (json.dumps(one), repr(one), json.dumps(json.dumps(one)))),
    *(spell(each) for one in OTHERS for each in (one, [one]) for spell in (json.dumps, repr)),
    json.dumps(CHAT, indent=2), f"\n  {CHAT}\n", f'"{CHAT}"', str(CHAT).replace("'", '""'),
    str(CHAT).replace(", {", "\n {"), str(np.array(CHAT)), repr(np.array(CHAT)),
    json.dumps([["user", "Who?"], ["assistant", "Brask"]]), "[('human', 'Who?'), ('ai', 'Brask')]",
    "- role: user\n  content: Who?", "messages:\n- role: user\n  content: Who?\n",
    "role: user\ncontent: Who?",
    "[{'type': 'text', 'text': 'Blue.'}]", "[HumanMessage(content='Who?', additional_kwargs={})]",
    "content='Who?' additional_kwargs={} response_metadata={}", "AIMessage(content='Blue.')",
    "messages=[HumanMessage(content='Who?')]", "ChatPromptValue(messages=[AIMessage(content='')])",
    f"{'=' * 32} Human Message {'=' * 33}\n\nWho?",
    "ChatCompletionMessage(content='Blue.', refusal=None, role='assistant', tool_calls=None)",
    "Message(role='user', content='Who?')",
]  # fmt: skip
TEXTS = [
    "", "Who?", "Who is [x]?", "[1, 2, 3]", "[Music] Who sings?", '{"name": "Ondine", "built": 1}',
    "role: play", "In which role: user or assistant?", "The role: a user. The content: none.",
    '[{"name": "Ondine", "type": "ferry", "text": "built in Brask"}]', "(a) user, (b) assistant",
    'Which role has {"role": "user", "content": "Who?"}?', "def f(role='user', content=''):\n  0",
    "- from: Brask\n- to: Ondine", '{"from": "Brask", "to": "Ondine", "value": 3}', "[user] Who?",
    "User: Who?\nAssistant: Brask", "Human: Who?", "<user>Who?</user>", '["user", 1]'[1:],
    "system, user and assistant: which is missing?", "{x: x is a tool}", "SELECT role FROM users",
    "role: user", "- type: text\n- size: 5", '{"role": "assistant", "age": 5}',
    "[{'role': 'user'}]",
    '{"type": "object", "properties": {"text": {"type": "string"}}}',
]  # fmt: skip


@pytest.mark.parametrize("text", CHATS)
def test_a_chat_that_arrives_as_text(text):
    """In a prompt, an answer, a sample or a content."""
    assert chat_as_text(text)
    for given in (
        {"prompt": text},
        {"prompt": "Who?", "answer": text},
        {"prompt": "Who?", "samples": ["a", text]},
        {"prompt": [ASKED, {"role": "user", "content": text}]},
        {"prompt": [ASKED, SAYS | {"content": text}]},
    ):
        with pytest.raises(ValueError, match="list of messages"):
            parse_request(**given)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_that_are_no_chats(text):
    assert not chat_as_text(text)


def test_long_texts_are_read_in_no_time():
    """A pattern that goes back and forth would take minutes."""
    draw = random.Random(3)
    for pieces in ("[{(", "role: ", "\\\"'", "- ", "content='", 'type": "', "a [", "\n"):
        for _ in range(3):
            chat_as_text("".join(draw.choices([*pieces, pieces, " ", "x"], k=3000)))


@pytest.mark.parametrize(
    ("content", "text"),
    [("a", "a"), (None, ""), (7, "7"), (["a", {"text": "b"}], "a\nb"),
     (CHAT, "Who built it?\n Brask"), ({"content": [{"text": "a"}]}, "a")],
)  # fmt: skip
def test_text_of(content, text):
    assert text_of(content) == text
