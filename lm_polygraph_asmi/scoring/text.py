"""Text to token ids and back, with character offsets that rebuild an answer exactly."""

import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lm_polygraph_asmi.files import DEPTH
from lm_polygraph_asmi.host.stopping import UNFINISHED, decode
from lm_polygraph_asmi.validation import describe_fields, is_unspaced, lone_surrogate

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages
Answer = str | Sequence[int]

CONTEXT = 4
"""Prompt tokens decoded with the answer: some tokenizers drop a space at the start."""

TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
)  # fmt: skip
"""Errors of a chat template that does not support a chat."""
END_TOKENS = 64
"""Last tokens of a prompt that an answer may repeat."""
OPENING = "([{<\"'`/\\-_@#$€£“‘«„¿¡"
"""Characters that an answer may follow without a space."""


class Request(NamedTuple):
    """One answer to score, separated from its prompt.

    Attributes:
        prompt: text, or messages with text content, up to the answer.
        answer: None: the model generates one.
        samples: sampled answers; None: the model generates them where they are needed.
        notes: how the input was interpreted, where the caller should know.
    """

    prompt: Prompt
    answer: Answer | None = None
    samples: Sequence[Answer] | None = None
    notes: tuple[str, ...] = ()

    def noted(self, notes: Sequence[str]) -> "Request":
        """The request with further notes."""
        return self._replace(notes=(*self.notes, *notes))


def parse_request(
    prompt: Prompt, answer: Answer | None = None, samples: Sequence[Answer] | None = None
) -> Request:
    """Separate prompt and answer: the assistant's last message of a chat is the answer.

    Runs without a model, so that errors are raised before one is loaded.

    Raises:
        ValueError: neither text nor messages, a message without role or text, an answer of another
            type, empty, or passed twice; samples that are no list of answers; half of a surrogate
            pair anywhere.
    """
    _check_samples(samples)
    if answer is not None:
        _check_answer(answer)
    if isinstance(prompt, str):
        _check_texts(prompt)
        return Request(prompt, answer, samples)
    if not _are_messages(prompt):
        raise ValueError(
            "expected a prompt as text, or as a list of chat messages such as {'role': 'user', "
            f"'content': '...'}}; got {prompt!r:.80}. For many prompts use `Scorer.score_many`"
        )
    messages = [{**message, **_as_text(message)} for message in prompt]
    if not messages or messages[-1].get("role") != "assistant":
        return Request(_checked(messages), answer, samples)
    if answer is not None:
        raise ValueError(
            "expected one answer, got two: the chat's last message from the assistant, and "
            "`answer`. Leave one out"
        )
    *before, last = messages
    if not (isinstance(last.get("content"), str) and last["content"]):
        raise ValueError(
            "the chat's last message, the assistant's, has no text. Leave it out to score the "
            "model's own answer"
        )
    if not before:
        raise ValueError("expected a user message before the assistant's, got none")
    _check_text("the last message", last["content"])
    note = "The chat's last message, the assistant's, was scored."
    return Request(_checked(before), last["content"], samples, (note,))


def row_request(row: Any) -> Request:
    """The request of a row, a text or a mapping.

    Raises:
        ValueError: a row without a prompt; else as `parse_request`.
    """
    content: Any = {"prompt": row} if isinstance(row, str) else row
    if not isinstance(content, Mapping) or content.get("prompt") is None:
        raise ValueError(
            f'expected a text, or an object with a "prompt", got {describe_fields(content)}'
        )
    return parse_request(content["prompt"], content.get("answer"), content.get("samples"))


def _check_answer(answer: Any) -> None:
    if isinstance(answer, bytes | bytearray) or not isinstance(
        answer, str | Sequence | np.ndarray | Tensor
    ):
        raise ValueError(f"expected an answer as text or token ids, got {answer!r:.60}")
    if isinstance(answer, np.ndarray | Tensor) and answer.ndim != 1:
        raise ValueError(f"expected an answer's token ids of shape (T,), got {tuple(answer.shape)}")
    if not len(answer):
        raise ValueError(
            "the answer is empty: expected at least one token. Leave `answer` out to score the "
            "model's own"
        )
    if isinstance(answer, str):
        _check_text("the answer", answer)
    else:
        token_ids(answer)


def _check_samples(samples: Any) -> None:
    if samples is None:
        return
    scalar = not hasattr(samples, "__len__") or getattr(samples, "ndim", 1) == 0
    if scalar or isinstance(samples, str | bytes | Mapping):
        raise ValueError(f"expected samples as a list of answers, got {samples!r:.60}")
    for number, sample in enumerate(samples, start=1):
        if isinstance(sample, str):
            _check_text(f"sample {number}", sample)
        else:
            token_ids(sample, f"sample {number}")


