"""Convert texts to token ids and back, with the position of each token in an answer's text."""

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


def prompt_tokens(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, text: str | None = None
) -> Int[Tensor, " P"]:
    """Token ids of a prompt that an answer can follow, (P,). Arguments: see `prompt_token_ids`.

    Raises ValueError: the prompt has no token; the tokenizer appends its end token to every text;
    errors of `rendered`.
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
    """Token ids of an answer's text, and whether they continue the prompt's token ids.

    After a prompt that is a text, prompt and answer are tokenized together, and the answer has the
    tokens after the prompt's. This fails if the tokenizer merges the end of the prompt and the
    start of the answer into one token. In this case, and after a chat, the answer is tokenized
    separately.
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

    Generation ends with one of the end tokens or stop strings. A stop string is tokenized both
    separately and together with the text, since one token such as ".\\n" may hold the end of both.
    A text that already has an end is returned alone. `Engine.score` scores the most probable way.

    Returns:
        The answers, and whether their tokens continue the prompt's (`answer_tokens`).
    """
    ids, follows = answer_tokens(tokenizer, prompt, prompt_ids, text)
    if ids and conditions.closes(ids):
        return [ids], follows
    ended = [[*ids, token] for token in sorted(conditions.end_ids)]
    written = decoded(tokenizer, prompt_ids, ids)[1]
    for stop in conditions.stop_strings:
        together, _ = answer_tokens(tokenizer, prompt, prompt_ids, text + stop)
        apart = [*ids, *tokenizer(stop, add_special_tokens=False)["input_ids"]]
        candidates = [(each, decoded(tokenizer, prompt_ids, each)[1]) for each in (together, apart)]
        # A tokenizer may add a space before the stop string: a way out if no tokens fit exactly.
        exact = [each for each, whole in candidates if whole == written + stop]
        ended += exact or [each for each, whole in candidates if whole.endswith(stop)]
    # If one answer is the beginning of another, generation would have ended there.
    first: list[list[int]] = []
    for candidate in sorted(ended, key=len):
        if not any(candidate[: len(shorter)] == shorter for shorter in first):
            first.append(candidate)
    return first or [ids], follows


def spans(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], answer_ids: Sequence[int]
) -> tuple[str, list[tuple[int, int]]]:
    """An answer as text, with its special tokens, and the characters (start, end) of each token.

    The spans are contiguous and cover the text. If several tokens make up one character, the last
    of them gets it, and the spans of the others are empty.
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
    """The prompt's last tokens, which are decoded before an answer, and the answer's text.

    These are four tokens, since some tokenizers drop a text's first space. If the answer changes
    how they are decoded, it is decoded alone, and no tokens are returned.
    """
    context = list(prompt_ids[-4:])
    before, text = (decode(tokenizer, ids) for ids in (context, [*context, *answer_ids]))
    if text.startswith(before):
        return context, text[len(before) :]
    return [], decode(tokenizer, answer_ids)
