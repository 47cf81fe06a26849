"""Tokens of a scored answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_polygraph_asmi.analysis.mechanism import votes
from lm_polygraph_asmi.core.scores import token_scores
from lm_polygraph_asmi.core.statistics import AnswerStatistics

FULL_SHADE = 0.1
"""u in nats from which a token has the darkest shade; the same everywhere."""
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Token:
    """One token of a scored answer.

    Example:
        >>> first = scorer.score(prompt, " Edda Holm").tokens[0]
        >>> isinstance(first, Token), first.start, first.u == first.mi * (1 - first.agreement)
        (True, 0, True)
    """

    text: str  # scored_text[start:end]; empty if its character ends in a later token
    start: int
    end: int
    id: int
    mi: float  # MI_t, nats
    agreement: float  # A_t, in [0, 1]
    u: float  # MI_t times the method's discount, nats; higher = more fragile
    entropy: float  # of the unmasked model's next-token distribution, nats
    log_likelihood: float  # under the unmasked model, nats, at most 0
    vote: float  # share of masks under which it is the most likely token
    alternative: str | None  # the subnetworks' most frequent other choice
    alternative_share: float  # share of masks that choose it

    @property
    def shade(self) -> float:
        """Square root of u / 0.1 nats, at most 1: the darkest shade is 1."""
        return min(1.0, math.sqrt(max(0.0, self.u) / FULL_SHADE))

    @property
    def bar(self) -> str:
        """The shade as a bar, readable without colour."""
        return BARS[round(self.shade * (len(BARS) - 1))]


def tokens_of(
    stats: AnswerStatistics,
    answer: str,
    offsets: Sequence[tuple[int, int]],
    gate: float,
    tokenizer: Any,
) -> list[Token]:
    """The tokens of an answer, from the engine's statistics.

    Args:
        answer: the scored text.
        offsets: the characters (start, end) of each token in it.
        gate: alpha, the weight of the semantic discount (`core.scores.discount`).
        tokenizer: writes the subnetworks' other choices.
    """
    ids = stats.tokens.tolist()
    numbers = zip(
        stats.mi.tolist(),
        stats.agreement.tolist(),
        stats.entropy.tolist(),
        stats.log_likelihood.tolist(),
        strict=True,
    )
    return [
        Token(
            text=answer[start:end],
            start=start,
            end=end,
            id=token,
            mi=mi,
            agreement=agreement,
            u=token_scores(mi, agreement, gate),
            entropy=entropy,
            log_likelihood=log_likelihood,
            vote=vote.agree,
            alternative=None if vote.alternative is None else tokenizer.decode([vote.alternative]),
            alternative_share=vote.share,
        )
        for token, vote, (start, end), (mi, agreement, entropy, log_likelihood) in zip(
            ids, votes(stats.top_token, ids), offsets, numbers, strict=True
        )
    ]