def texts_of(prompt: Prompt) -> Iterator[tuple[str, str]]:
    """The texts of a prompt, with names: "prompt", "content of message 1", "name of message 2".

    Of messages, all texts in all fields, such as the arguments of tool calls and their names.
    """
    if isinstance(prompt, str):
        yield "prompt", prompt
        return
    for number, message in enumerate(prompt, start=1):
        for field, value in message.items():
            for path, text in _texts(value, str(field), 0):
                yield f"{path} of message {number}", text


def _texts(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    if depth > DEPTH:
        raise ValueError(
            f"expected at most {DEPTH} nested lists and objects in a message, got more in "
            f"{re.split(r'[.[]', path)[0]!r}: flatten it"
        )
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield f"a name in {path}", str(name)
            yield from _texts(part, f"{path}.{name}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _texts(part, f"{path}[{index}]", depth + 1)


def _check_texts(prompt: Prompt) -> None:
    for name, text in texts_of(prompt):
        _check_text(f"the {name}", text)


def _check_text(name: str, text: str) -> None:
    if half := lone_surrogate(text):
        raise ValueError(f"expected {name} as text, got {half}: replace it")


def token_ids(answer: Any, name: str = "an answer") -> list[int]:
    """Token ids of any library as integers.

    Args:
        name: of the answer in messages.

    Raises:
        ValueError: not integers of 64 bits.
    """
    try:
        if isinstance(answer, Mapping) or any(isinstance(t, bool | np.bool_) for t in answer):
            raise TypeError("expected integers, got an object or booleans")
        ids = [operator.index(token) for token in answer]
    except TypeError as error:
        raise ValueError(
            f"expected {name} as text or a list of token ids, got {answer!r:.60}"
        ) from error
    if any(abs(token) >= 2**63 for token in ids):
        raise ValueError(f"expected token ids of {name} that fit into 64 bits, got {ids!r:.60}")
    return ids


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Check that messages have role and text, as templates silently skip others.

    Tool calls need no text.
    """
    if not messages:
        raise ValueError("the chat is empty: expected at least the user's message")
    for number, message in enumerate(messages, start=1):
        tools = message.get("content") is None and message.get("tool_calls")
        if isinstance(message.get("role"), str) and (
            isinstance(message.get("content"), str) or tools
        ):
            continue
        raise ValueError(
            f"message {number} of the chat: expected {{'role': 'user', 'content': '...'}}, got "
            f"{message!r:.80}"
        )
    _check_texts(messages)
    return messages


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and all(isinstance(part, Mapping) for part in prompt)


def _as_text(message: Mapping[str, Any]) -> dict[str, str]:
    """Join content in parts into one text, as not every template supports parts."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return {}
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ValueError(
                "expected text parts of a message, such as {'type': 'text', 'text': '...'}; got a "
                f"part of the type {kind!r}"
            )
        texts.append(text)
    return {"content": "".join(texts)}


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> Int[Tensor, " P"]:
    """Token ids of a prompt, (P,); the tokenizer's chat template is applied to messages.

    Raises:
        ValueError: messages that the chat template does not support, or no template; a prompt
            without a token; a tokenizer that appends its end token to every text.
    """
    if isinstance(prompt, str):
        ids = tokenizer(prompt)["input_ids"]
        end = tokenizer.eos_token
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and not prompt.endswith(str(end)):
            raise ValueError(
                f"the tokenizer appends its end token {end!r} to the prompt, so no answer could "
                "follow: load the tokenizer with add_eos_token=False"
            )
    elif not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the prompt is a list of messages, but this tokenizer has no chat template: pass the "
            "prompt as text"
        )
    else:
        try:
            templated: Any = tokenizer.apply_chat_template(
                [dict(message) for message in prompt], add_generation_prompt=True, return_dict=True
            )
        except TEMPLATE_ERRORS as error:
            raise ValueError(
                f"the chat template does not support these messages: {error}"
            ) from error
        ids = templated["input_ids"]
    if not ids:
        raise ValueError(
            "the prompt has no token, so nothing predicts the answer's first token: pass a prompt, "
            "such as the tokenizer's BOS token"
        )
    return torch.tensor(ids, dtype=torch.long)


def answer_tokens(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, answer: str) -> list[int]:
    """Token ids of an answer after its prompt.

    After a chat template, or if the tokenizer would merge the end of the prompt and the start of
    the answer into one token, the answer is tokenized separately.
    """
    if isinstance(prompt, str):
        before = tokenizer(prompt)["input_ids"]
        both = tokenizer(prompt + answer)["input_ids"]
        if both[: len(before)] == before:
            return both[len(before) :]
    return tokenizer(answer, add_special_tokens=False)["input_ids"]


def prompt_warning(tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int]) -> str | None:
    """Warning about the start of a text prompt, or None."""
    first = tokenizer.bos_token_id
    if first is None or list(prompt_ids[:2]) != [first, first]:
        return None
    return (
        f"The prompt begins with {tokenizer.bos_token!r}, and the tokenizer added another: leave "
        "it out of the text, or pass the chat as messages."
    )


