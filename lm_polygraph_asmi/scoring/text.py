"""From text to token ids and back, with character offsets that rebuild an answer exactly."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages

UNFINISHED = "\ufffd"
"""What a decoder puts where a character has not got all of its bytes yet."""
CONTEXT = 4
"""Tokens of the prompt that are decoded along: some tokenizers drop a space at the very start."""


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Int[Tensor, " P"]:
    """Token ids of a prompt: a text as it is, messages through the tokenizer's chat template.

    Raises:
        ValueError: neither text nor messages; messages without a chat template or that it refuses;
            a prompt without a token.
    """
    messages = isinstance(prompt, Sequence) and all(isinstance(part, Mapping) for part in prompt)
    if not (isinstance(prompt, str) or messages):
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
