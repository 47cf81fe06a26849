"""Find special tokens that are spelled out in texts, such as "</s>".

A tokenizer turns such a spelling into the control token, wherever it appears in a text.
"""

import re
from typing import Any

from transformers import PreTrainedTokenizerBase


class SpecialTokens:
    """The special tokens of a tokenizer, as they are spelled in texts.

    Tokens that were only added to the vocabulary, such as runs of spaces, are not special.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer: Any = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self.ids = {token.content: number for number, token in added.items() if token.special}
        self.ids |= zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        longest_first = sorted(filter(None, self.ids), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spelled(self, text: str) -> list[tuple[str, int]]:
        """The special tokens that the tokenizer reads in a text, and where they begin, in order."""
        spellings = [(match[0], match.start()) for match in self.pattern.finditer(text)]
        if not spellings:
            return []
        ids = set(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return [(token, start) for token, start in spellings if self.ids[token] in ids]
