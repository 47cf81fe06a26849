"""What a user passes, checked; text to token ids and back, with offsets that rebuild an answer."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lm_polygraph_asmi.host.stopping import UNFINISHED, StopConditions, decode
from lm_polygraph_asmi.validation import lone_surrogate

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages
Answer = str | Sequence[int]

CONTEXT = 4
"""Prompt tokens decoded with the answer: some tokenizers drop a space at the start."""


class Request(NamedTuple):
    """One answer to score, separated from its prompt."""

    prompt: Prompt  # text, or messages with text content, up to the answer
    answer: Answer | None = None  # None: the model generates one, and the samples that it needs
    samples: Sequence[Answer] | None = None
    notes: tuple[str, ...] = ()  # how the input was interpreted, where the caller should know

    def texts(self) -> Iterator[tuple[str, str]]:
        """All texts, with names: as of `texts_of`, "answer", "sample 1"."""
        yield from texts_of(self.prompt)
        samples = ((f"sample {n}", text) for n, text in enumerate(self.samples or (), start=1))
        yield from (
            (n, text) for n, text in (("answer", self.answer), *samples) if isinstance(text, str)
        )


def parse_request(
    prompt: Prompt, answer: Answer | None = None, samples: Sequence[Answer] | None = None
) -> Request:
    """Separate prompt and answer: the assistant's last message of a chat is the answer.

    Runs without a model, so that errors are raised before one is loaded. Raises ValueError:
    neither text nor messages, a message without role or text, an answer of another type or passed
    twice; samples that are no list of answers; half of a surrogate pair anywhere.
    """
    samples = _checked_samples(samples)
    answer = None if answer is None else _checked_answer(answer, "an answer")
    if isinstance(answer, list) and not answer:
        raise ValueError(
            "the answer is empty: expected at least one token id. Leave `answer` out to score the "
            "model's own"
        )
    notes: tuple[str, ...] = ()
    if not isinstance(prompt, str):
        prompt, answer, notes = _from_chat(prompt, answer)
    request = Request(prompt, answer, samples, notes)
    for name, text in request.texts():
        if half := lone_surrogate(text):
            raise ValueError(f"expected the {name} as text, got {half}: replace it")
    return request


def _from_chat(
    chat: Any, answer: Answer | None
) -> tuple[list[dict[str, Any]], Answer | None, tuple[str, ...]]:
    """Messages before the answer, the answer, and a note if it is the chat's last message."""
    if not (isinstance(chat, Sequence) and all(isinstance(part, Mapping) for part in chat)):
        raise ValueError(
            "expected a prompt as text, or as a list of chat messages such as {'role': 'user', "
            f"'content': '...'}}; got {chat!r:.80}. For many prompts use `Scorer.score_many`"
        )
    messages: list[dict[str, Any]] = [{**message, **_as_text(message)} for message in chat]
    if not messages or messages[-1].get("role") != "assistant":
        return _checked(messages), answer, ()
    content = messages.pop().get("content")
    if answer is not None:
        raise ValueError(
            "expected one answer, got two: the chat's last message from the assistant, and "
            "`answer`. Leave one out"
        )
    if not (isinstance(content, str) and content):
        raise ValueError(
            "the chat's last message, the assistant's, has no text. Leave it out to score the "
            "model's own answer"
        )
    return _checked(messages), content, ("The chat's last message, the assistant's, was scored.",)


def _checked_answer(answer: Any, name: str) -> str | list[int]:
    return answer if isinstance(answer, str) else token_ids(answer, name)


def _checked_samples(samples: Any) -> list[str | list[int]] | None:
    if samples is None:
        return None
    scalar = not hasattr(samples, "__len__") or getattr(samples, "ndim", 1) == 0
    if scalar or isinstance(samples, str | bytes | Mapping):
        raise ValueError(f"expected samples as a list of answers, got {samples!r:.60}")
    names = (f"sample {number}" for number in range(1, len(samples) + 1))
    return [_checked_answer(one, name) for one, name in zip(samples, names, strict=True)]


def token_ids(answer: Any, name: str = "an answer") -> list[int]:
    """Token ids of any library, (T,), as integers; ValueError, with the name: none of 64 bits."""
    try:
        other = getattr(answer, "ndim", 1) != 1 or isinstance(answer, Mapping | bytes | bytearray)
        if other or any(isinstance(token, bool | np.bool_) for token in answer):
            raise TypeError("expected integers, got an object, bytes, booleans or several rows")
        ids = [operator.index(token) for token in answer]
    except TypeError as error:
        raise ValueError(
            f"expected {name} as text or a list of token ids, got {answer!r:.60}"
        ) from error
    if any(abs(token) >= 2**63 for token in ids):
        raise ValueError(f"expected token ids of {name} that fit into 64 bits, got {ids!r:.60}")
    return ids


