"""Stop conditions of a generated answer: end tokens and stop strings."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model


UNFINISHED = "\ufffd"
"""What a decoder writes for a character with missing bytes."""
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""A token that is a byte, of tokenizers with byte fallback."""


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Token ids as text: special tokens included, no space changed.

    A byte that makes no character spoils only itself. Tokenizers with byte fallback would give up
    the valid characters beside it, so that a text would change when tokens are added.
    """
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    text = str(tokenizer.decode(list(ids), **options))
    if UNFINISHED not in text:
        return text
    valid = _with_valid_bytes(tokenizer, ids)
    return text if valid == list(ids) else str(tokenizer.decode(valid, **options))


def _with_valid_bytes(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The ids, with the bytes of UNFINISHED in place of bytes that make no character."""
    valid: list[int] = []
    pieces = map(str, tokenizer.convert_ids_to_tokens(list(ids)))
    pairs = [(BYTE.fullmatch(piece), token) for piece, token in zip(pieces, ids, strict=True)]
    for in_bytes, run in groupby(pairs, lambda pair: pair[0] is not None):
        tokens = list(run)
        if in_bytes:
            content = bytes(int(match[1], 16) for match, _ in tokens if match)
            written = content.decode(errors="replace").encode()
            valid += tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in written])
        else:
            valid += [token for _, token in tokens]
    return valid


def end_tokens(setting: str, configured: Any, vocabulary: int) -> set[int]:
    """Ids of the end tokens of a setting; ValueError: one is no id of the model's vocabulary."""
    ids = configured if isinstance(configured, list | tuple) else [configured]
    ids = [number for number in ids if number is not None]
    for number in ids:
        if type(number) is not int or not 0 <= number < vocabulary:
            raise ValueError(
                f"expected as {setting} ids of tokens that end an answer, from 0 to "
                f"{vocabulary - 1}, the model's vocabulary, got {number!r} in {configured!r:.80}. "
                f"Set {setting}, or correct the model's generation_config.json or "
                "tokenizer_config.json"
            )
    return set(ids)


class StopConditions:
    """The end tokens and stop strings of generated answers.

    End tokens are those of the model's generation config, often several, and the tokenizer's.
    Raises ValueError: one of them is no id of the model's vocabulary.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str] | None = None,
    ) -> None:
        self.tokenizer: Any = tokenizer
        owners = {"model.generation_config": model.generation_config, "tokenizer": tokenizer}
        vocabulary, self.end_ids = model.config.get_text_config().vocab_size, set[int]()
        for name, owner in owners.items():
            configured = getattr(owner, "eos_token_id", None)
            self.end_ids |= end_tokens(f"{name}.eos_token_id", configured, vocabulary)
        self.stop_strings = list(stop_strings or [])

    @classmethod
    def of(cls, model: "Model") -> "StopConditions":
        """Stop conditions of a LM-Polygraph model and its `generation_parameters`."""
        stop_strings = getattr(model.generation_parameters, "stop_strings", None)
        return cls(model.model, model.tokenizer, stop_strings)

    def closes(self, tokens: Sequence[int]) -> bool:
        """Whether the last token is an end token or ends a stop string.

        Earlier stop strings, which a given answer may have, do not count.
        """
        return tokens[-1] in self.end_ids or self._ends_stop_string(tokens)

    def without(self, text: str, places: Sequence[tuple[int, int]], tokens: Sequence[int]) -> str:
        """The text of an answer without the end token or stop string at its end.

        `places` are the tokens' spans of characters in the text.
        """
        last = places[-1][0]
        if tokens[-1] in self.end_ids:
            return text[:last]
        start = self._stop_start(text, last) if self._ends_stop_string(tokens) else None
        return text[:start]

    def response(self, tokens: Sequence[int], batch_size: int) -> list[int]:
        """The tokens of a generated row up to its own end.

        In a batch of several, a row that has ended is padded until the longest one ends.
        LM-Polygraph keeps this padding as if it were generated, unless the row ended at
        `tokenizer.eos_token_id`.
        """
        lengths = range(1, len(tokens)) if batch_size > 1 else ()
        ended = (length for length in lengths if self.closes(tokens[:length]))
        return list(tokens[: next(ended, len(tokens))])

    def embedded(
        self, samples: Sequence[Sequence[int]], gate_token: str, max_new_tokens: int
    ) -> list[list[int]]:
        """Sampled answers up to the token whose hidden state represents them in div(x).

        As in LM-Polygraph, the end token of a sample is dropped, and a sample that has no other
        token is left out.

        Args:
            samples: token ids of each sample.
            gate_token: "last" keeps all tokens that are left. "second_last" also drops the last
                generated token, which was never run through the model, unless it was the end
                token. A sample of one token becomes empty: the prompt's last token represents it.
            max_new_tokens: length at which generation stopped.
        """
        without_end = [ids[:-1] if ids and ids[-1] in self.end_ids else ids for ids in samples]
        answers = [list(ids) for ids in without_end if len(ids)]
        if gate_token == "last":
            return answers
        # All others ended at an end token, which has been dropped.
        return [
            ids[:-1] if len(ids) == max_new_tokens or self._ends_stop_string(ids) else ids
            for ids in answers
        ]

    def _ends_stop_string(self, tokens: Sequence[int]) -> bool:
        if not self.stop_strings:
            return False
        # The tokenizer decodes an incomplete character as �.
        before = len(decode(self.tokenizer, tokens[:-1]).rstrip(UNFINISHED))
        return self._stop_start(decode(self.tokenizer, tokens), before) is not None

    def _stop_start(self, text: str, last: int) -> int | None:
        """Where the first stop string begins that ends after the character `last`."""
        starts = [text.find(stop, max(0, last - len(stop) + 1)) for stop in self.stop_strings]
        return min((start for start in starts if start >= 0), default=None)
