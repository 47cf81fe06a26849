"""Special tokens written out in texts, such as "</s>": their places, or reading them as text.

A tokenizer turns such a spelling into the control token, wherever it stands.
"""

import copy
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase


class Spelling(NamedTuple):
    """A special token written out in a text, from the character `start` on."""

    token: str
    start: int


class SpecialTokens:
    """The special tokens of a tokenizer, as texts may spell them.

    Tokens that a tokenizer merely adds to its vocabulary, such as runs of spaces, are not special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer: Any = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.ids = {token.content: number for number, token in added.items() if token.special}
        self.ids |= zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        longest_first = sorted(filter(None, self.ids), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spelled(self, text: str) -> list[Spelling]:
        """The special tokens that the tokenizer reads in a text, in order."""
        spellings = [Spelling(match[0], match.start()) for match in self.pattern.finditer(text)]
        if not spellings:
            return []
        ids = set(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return [spelling for spelling in spellings if self.ids[spelling.token] in ids]


class PlainTokenizer:
    """A tokenizer that reads special tokens in texts and messages as ordinary text.

    Its own special tokens, and those of its chat template, stay: in a copy of the tokenizer every
    special token has a random name, which the template's are replaced by.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise ValueError(
                f"special_tokens 'plain' needs a fast tokenizer, got {type(tokenizer).__name__}: "
                "load it with use_fast=True"
            )
        self._tokenizer: Any = tokenizer
        self._special = SpecialTokens(tokenizer)
        self._key = secrets.token_hex(8)  # no text contains it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __call__(self, text: str, **options: Any) -> Any:
        return self._renamed(text, **options)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """As the tokenizer's; text in which the template's special tokens have other names."""
        rendered = self._tokenizer.apply_chat_template(
            self._broken(list(messages)), tokenize=False, **options
        )
        text = self._special.pattern.sub(lambda match: self._name(match[0]), str(rendered))
        text = text.replace(self._break, "")
        if not tokenize:
            return text
        encoded = self._renamed(text, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]

    @property
    def _break(self) -> str:
        """Put into special tokens of messages, so that they are not the template's."""
        return f"[{self._key}]"

    def _name(self, token: str) -> str:
        return f"<{self._key}:{self._special.ids[token]}>"

    def _broken(self, value: Any) -> Any:
        """The same value, with special tokens in its texts broken in two."""
        if isinstance(value, str):
            return self._special.pattern.sub(
                lambda match: match[0][:1] + self._break + match[0][1:], value
            )
        if isinstance(value, Mapping):
            return {name: self._broken(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [self._broken(part) for part in value]
        return value

    @cached_property
    def _renamed(self) -> Any:
        """A copy of the tokenizer whose special tokens have other names."""
        backend = json.loads(self._tokenizer.backend_tokenizer.to_str())

        def renamed(token: Any) -> Any:
            return self._name(token) if token in self._special.ids else token

        for token in backend["added_tokens"]:
            token["content"] = renamed(token["content"])
        model = backend["model"]
        vocabulary = model["vocab"]
        if isinstance(vocabulary, Mapping):
            model["vocab"] = {renamed(piece): number for piece, number in vocabulary.items()}
        else:  # pieces with their log-probabilities
            model["vocab"] = [[renamed(piece), *rest] for piece, *rest in vocabulary]
        if model.get("unk_token") is not None:
            model["unk_token"] = renamed(model["unk_token"])
        tokenizer = copy.deepcopy(self._tokenizer)
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(backend))
        return tokenizer
