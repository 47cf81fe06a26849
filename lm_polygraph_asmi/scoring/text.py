"""From text to token ids and back, with character offsets that rebuild an answer exactly."""

import operator
import unicodedata
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages
Answer = str | Sequence[int]

UNFINISHED = "\ufffd"
"""What a decoder puts where a character has not got all of its bytes yet."""
CONTEXT = 4
"""Tokens of the prompt that are decoded along: some tokenizers drop a space at the very start."""


UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN")
"""Scripts that put no space between words, by the first word of their characters' names."""
OPENING = "([{<\"'`/\\-_@#$€£“‘«„¿¡"
"""Characters that an answer may follow without a space."""


class Request(NamedTuple):
    """A prompt and its answer, told apart.

    Attributes:
        prompt: text, or messages whose content is text, up to the answer.
        answer: None where the model is to make one.
        notes: what was understood in a way that the caller should know.
    """

    prompt: Prompt
    answer: Answer | None
    notes: tuple[str, ...]


class Query(NamedTuple):
    """What was asked to be scored.

    Attributes:
        prompt: without the answer, where it was a chat's last message.
        said: the answer; None for the model's own.
        notes: what is odd about them.
        prompt_ids: (P,) tokens of the prompt.
        answer, samples: as they were given.
    """

    prompt: Prompt
    said: Answer | None
    notes: tuple[str, ...]
    prompt_ids: Tensor
    answer: Answer | None = None
    samples: Sequence[Answer] | None = None


def parse_request(prompt: Prompt, answer: Answer | None = None) -> Request:
    """What is to be scored: of a chat that ends in the assistant's message, that message.

    Needs no model: what is refused here is refused before one is loaded.

    Raises:
        ValueError: neither text nor messages, messages without a role or text, an answer of another
            type or without a token, or one given twice.
    """
    if answer is not None:
        _check_answer(answer)
    if isinstance(prompt, str):
        return Request(prompt, answer, ())
    if not _are_messages(prompt):
        raise ValueError(
            "a prompt is text, or a list of chat messages such as {'role': 'user', 'content': "
            f"'...'}}; got {prompt!r:.80}. Many prompts are for `Scorer.score_many`"
        )
    messages = [{**message, **_as_text(message)} for message in prompt]
    if not messages or messages[-1].get("role") != "assistant":
        return Request(_checked(messages), answer, ())
    if answer is not None:
        raise ValueError(
            "the chat ends in the assistant's message and an answer is given besides: which of "
            "them is to be scored? Leave one out"
        )
    *before, last = messages
    if not (isinstance(last.get("content"), str) and last["content"]):
        raise ValueError(
            "the chat ends in a message of the assistant that holds no text: there is nothing to "
            "score. Leave it out to score the model's own answer"
        )
    if not before:
        raise ValueError("the chat holds the assistant's message alone: give the user's before it")
    note = "The chat's last message, the assistant's, was scored."
    return Request(_checked(before), last["content"], (note,))


def _check_answer(answer: Any) -> None:
    if isinstance(answer, bytes | bytearray) or not isinstance(
        answer, str | Sequence | np.ndarray | Tensor
    ):
        raise ValueError(f"an answer is text or token ids, got {answer!r:.60}")
    if isinstance(answer, np.ndarray | Tensor) and answer.ndim != 1:
        raise ValueError(
            f"an answer's token ids are one row of them, got the shape {tuple(answer.shape)}"
        )
    if not len(answer):
        raise ValueError(
            "the answer is empty: there is no token to score. Leave `answer` out to score the "
            "model's own"
        )
    if not isinstance(answer, str):
        token_ids(answer)


