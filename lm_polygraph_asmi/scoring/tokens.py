"""Tokens of a scored answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lm_polygraph_asmi.analysis.mechanism import votes
from lm_polygraph_asmi.scoring.statistics import AnswerStatistics

FULL_SHADE = 0.1
"""u in nats from which a token has the darkest shade; the same everywhere."""
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Token:
    """One token of a scored answer.

    Attributes:
        text: its characters, scored_text[start:end]; empty if its character ends in a later token.
        start, end: character offsets in `Score.scored_text`.
        id: token id.
        mi: MI_t, nats.
        agreement: A_t, in [0, 1].
        u: MI_t times the method's discount, nats; higher = more fragile.
        entropy: of the unmasked model's next-token distribution, nats.
        log_likelihood: of the token under the unmasked model, nats, at most 0.
        vote: share of masks under which it is the most likely token, 0 to 1.
        alternative: the subnetworks' most frequent other choice; None if there is none.
        alternative_share: share of masks that choose it, 0 to 1.

    Example:
        >>> first = scorer.score(prompt, " Edda Holm").tokens[0]
        >>> isinstance(first, Token), first.start, first.u == first.mi * (1 - first.agreement)
        (True, 0, True)
    """

    text: str
    start: int
    end: int
    id: int
    mi: float
    agreement: float
    u: float
    entropy: float
    log_likelihood: float
    vote: float
    alternative: str | None
    alternative_share: float

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
    """Tokens from the engine's statistics; `gate`: 0 for ASMI, 1 for Sem-ASMI, else alpha(x)."""
    from lm_polygraph_asmi.algorithm import token_uncertainty  # imports torch

    ids, tokens = stats.tokens.tolist(), []
    for position, (vote, (start, end)) in enumerate(
        zip(votes(stats.top_token, ids), offsets, strict=True)
    ):
        mi, agreement = float(stats.mi[position]), float(stats.agreement[position])
        tokens.append(
            Token(
                text=answer[start:end],
                start=start,
                end=end,
                id=ids[position],
                mi=mi,
                agreement=agreement,
                u=token_uncertainty(mi, agreement, gate),
                entropy=float(stats.entropy[position]),
                log_likelihood=float(stats.log_likelihood[position]),
                vote=vote.agree,
                alternative=None
                if vote.alternative is None
                else tokenizer.decode([vote.alternative]),
                alternative_share=vote.share,
            )
        )
    return tokens
