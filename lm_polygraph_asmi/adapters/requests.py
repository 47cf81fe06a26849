"""Requests in OpenAI's format, read from the bytes of a body.

Clients send many fields at their defaults. A field at a neutral value, which leaves the greedy
answer unchanged, is accepted; any other value is an error that names the field. Errors contain no
text of a prompt or an answer.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lm_polygraph_asmi.adapters.contract import EMPTY, MESSAGE_TYPES, ROLES, UNRENDERED
from lm_polygraph_asmi.adapters.wire import RequestError
from lm_polygraph_asmi.files import parse_json

NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "answers are greedy": {
        "temperature": (0,), "top_p": (1,), "top_k": (-1, 0, 1), "min_p": (0,), "n": (1,),
        "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
        "repetition_penalty": (1,), "repeat_penalty": (1,), "length_penalty": (1,),
        "typical_p": (1,), "tfs_z": (1,), "logit_bias": ({},), "bad_words": ([],),
        "use_beam_search": (False,), "do_sample": (False,), "mirostat": (0,),
        "dry_multiplier": (0,), "xtc_probability": (0,), "dynatemp_range": (0,),
        "ignore_eos": (False,), "min_tokens": (0,), "stop_token_ids": ([],),
    },
    "answers are plain text after the prompt": {
        "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (),
        "suffix": ("",), "verbosity": ("medium",), "reasoning_effort": ("none",),
        "chat_template_kwargs": ({},), "add_generation_prompt": (True,),
        "continue_final_message": (False,), "skip_special_tokens": (True,),
        "detokenize": (True,), "return_token_ids": (False,),
        "spaces_between_special_tokens": (True,), "include_stop_str_in_output": (False,),
    },
    "tools are unsupported": {
        "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
        "function_call": ("none", "auto"), "web_search_options": (),
    },
    "the reply holds the tokens of the answer in `asmi`": {
        "logprobs": (False,), "top_logprobs": (0,), "echo": (False,),
    },
    "nothing is stored or moderated": {"store": (False,), "moderation": ()},
}  # fmt: skip
"""Reason, field, accepted values; null is accepted everywhere."""
ONLY = {name: (values, why) for why, group in NEUTRAL.items() for name, values in group.items()}
WITHOUT_EFFECT = (
    "user", "seed", "metadata", "parallel_tool_calls", "prediction", "service_tier",
    "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
    "cache_prompt", "id_slot", "repeat_last_n", "priority",
)  # fmt: skip
"""Fields without effect on a greedy answer, whatever their value."""
COMMON = ("model", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options")
MOST_MESSAGES, MOST_STOPS, LONGEST_STOP = 1000, 4, 64


@dataclass(frozen=True)
class Completion:
    """A request for an answer.

    Attributes:
        model: name of the model.
        prompt: a text, or chat messages with `role` and `content`.
        max_tokens: largest number of tokens of the answer; None: the server's.
        stop: strings that end the answer; None: the server's.
        stream: whether the answer is sent token by token.
        usage: whether a stream ends with the numbers of tokens.
    """

    model: str
    prompt: str | list[dict[str, str]]
    max_tokens: int | None
    stop: list[str] | None
    stream: bool
    usage: bool

    @classmethod
    def read(cls, body: bytes, chat: bool) -> "Completion":
        """The request in a body.

        Raises:
            RequestError: 400, no JSON; 422, a field is missing, unsupported, or of a wrong type.
        """
        fields = _fields(body)
        prompt = "messages" if chat else "prompt"
        for name, (values, why) in ONLY.items():
            if name in fields and not any(_same(fields[name], value) for value in values):
                expected = " or ".join(map(_accepted, values)) or "nothing"
                raise _wrong(name, expected, fields[name], why)
        _only(fields, (*COMMON, prompt, *ONLY, *WITHOUT_EFFECT))
        length, other = (_count(fields, f"max_{kind}tokens") for kind in ("completion_", ""))
        if length and other and length != other:
            raise RequestError(
                422, f"expected the same number as max_completion_tokens, got {other}", "max_tokens"
            )
        options = fields.get("stream_options", {})
        if not isinstance(options, dict):
            raise _wrong("stream_options", "an object", options)
        _only(options, ("include_usage", "include_obfuscation"), "stream_options.")
        return cls(
            _text(fields.get("model"), "model"),
            _messages(fields.get(prompt)) if chat else _prompt(fields.get(prompt)),
            length or other,
            _stops(fields.get("stop")),
            _flag(fields, "stream"),
            _flag(options, "include_usage", "stream_options."),
        )


@dataclass(frozen=True)
class ScoreRequest:
    """A request to `/score`: a prompt or messages, and answers.

    Attributes:
        model: name of the model; None: the one there is.
        prompt: a text, or chat messages with `role` and `content`.
        answers: texts to score.
        listed: whether they came as a list.
    """

    model: str | None
    prompt: str | list[dict[str, str]]
    answers: list[str]
    listed: bool

    @classmethod
    def read(cls, body: bytes) -> "ScoreRequest":
        """The request in a body; raises as `Completion.read`."""
        fields = _fields(body)
        _only(fields, ("model", "prompt", "messages", "answer"))
        if ("prompt" in fields) == ("messages" in fields):
            raise RequestError(422, "expected either prompt or messages", "prompt")
        chat, answer = "messages" in fields, fields.get("answer")
        answers = _named("answer", answer)
        if not answers:
            raise RequestError(422, "expected a text or a list of texts, got none", "answer")
        return cls(
            _text(fields["model"], "model") if "model" in fields else None,
            _messages(fields["messages"]) if chat else _prompt(fields["prompt"]),
            [_text(text, name) for name, text in answers],
            isinstance(answer, list),
        )


def _fields(body: bytes) -> dict[str, Any]:
    """The fields of a body that are not null."""
    if not body.strip():
        raise RequestError(400, "the body is empty: expected a JSON object")
    try:
        content = parse_json(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8: byte {error.start + 1}") from None
    except ValueError as error:
        raise RequestError(400, f"the body: {str(error)[:300]}") from None
    except RecursionError:
        raise RequestError(400, "the body: nested too deeply") from None
    if not isinstance(content, dict):
        raise RequestError(422, f"expected a JSON object as body, got {_kind(content)}")
    return {name: value for name, value in content.items() if value is not None}


def _only(fields: Mapping[str, Any], names: tuple[str, ...], parent: str = "") -> None:
    """Raise if there is another field."""
    for name in fields:
        if name not in names:
            field = parent + name[:40].encode("ascii", "backslashreplace").decode()
            raise RequestError(422, "there is no such field", field, "unknown_parameter")


def _same(value: Any, neutral: Any) -> bool:
    """Equality that tells true from 1."""
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _kind(value: Any) -> str:
    """A value for messages: numbers as they are, other values by their kind in JSON."""
    if value is None:
        return "nothing"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    return {"str": "a text", "list": "a list", "dict": "an object"}[type(value).__name__]


def _accepted(value: Any) -> str:
    """A neutral value for messages."""
    empty = value in ([], {}, "")
    return f"an empty {_kind(value).split()[-1]}" if empty else json.dumps(value)


def _wrong(field: str, expected: str, value: Any, why: str = "") -> RequestError:
    reason = f"; {why}" if why else ""
    code = "unsupported_value" if why else None
    return RequestError(422, f"expected {expected}, got {_kind(value)}{reason}", field, code)


def _flag(fields: Mapping[str, Any], name: str, parent: str = "") -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(parent + name, "true or false", value)
    return bool(value)


def _count(fields: Mapping[str, Any], name: str) -> int | None:
    value = fields.get(name)
    if isinstance(value, float) and value.is_integer():  # JavaScript has one kind of number
        value = int(value)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise _wrong(name, "a whole number of at least 1", value)
    return value


def _text(value: Any, field: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str):
        raise _wrong(field, "a text", value)
    if not value:
        raise RequestError(422, "expected a text of at least one character", field)
    return value


def _named(field: str, value: Any) -> list[tuple[str, Any]]:
    """A value, or each value of a list, with its name in messages."""
    if not isinstance(value, list):
        return [(field, value)]
    return [(f"{field}[{index}]", part) for index, part in enumerate(value)]


def _prompt(value: Any) -> str:
    """The prompt, also as a list of one text."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str):
        value = value[0]
    if isinstance(value, list):
        ids = any(isinstance(part, int | list) for part in value)
        got = "token ids" if ids else f"a list of {len(value)}"
        raise RequestError(422, f"expected one text, or a list of one, got {got}", "prompt")
    return _text(value, "prompt")