def unknown_warning(tokenizer: Any, prompt_ids: Sequence[int]) -> str | None:
    """Warning about characters of a prompt that the tokenizer has no token for, or None."""
    unknown, spelled = tokenizer.unk_token_id, tokenizer.unk_token
    count = list(prompt_ids).count(unknown)
    if not count or spelled in (tokenizer.bos_token, tokenizer.eos_token):
        return None
    return (
        f"The tokenizer has no token for parts of the prompt: {count} of its {len(prompt_ids)} "
        f"tokens are {spelled!r}, and the model does not see what they stood for."
    )


def repeated_prompt(
    prompt: Prompt, prompt_ids: Sequence[int], answer: Answer, ids: Sequence[int]
) -> str | None:
    """Warning if the answer starts with its whole prompt, or None."""
    repeated = list(ids[: len(prompt_ids)]) == list(prompt_ids)
    if isinstance(prompt, str) and isinstance(answer, str):
        repeated = repeated or answer.lstrip().startswith(prompt.lstrip())
    if not repeated or len(prompt_ids) < 4:  # a short prompt may be repeated
        return None
    return (
        "The answer begins with the whole prompt, like the output of `generate`: pass only what "
        "follows the prompt."
    )


def repeated_end(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer: str
) -> str | None:
    """Warning if the answer starts with the end of its prompt, such as "<think>", or None.

    Words that go on, as in a list, are none: the end is a mark such as "Answer:", or a whole line.
    """
    ids = list(prompt_ids[-END_TOKENS:])
    plain = decode(tokenizer, [token for token in ids if token not in tokenizer.all_special_ids])
    start = answer.lstrip()
    for before in (decode(tokenizer, ids).rstrip(), plain.rstrip()):
        lengths = range(min(len(before), len(start)), 1, -1)
        end = next((start[:n] for n in lengths if before.endswith(start[:n])), "").rstrip()
        is_line = before.removesuffix(end).endswith("\n")
        is_mark = not (end[-1:].isalnum() or end.endswith(","))
        if re.search(r"\w", end) and (is_line or is_mark) and end != plain.strip():
            return (
                f"The answer repeats the end of the prompt, {end!r}: pass only what follows the "
                "prompt."
            )
    return None


def border_warning(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> str | None:
    """Warning about the border between a text prompt and its answer, with advice, or None.

    The score depends on the tokens: "8" and " 8" differ.
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
            "The tokenizer would merge the end of the prompt and the start of the answer into one "
            f"token; they were scored as two, which no model would generate: {advice}."
        )
    if (
        _spaced(prompt[-1:])
        and prompt[-1] not in OPENING
        and _spaced(answer[0])
        and (answer[0].isalnum())
    ):
        return (
            f"The answer follows the prompt without a space: {_start(prompt[-10:] + answer)}. "
            f"If one belongs between them, write the answer as {_start(' ' + answer)}: its token "
            "and score differ."
        )
    return None


def stop_warning(answer: str, stops: Sequence[str]) -> str | None:
    """Warning if an answer continues after a stop string, or None.

    Blanks after it do not count: a token of two line breaks holds the stop and more.
    """
    for stop in stops:
        _, separator, rest = answer.partition(stop)
        if separator and rest.strip():
            return (
                f"The answer continues after the stop {stop!r}, with {_start(rest)}: all of it was "
                "scored, but a model that stops there would not generate it. End the answer before "
                "the stop, or leave this `stop` out."
            )
    return None


def _start(text: str) -> str:
    """repr of a text, or of its first 30 characters."""
    return repr(text) if len(text) <= 30 else f"{text[:30]!r}…"


def _spaced(character: str) -> bool:
    """Whether this is a non-space character of a script with spaces between words."""
    if not character or character.isspace():
        return False
    return not is_unspaced(character)


def decoded(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> str:
    """An answer as text, special tokens included."""
    return _decoded(tokenizer, prompt_ids, answer_ids)[1]


def spans(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> tuple[str, list[tuple[int, int]]]:
    """An answer as text, and the characters (start, end) of each token.

    The spans are contiguous and cover the text. A character of several tokens belongs to the last;
    the others have empty spans. Special tokens are part of the text.
    """

    context, text = _decoded(tokenizer, prompt_ids, answer_ids)
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


def _decoded(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> tuple[list[int], str]:
    """The prompt's last tokens that were decoded with an answer, and its text."""
    context = list(prompt_ids[-CONTEXT:])
    before, text = (decode(tokenizer, ids) for ids in (context, [*context, *answer_ids]))
    if text.startswith(before):
        return context, text[len(before) :]
    return [], decode(tokenizer, answer_ids)  # it changes how the prompt's last tokens decode
