"""Text to token ids and back, with offsets that rebuild an answer."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from os.path import commonprefix

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lm_polygraph_asmi.host.prompts import prompt_token_ids
from lm_polygraph_asmi.host.stopping import UNFINISHED, StopConditions, decode
from lm_polygraph_asmi.inputs import Prompt

CONTEXT = 4
"""Prompt tokens that are decoded before an answer: some tokenizers drop a text's first space."""


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str | None = None
) -> Int[Tensor, " P"]:
    """Token ids of a prompt that an answer can follow, (P,); arguments as of `prompt_token_ids`.

    Raises ValueError: as `rendered`; a prompt without a token; a tokenizer that appends its end
    token to every text.
    """
    ids, end = prompt_token_ids(tokenizer, prompt, text), tokenizer.eos_token
    ended = isinstance(prompt, str) and len(ids) > 1 and ids[-1] == tokenizer.eos_token_id
    if ended and not str(prompt).endswith(str(end)):
        raise ValueError(
            f"the tokenizer appends its end token {end!r} to the prompt, so no answer could "
            "follow: load the tokenizer with add_eos_token=False"
        )
    if not ids:
        raise ValueError(
            "the prompt has no token, so nothing predicts the answer's first token: pass a prompt, "
            "such as the tokenizer's BOS token"
        )
    return torch.tensor(ids, dtype=torch.long)


def answer_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, prompt_ids: Sequence[int], answer: str
) -> tuple[list[int], bool]:
    """Token ids of an answer's text, and whether they follow the prompt's in one text.

    After a text, prompt and answer are tokenized together, and the tokens after the prompt's are
    the answer's. That fails if the tokenizer merges the end of the prompt and the start of the
    answer into one token. Then, and after a chat, the answer is tokenized alone.
    """
    if isinstance(prompt, str):
        both = tokenizer(prompt + answer)["input_ids"]
        if both[: len(prompt_ids)] == list(prompt_ids):
            return both[len(prompt_ids) :], True
    return tokenizer(answer, add_special_tokens=False)["input_ids"], False


def possible_answers(
    tokenizer: PreTrainedTokenizerBase,
    conditions: StopConditions,
    prompt: Prompt,
    prompt_ids: Sequence[int],
    text: str,
) -> tuple[list[list[int]], bool]:
    """All ways in which generation may end an answer's text, as token ids.

    The text is followed by one of the end tokens, or by one of the stop strings. A stop string is
    tokenized in two ways: after the text, and together with it, since one token may hold the end
    of both, such as ".\\n". A text that has an end already is returned alone. `Engine.score` scores
    the most probable of them.

    Returns:
        The answers, and whether their tokens follow the prompt's in one text (`answer_tokens`).
    """
    ids, follows = answer_tokens(tokenizer, prompt, prompt_ids, text)
    if ids and conditions.closes(ids):
        return [ids], follows
    ended = [[*ids, token] for token in sorted(conditions.end_ids)]
    written = decoded(tokenizer, prompt_ids, ids)[1]
    for stop in conditions.stop_strings:
        together, _ = answer_tokens(tokenizer, prompt, prompt_ids, text + stop)
        apart = [*ids, *tokenizer(stop, add_special_tokens=False)["input_ids"]]
        ways = [(each, decoded(tokenizer, prompt_ids, each)[1]) for each in (together, apart)]
        # A tokenizer may put a space before the stop string. Such a way counts if no other is left.
        exact = [each for each, whole in ways if whole == written + stop]
        ended += exact or [each for each, whole in ways if whole.endswith(stop)]
    # Of two answers that begin alike, generation would have ended at the shorter one.
    first: list[list[int]] = []
    for one in sorted(ended, key=len):
        if not any(one[: len(shorter)] == shorter for shorter in first):
            first.append(one)
    return first or [ids], follows


def spans(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> tuple[str, list[tuple[int, int]]]:
    """An answer as text, special tokens included, and the characters (start, end) of each token.

    The spans are contiguous and cover the text. A character that is made of several tokens belongs
    to the last of them, and the spans of the others are empty.
    """
    context, text = decoded(tokenizer, prompt_ids, answer_ids)
    before = decode(tokenizer, context)
    starts = [answer_ids[:length] for length in range(1, len(answer_ids))]
    texts = [decode(tokenizer, [*context, *start])[len(before) :] for start in starts]
    ends = [len(commonprefix([so_far.rstrip(UNFINISHED), text])) for so_far in texts]
    return text, list(pairwise([*accumulate([0, *ends], max), len(text)]))


def decoded(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> tuple[list[int], str]:
    """The prompt's last tokens, with which an answer is decoded, and the answer's text.

    If the answer changes how these tokens decode, it is decoded alone, and they are left out.
    """
    context = list(prompt_ids[-CONTEXT:])
    before, text = (decode(tokenizer, ids) for ids in (context, [*context, *answer_ids]))
    if text.startswith(before):
        return context, text[len(before) :]
    return [], decode(tokenizer, answer_ids)