def token_ids(answer: Any) -> list[int]:
    """Whole numbers, whichever library they are of.

    Raises:
        ValueError: other things.
    """
    try:
        if any(isinstance(token, bool | np.bool_) for token in answer):
            raise TypeError("true and false are no token ids")
        return [operator.index(token) for token in answer]
    except TypeError as error:
        raise ValueError(f"an answer is text or a list of token ids, got {answer!r:.60}") from error


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose role and text are there: templates pass over what they do not know.

    Calls of tools have no text.
    """
    if not messages:
        raise ValueError("the chat is empty: give at least the user's message")
    for number, message in enumerate(messages, start=1):
        tools = message.get("content") is None and message.get("tool_calls")
        if isinstance(message.get("role"), str) and (
            isinstance(message.get("content"), str) or tools
        ):
            continue
        raise ValueError(
            f"message {number} of the chat lacks a role or text: wanted {{'role': 'user', "
            f"'content': '...'}}, got {message!r:.80}"
        )
    return messages


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(part, Mapping) for part in prompt)


def _as_text(message: Mapping[str, Any]) -> dict[str, str]:
    """Content given in parts as one text: not every template knows parts."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return {}
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(
                f"a message holds a part of the type {kind!r}: only text can be scored, such as "
                "{'type': 'text', 'text': '...'}"
            )
        texts.append(text)
    return {"content": "".join(texts)}


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Int[Tensor, " P"]:
    """Token ids of a prompt: a text as it is, messages through the tokenizer's chat template.

    Raises:
        ValueError: messages without a chat template or that it refuses; a prompt without a token; a
            tokenizer that puts its end token behind every text.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
        end = tokenizer.eos_token
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(str(end)):
            raise ValueError(
                f"the tokenizer puts its end token {end!r} behind the prompt, so the model would "
                "read a text that has ended: load the tokenizer with add_eos_token=False"
            )
    elif not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the prompt is a list of messages, but this tokenizer has no chat template: give the "
            "prompt as one text, as a base model reads it"
        )
    else:
        try:
            templated: Any = tokenizer.apply_chat_template(
                [dict(message) for message in prompt], add_generation_prompt=True, return_dict=True
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        ids = templated["input_ids"]
    if not ids:
        raise ValueError(
            "the prompt has no token, so nothing predicts the answer's first one: give a prompt, "
            "or one that holds the tokenizer's BOS token"
        )
    return torch.tensor(ids, dtype=torch.long)


def answer_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: str) -> list[int]:
    """Token ids of an answer where it follows its prompt.

    Where the tokenizer would merge the end of a text prompt and the start of the answer into one
    token, and behind a chat template, the answer is tokenised by itself.
    """
    if isinstance(prompt, str):
        before = tokenizer(prompt)["input_ids"]
        both = tokenizer(prompt + answer)["input_ids"]
        if both[: len(before)] == before:
            return both[len(before) :]
    return tokenizer(answer, add_special_tokens=False)["input_ids"]


def prompt_warning(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str | None:
    """What is odd about how a text prompt begins; None if nothing is."""
    first = tokenizer.bos_token_id
    if first is None or list(prompt_ids[:2]) != [first, first]:
        return None
    return (
        f"The prompt begins with {tokenizer.bos_token!r}, and the tokenizer put another one in "
        "front: leave it out of the text, or give the chat as messages."
    )


def repeated_prompt(
    prompt: Prompt, prompt_ids: Sequence[int], answer: Answer, ids: Sequence[int]
) -> str | None:
    """What to say of an answer that holds its whole prompt; None for any other."""
    own = list(ids[: len(prompt_ids)]) == list(prompt_ids)
    if isinstance(prompt, str) and isinstance(answer, str):
        own = own or answer.lstrip().startswith(prompt.lstrip())
    if not own or len(prompt_ids) < 4:  # a word may be said again
        return None
    return (
        "The answer begins with the whole prompt, as what `generate` returns does: give what "
        "follows it alone."
    )


def border_warning(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> str | None:
    """What is odd between a text prompt and its answer, and what to write; None if nothing is.

    A score is that of certain tokens: "8" and " 8" are others.
    """
    before = tokenizer(prompt)["input_ids"]
    if tokenizer(prompt + answer)["input_ids"][: len(before)] != before:
        stripped = prompt.rstrip(" ")
        advice = (
            f"end the prompt without its last space, and write the answer as {_start(' ' + answer)}"
            if stripped != prompt
            else "end the prompt where a word ends, and write the space before the answer as its "
            "first character"
        )
        return (
            "The tokenizer would join the end of the prompt and the start of the answer into one "
            f"token; they were scored apart, as no model would write them: {advice}."
        )
    if (
        _spaced(prompt[-1:])
        and prompt[-1] not in OPENING
        and _spaced(answer[0])
        and (answer[0].isalnum())
    ):
        return (
            f"The answer follows the prompt without a space: {_start(prompt[-10:] + answer)}. "
            f"Where one belongs between them, write the answer as {_start(' ' + answer)}: that is "
            "another token, and another score."
        )
    return None


def stop_warning(answer: str, stops: Sequence[str]) -> str | None:
    """What to say of an answer that goes on behind a stop string; None of any other.

    Blanks behind it say nothing: tokens such as two line breaks hold the stop and more.
    """
    for stop in stops:
        _, found, behind = answer.partition(stop)
        if found and behind.strip():
            return (
                f"The answer goes on behind the stop {stop!r}, with {_start(behind)}: all of it "
                "was scored, but a model that stops there would not have written it. End the "
                "answer before the stop, or leave this `stop` out."
            )
    return None


def _start(text: str) -> str:
    """A text as it would be written in Python; of a long one its start."""
    return repr(text) if len(text) <= 30 else f"{text[:30]!r}…"


def _spaced(character: str) -> bool:
    """Whether words are spaced where this character stands, and it is no space itself."""
    if not character or character.isspace():
        return False
    return not unicodedata.name(character, "").startswith(UNSPACED)


def behind_answer(tokenizer: PreTrainedTokenizerBase, prompt: Messages) -> list[int]:
    """Token ids that the chat template puts behind an answer; none where it takes no answer."""
    answer = "ANSWER"
    messages = [*(dict(message) for message in prompt), {"role": "assistant", "content": answer}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except TemplateError:
        return []
    _, found, behind = text.rpartition(answer)
    return tokenizer(behind, add_special_tokens=False)["input_ids"] if found else []


def spans(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> tuple[str, list[tuple[int, int]]]:
    """An answer as text, and the characters of each token: (start, end).

    The spans follow on one another and cover the text. A character of several tokens belongs to the
    last of them; the others have empty spans. Special tokens are part of the text.
    """

    def decode(ids: Sequence[int]) -> str:
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(tokenizer.decode(list(ids), **plain))

    context = list(prompt_ids[-CONTEXT:])
    before, whole = decode(context), decode([*context, *answer_ids])
    if not whole.startswith(before):  # the answer changes how the prompt's last tokens read
        context, before, whole = [], "", decode(answer_ids)
    found, end = [], len(before)
    for length in range(1, len(answer_ids) + 1):
        start = end
        if length == len(answer_ids):
            end = len(whole)
        else:
            so_far = decode([*context, *answer_ids[:length]])
            end = max(end, len(commonprefix([so_far.rstrip(UNFINISHED), whole])))
        found.append((start - len(before), end - len(before)))
    return whole[len(before) :], found
