"""Claims without a chat model: each sentence of an answer is one claim. Experimental.

LM-Polygraph's extractor asks a chat model. To replace it, add this entry to a config's
`stat_calculators`, after `auto`:

    - name: SentenceClaimsCalculator
      builder: lm_polygraph_asmi.stat_calculators.sentence_claims
      cfg: {}
      stats: [claims, claim_texts_concatenated, claim_input_texts_concatenated]
      dependencies: [greedy_texts, greedy_tokens]
"""

from collections.abc import Mapping
from typing import Any

from lm_polygraph.stat_calculators import StatCalculator
from lm_polygraph.stat_calculators.extract_claims import Claim
from lm_polygraph.utils.model import Model

from lm_polygraph_asmi.results.names import require
from lm_polygraph_asmi.scoring.segments import segment_answer
from lm_polygraph_asmi.scoring.text import spans

STATS = ["claims", "claim_texts_concatenated", "claim_input_texts_concatenated"]


class SentenceClaimsCalculator(StatCalculator):
    """Turns sentences, lines of code and list items into LM-Polygraph's claims.

    A claim's tokens are those with a character in it. Unfinished sentences are claims, too.
    """

    @staticmethod
    def meta_info() -> tuple[list[str], list[str]]:
        return list(STATS), ["greedy_texts", "greedy_tokens"]

    def __call__(
        self,
        dependencies: Mapping[str, Any],
        texts: list[str],
        model: Model,
        max_new_tokens: int = 100,
    ) -> dict[str, list[Any]]:
        """`claims` per answer; their texts in one list; and the input text of each claim."""
        answers = require(dependencies, "greedy_texts")
        tokens = require(dependencies, "greedy_tokens")
        claims = [
            _claims(model.tokenizer, answer, ids)
            for answer, ids in zip(answers, tokens, strict=True)
        ]
        return {
            "claims": claims,
            "claim_texts_concatenated": [claim for answer in claims for claim in answer],
            "claim_input_texts_concatenated": [
                text for text, answer in zip(texts, claims, strict=True) for _ in answer
            ],
        }


def _claims(tokenizer: Any, answer: str, ids: list[int]) -> list[Claim]:
    """Claims of one answer; `answer` is LM-Polygraph's text, without the end token."""
    text, token_spans = spans(tokenizer, [], ids)
    text = text[: len(answer)] if text.startswith(answer) else text
    claims = []
    for start, end in segment_answer(text):
        positions = [
            position
            for position, (first, last) in enumerate(token_spans)
            if first < end and max(last, first + 1) > start
        ]
        if positions:
            claims.append(Claim(text[start:end], text[start:end], positions))
    return claims


def load_stat_calculator(*_: Any) -> SentenceClaimsCalculator:
    """Builder named in a config's `stat_calculators` entry."""
    return SentenceClaimsCalculator()
