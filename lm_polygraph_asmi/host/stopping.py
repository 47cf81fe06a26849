"""Stop conditions of generated answers: end tokens and stop strings."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model


UNFINISHED = "\ufffd"
"""The character that a decoder writes for an incomplete character."""


def decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Token ids as text, with special tokens and unchanged spaces.

    A byte that is not part of a valid character changes nothing around it. Tokenizers with byte
    fallback would also drop valid characters beside it, so that text changes when tokens are added.
    """
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    text = str(tokenizer.decode(list(ids), **options))
    if UNFINISHED not in text:
        return text
    valid = _with_valid_bytes(tokenizer, ids)
    return text if valid == list(ids) else str(tokenizer.decode(valid, **options))


def _with_valid_bytes(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """The ids, where bytes of no valid character are replaced by the bytes of UNFINISHED."""
    valid: list[int] = []
    pieces = map(str, tokenizer.convert_ids_to_tokens(list(ids)))
    # In tokenizers with byte fallback, such a token stands for one byte.
    bytes_of = (re.fullmatch("<0x([0-9A-F]{2})>", piece) for piece in pieces)
    pairs = list(zip(bytes_of, ids, strict=True))
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
    """Ids of the end tokens in a setting; ValueError if one is not in the model's vocabulary."""
    ids = configured if isinstance(configured, list | tuple) else [configured]
    ids = [number for number in ids if number is not None]
    for number in ids:
        if type(number) is not int or not 0 <= number < vocabulary:
            raise ValueError(
                f"expected {setting} to hold ids of end tokens from 0 to {vocabulary - 1} (the "
                f"model's vocabulary), got {number!r} in {configured!r:.80}. Set {setting}, or "
                "correct the model's generation_config.json or tokenizer_config.json"
            )
    return set(ids)


class StopConditions:
    """The end tokens and stop strings that end a generated answer.

    End tokens are those of the model's generation config (often several) and of the tokenizer.
    Raises ValueError: an end token is not in the model's vocabulary.
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
        return cls(model.model, model.tokenizer, model.generation_parameters.stop_strings)

    def closes(self, tokens: Sequence[int]) -> bool:
        """Whether the last token is an end token or completes a stop string.

        Stop strings that are complete before the last token do not count; a given answer may have
        them.
        """
        return tokens[-1] in self.end_ids or self._ends_stop_string(tokens)

    def without(self, text: str, places: Sequence[tuple[int, int]], tokens: Sequence[int]) -> str:
        """The text of an answer without its final end token or stop string.

        `places`: each token's characters (start, end) in the text.
        """
        last = places[-1][0]
        if tokens[-1] in self.end_ids:
            return text[:last]
        start = self._stop_start(text, last) if self._ends_stop_string(tokens) else None
        return text[:start]

    def response(self, tokens: Sequence[int], batch_size: int) -> list[int]:
        """The tokens of a generated row, up to the token that ends it.

        In a batch, a row that has ended is padded until the longest row ends. LM-Polygraph keeps
        this padding as if it were generated, unless the row ended with `tokenizer.eos_token_id`.
        """
        lengths = range(1, len(tokens)) if batch_size > 1 else ()
        ended = (length for length in lengths if self.closes(tokens[:length]))
        return list(tokens[: next(ended, len(tokens))])

    def embedded(
        self, samples: Sequence[Sequence[int]], gate_token: str, max_new_tokens: int
    ) -> list[list[int]]:
        """Cut each sampled answer after the token whose hidden state represents it in div(x).

        As in LM-Polygraph, a sample's end token is dropped, and a sample with no other token is
        left out.

        Args:
            samples: token ids of each sample.
            gate_token: "last": the last token that is left represents the sample. "second_last":
                the
                last generated token is dropped, too, since the model never ran it, unless it was
                the end token. A sample of one token becomes empty; then the prompt's last token
                represents it.
            max_new_tokens: the length at which generation stopped.
        """
        without_end = [ids[:-1] if ids and ids[-1] in self.end_ids else ids for ids in samples]
        answers = [list(ids) for ids in without_end if len(ids)]
        if gate_token == "last":
            return answers
        # All other samples ended with an end token, which was dropped above.
        return [
            ids[:-1] if len(ids) == max_new_tokens or self._ends_stop_string(ids) else ids
            for ids in answers
        ]

    def _ends_stop_string(self, tokens: Sequence[int]) -> bool:
        if not self.stop_strings:
            return False
        # The tokenizer decodes an incomplete character as �, which the next token may complete.
        before = len(decode(self.tokenizer, tokens[:-1]).rstrip(UNFINISHED))
        return self._stop_start(decode(self.tokenizer, tokens), before) is not None

    def _stop_start(self, text: str, last: int) -> int | None:
        """Start of the first stop string that ends after the character `last`; None without one."""
        starts = [text.find(stop, max(0, last - len(stop) + 1)) for stop in self.stop_strings]
        return min((start for start in starts if start >= 0), default=None)
