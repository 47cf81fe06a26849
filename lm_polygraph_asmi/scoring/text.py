"""From text to token ids and back, with character offsets that rebuild an answer exactly."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class Asked(NamedTuple):
    """A prompt and its answer, told apart.

    Attributes:
        prompt: text, or messages whose content is text, up to the answer.
        answer: None where the model is to make one.
        notes: what was understood in a way that the caller should know.
    """

    prompt: Prompt
    answer: Answer | None
    notes: tuple[str, ...]


def asked(prompt: Prompt, answer: Answer | None = None) -> Asked:
    """What is to be scored: of a chat that ends in the assistant's message, that message.

    Raises:
        ValueError: content other than text, an answer given twice, or an answer without text.
    """
    if isinstance(prompt, str) or not _are_messages(prompt):
        return Asked(prompt, answer, ())
    messages = [{**message, **_as_text(message)} for message in prompt]
    if not messages or messages[-1].get("role") != "assistant":
        return Asked(messages, answer, ())
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
    return Asked(
        before, last["content"], ("The chat's last message, the assistant's, was scored.",)
    )


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
        ValueError: neither text nor messages; messages without a chat template or that it refuses;
            a prompt without a token.
    """
    if not (isinstance(prompt, str) or _are_messages(prompt)):
        raise ValueError(
            "a prompt is text, or a list of chat messages such as {'role': 'user', 'content': "
            f"'...'}}; got {prompt!r:.80}"
        )
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
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


def _agreed(one: str, other: str) -> int:
    """Characters that two texts have in common from their start."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


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
            end = max(end, _agreed(so_far.rstrip(UNFINISHED), whole))
        found.append((start - len(before), end - len(before)))
    return whole[len(before) :], found