def texts_of(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """The texts of a prompt, with names: "prompt", "content of message 1", "name of message 2".

    Of messages, all texts in all fields, such as the arguments of tool calls and their names.
    """
    if isinstance(prompt, str):
        yield "prompt", prompt
        return
    for number, message in enumerate(prompt, start=1):
        for field, value in message.items():
            for path, text in _texts(value, str(field)):
                yield f"{path} of message {number}", text


def _texts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield f"name in {path}", str(name)
            yield from _texts(part, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _texts(part, f"{path}[{index}]")


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with role and text, as templates silently skip others; tool calls need no text."""
    if not messages:
        raise ValueError("the chat is empty: expected at least the user's message before an answer")
    for number, message in enumerate(messages, start=1):
        content = message.get("content")
        has_text = isinstance(content, str) or (content is None and message.get("tool_calls"))
        if not (isinstance(message.get("role"), str) and has_text):
            raise ValueError(
                f"message {number} of the chat: expected {{'role': 'user', 'content': '...'}}, "
                f"got {message!r:.80}"
            )
    return messages


def _as_text(message: Mapping[str, Any]) -> dict[str, str]:
    """Join content in parts into one text, as not every template supports parts."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return {}
    texts: list[Any] = [p.get("text") if isinstance(p, Mapping) else p for p in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            "expected text parts of a message, such as {'type': 'text', 'text': '...'}; got "
            f"{parts!r:.80}"
        )
    return {"content": "".join(texts)}


def rendered(tokenizer: Any, prompt: Prompt) -> str:
    """The prompt as one text; messages as the chat template writes them, else ValueError."""
    if isinstance(prompt, str):
        return prompt
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the prompt is a list of messages, but this tokenizer has no chat template: pass the "
            "prompt as text"
        )
    messages = [dict(message) for message in prompt]
    try:
        options = {"add_generation_prompt": True, "tokenize": False}
        return str(tokenizer.apply_chat_template(messages, **options))
    except Exception as error:  # a template may raise any
        raise ValueError(f"the chat template does not support these messages: {error}") from error


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str | None = None
) -> Int[Tensor, " P"]:
    """Token ids of a prompt, (P,).

    `text`: of messages, if they are `rendered` already. Raises ValueError: as `rendered`; a prompt
    without a token; a tokenizer that appends its end token to every text.
    """
    if isinstance(prompt, str):
        ids, end = tokenizer(prompt)["input_ids"], tokenizer.eos_token
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(str(end)):
            raise ValueError(
                f"the tokenizer appends its end token {end!r} to the prompt, so no answer could "
                "follow: load the tokenizer with add_eos_token=False"
            )
    else:
        text = rendered(tokenizer, prompt) if text is None else text
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise ValueError(
            "the prompt has no token, so nothing predicts the answer's first token: pass a prompt, "
            "such as the tokenizer's BOS token"
        )
    return torch.tensor(ids, dtype=torch.long)


def answer_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, prompt_ids: Sequence[int], answer: str
) -> tuple[list[int], bool]:
    """Token ids of an answer after its prompt; whether they are those that follow it in one text.

    After a chat template, or if the tokenizer would merge the end of the prompt and the start of
    the answer into one token, the answer is tokenized separately.
    """
    if isinstance(prompt, str):
        both = tokenizer(prompt + answer)["input_ids"]
        if both[: len(prompt_ids)] == list(prompt_ids):
            return both[len(prompt_ids) :], True
    return tokenizer(answer, add_special_tokens=False)["input_ids"], False


def possible_ends(
    tokenizer: PreTrainedTokenizerBase,
    conditions: StopConditions,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    text: str,
    ids: Sequence[int],
) -> list[list[int]]:
    """Token ids of each end that generation may give a text: end tokens and stop strings.

    `Engine.score` takes the most probable. None if the text, with the tokens `ids`, has an end.
    """
    if ids and conditions.closes(ids):
        return []
    ends = [[token] for token in sorted(conditions.end_ids)]
    for stop in conditions.stop_strings:
        whole, _ = answer_tokens(tokenizer, prompt, prompt_ids, text + stop)
        end = whole[len(ids) :]
        if whole[: len(ids)] != ids:  # the stop string merges with the text
            end = tokenizer(stop, add_special_tokens=False)["input_ids"]
        _, ended = decoded(tokenizer, prompt_ids, [*ids, *end])
        if end not in ends and ended.endswith(stop):
            ends.append(end)
    return ends


def spans(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> tuple[str, list[tuple[int, int]]]:
    """An answer as text, and the characters (start, end) of each token.

    The spans are contiguous and cover the text. A character of several tokens belongs to the last;
    the others have empty spans. Special tokens are part of the text.
    """
    context, text = decoded(tokenizer, prompt_ids, answer_ids)
    before = decode(tokenizer, context)
    offsets, end = [], 0
    for length in range(1, len(answer_ids) + 1):
        start = end
        if length == len(answer_ids):
            end = len(text)
        else:
            so_far = decode(tokenizer, [*context, *answer_ids[:length]])[len(before) :]
            end = max(end, len(commonprefix([so_far.rstrip(UNFINISHED), text])))
        offsets.append((start, end))
    return text, offsets


def decoded(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> tuple[list[int], str]:
    """The prompt's last tokens that were decoded with an answer, and its text."""
    context = list(prompt_ids[-CONTEXT:])
    before, text = (decode(tokenizer, ids) for ids in (context, [*context, *answer_ids]))
    if text.startswith(before):
        return context, text[len(before) :]
    return [], decode(tokenizer, answer_ids)  # it changes how the prompt's last tokens decode
