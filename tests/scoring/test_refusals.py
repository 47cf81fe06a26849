"""What is refused before a model is loaded, in one table: settings, prompts, answers, samples."""

import numpy as np
import pytest
import torch

from lm_polygraph_asmi import score
from lm_polygraph_asmi.host import loading
from tests.scoring.conftest import PROMPT
from tests.scoring.test_text import MESSAGES

SAYS = {"role": "assistant", "content": " Brask"}


def asks(content, **fields):
    return [{"role": "user", "content": content, **fields}]


SETTINGS = [
    ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ({"max_new_tokens": "9"}, "max_new_tokens must be a whole number, got '9'"),
    ({"depth": "0.6"}, "depth must be a number, got '0.6'"),
    ({"depth": True}, "depth must be a number"),
    ({"depth": 60}, r"depth must lie in \(0, 1\)"),
    ({"num_masks": 2.5}, r"num_masks \(S\) must be a whole number, got 2.5"),
    ({"mask_rate": "0.1"}, r"mask_rate \(p\) must be a number, got '0.1'"),
    ({"top_k": 6.4}, r"top_k \(K\) must be a whole number"),
    ({"method": "raw"}, "method must be one of 'asmi', 'sem', 'adapt', got 'raw'"),
    ({"scope": "prompt"}, "scope must be one of"),
    ({"stop": 2}, "stop must be a string such as"),
    ({"stop": ["\n", 2]}, "stop must be a string such as"),
    ({"stop": [""]}, "stop must not contain an empty string"),
    ({"stop": "\udc00."}, r"stop must be text, got '\\udc00' at character 1"),
    ({"seed": "a"}, "seed must be a whole number, got 'a'"),
    ({"num_samples": 1}, "num_samples must be at least 2"),
    ({"tau": float("nan")}, "tau must be a number, got nan"),
    ({"closing_token": "no"}, "closing_token must be True or False"),
    ({"attention": 3}, "attention must be an attention implementation"),
    ({"memory_budget": "4 GB"}, "memory_budget must be a whole number"),
]
NO_PROMPTS = [7, None, {"role": "user", "content": "?"}, b"x", [[7]], [None], [PROMPT, PROMPT]]
NO_ANSWERS = [
    b"green", bytearray(b"green"), 3, {"a": 1}, ["x"], [1.5], [True, False], np.array([True]),
    np.array([[7, 8]]), torch.tensor([[7]]), np.array(7),
]  # fmt: skip
IN_CHAT = [[], [{"role": "user"}], [*MESSAGES, {"role": "user", "text": "Who?"}],
           [{"content": PROMPT}], asks(3), [*asks(None), SAYS]]  # fmt: skip
REQUESTS = [
    *((("prompt", p), "expected a prompt as text, or as a list of chat") for p in NO_PROMPTS),
    *((("answer", a), "expected an answer as text or a list of token") for a in NO_ANSWERS),
    *((("prompt", c), "the chat is empty|message [12] of the chat: expected") for c in IN_CHAT),
    (("prompt", [PROMPT]), "For many prompts use `Scorer.score_many`"),
    (("answer", []), "the answer is empty: expected at least one token id"),
    (("answer", [2**70]), "that fit into 64 bits"),
    (("samples", "pear"), "expected samples as a list of answers, got 'pear'"),
    (("samples", [" a", None]), "expected sample 2 as text or a list of token ids"),
    (("prompt", [*MESSAGES, SAYS | {"content": None}]), "has no text"),
    (("prompt", [*MESSAGES, SAYS | {"content": ""}]), "has no text"),
    (("prompt", [SAYS]), "at least the user's message before an answer"),
    (("prompt", asks([*"ab", {"type": "image", "url": "x"}])), "expected text parts of a message"),
    (("prompt", "Who \ud800?"), r"the prompt as text, got '\\ud800' at character 5, half of a"),
    (("answer", " a\udfff"), r"the answer as text, got '\\udfff' at character 3"),
    (("prompt", asks("\ud800")), "the content of message 1 as text"),
    (("prompt", [*MESSAGES, SAYS | {"content": "\ud800"}]), "the answer as text"),
    (("samples", [" b", " \udc00"]), r"the sample 2 as text, got '\\udc00' at character 2"),
    (("prompt", [{"role": "user\udc00", "content": "?"}]), "the role of message 1 as text"),
    (("prompt", asks("?", tool_calls=[{"arguments": {"a": "\udc00"}}])),
     r"the tool_calls\[0\].arguments.a of message 1 as text"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), SETTINGS, ids=str)
def test_settings(settings, message, monkeypatch):
    monkeypatch.setattr(loading, "load_model", None)
    with pytest.raises(ValueError, match=message):
        score("no such model", PROMPT, " Brask", **settings)


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_requests(number, monkeypatch):
    monkeypatch.setattr(loading, "load_model", None)
    (name, value), message = REQUESTS[number]
    with pytest.raises(ValueError, match=message):
        score("no such model", **{"prompt": PROMPT, name: value})


def test_two_answers():
    with pytest.raises(ValueError, match="expected one answer, got two"):
        score("no such model", [*MESSAGES, SAYS], " Brask")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_mask": 4}, r"num_mask; did you mean num_masks\? Settings: method, "),
        ({"foo": 4}, r"unknown setting foo\. Settings: method, depth"),
    ],
)
def test_settings_that_there_are_not(settings, message):
    with pytest.raises(TypeError, match=message):
        score("nowhere", PROMPT, **settings)