def _stops(value: Any) -> list[str] | None:
    """Stop strings; an empty list says nothing, as null."""
    if value is None or value == []:
        return None
    stops = _named("stop", value)
    if len(stops) > MOST_STOPS:
        raise RequestError(422, f"expected at most {MOST_STOPS} texts, got {len(stops)}", "stop")
    for name, stop in stops:
        if len(_text(stop, name)) > LONGEST_STOP:
            message = f"expected at most {LONGEST_STOP} characters, got {len(stop)}"
            raise RequestError(422, message, name)
    return [stop for _, stop in stops]


def _messages(value: Any) -> list[dict[str, str]]:
    """The messages of a chat, each with `role` and `content` as a text."""
    if not isinstance(value, list):
        raise _wrong("messages", "a list of messages", value)
    if not 1 <= len(value) <= MOST_MESSAGES:
        message = f"expected 1 to {MOST_MESSAGES} messages, got {len(value)}"
        raise RequestError(422, message, "messages")
    messages = [_message(message, name) for name, message in _named("messages", value)]
    if messages[-1]["role"] == "assistant":
        message = "expected the last message from the user, got the assistant's"
        raise RequestError(422, f"{message}: /score takes it as `answer`", "messages")
    return messages


def _message(value: Any, field: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(field, "a message with role and content", value)
    role = _word(value.get("role"), ROLES, f"{field}.role")
    if value.get("type") is not None:
        _word(value["type"], MESSAGE_TYPES, f"{field}.type")
    _unrendered(value, ("role", "content", "type"), field)
    content = value.get("content")
    if role != "user" and content in (None, "", []):  # turns that had no text
        return {"role": ROLES[role], "content": ""}
    return {"role": ROLES[role], "content": _content(content, f"{field}.content")}


def _content(value: Any, field: str) -> str:
    """The content of a message: a text, or parts that are texts."""
    if not isinstance(value, list):
        return _text(value, field)
    texts = []
    for place, part in _named(field, value):
        if not isinstance(part, dict):
            raise _wrong(place, 'a part such as {"type": "text", "text": "..."}', part)
        _word(part.get("type"), ("text",), f"{place}.type")
        _unrendered(part, ("type", "text"), place)
        text = part.get("text")
        texts.append("" if text == "" else _text(text, f"{place}.text"))
    return _text("".join(texts), field)


def _word(value: Any, words: Any, field: str) -> str:
    """One of some words."""
    if isinstance(value, str) and value in words:
        return value
    # A short identifier is quoted, since it is not a part of a prompt.
    word = isinstance(value, str) and re.fullmatch("[a-z_]{1,24}", value)
    got = repr(value) if word else _kind(value)
    raise RequestError(422, f"expected {' or '.join(words)}, got {got}", field, "unsupported_value")


def _unrendered(fields: Mapping[str, Any], rendered: tuple[str, ...], parent: str) -> None:
    """Raise if another field than those rendered holds something."""
    _only(
        {name: value for name, value in fields.items() if value not in EMPTY},
        (*rendered, *UNRENDERED),
        f"{parent}.",
    )
