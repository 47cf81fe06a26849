"""Tokens of a scored answer, and the sources it depends on."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lm_polygraph_asmi.analysis.mechanism import votes
from lm_polygraph_asmi.results.names import at_depth, passage
from lm_polygraph_asmi.scoring.page import FULL_SHADE

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
        context_mi: MI_t if masks remove only the context's part of a head, nats; None, as the next
            two, without `context`.
        context_share: `context_mi` over MI_t with whole heads masked, scope "response"; at least 0,
            and 0 if MI_t is 0.
        context_attention: attention on the context at the masked layer, mean over heads, 0 to 1.

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
    context_mi: float | None = None
    context_share: float | None = None
    context_attention: float | None = None

    @property
    def shade(self) -> float:
        """Square root of u / 0.1 nats, at most 1: the darkest shade is 1."""
        return min(1.0, math.sqrt(max(0.0, self.u) / FULL_SHADE))

    @property
    def bar(self) -> str:
        """The shade as a bar, readable without colour."""
        return BARS[round(self.shade * (len(BARS) - 1))]


def tokens_of(
    stats: Mapping[str, Any],
    ids: Sequence[int],
    answer: str,
    offsets: Sequence[tuple[int, int]],
    gate: float,
    tokenizer: Any,
) -> list[Token]:
    """Tokens from the engine's statistics; `gate`: 0 for ASMI, 1 for Sem-ASMI, else alpha(x)."""
    tokens = []
    for position, (vote, (start, end)) in enumerate(
        zip(votes(stats["asmi_top_token"], ids), offsets, strict=True)
    ):
        mi, agreement = (float(stats[f"asmi_{n}"][position]) for n in ("mi", "agreement"))
        tokens.append(
            Token(
                text=answer[start:end],
                start=start,
                end=end,
                id=int(ids[position]),
                mi=mi,
                agreement=agreement,
                u=mi * (1 - gate * agreement),
                entropy=float(stats["asmi_entropy"][position]),
                log_likelihood=float(stats["asmi_log_likelihood"][position]),
                vote=vote.agree,
                alternative=None
                if vote.alternative is None
                else tokenizer.decode([vote.alternative]),
                alternative_share=vote.share,
            )
        )
    return tokens


@dataclass(frozen=True)
class Source:
    """How much an answer depends on one source: means over counted tokens, scope "response".

    Attributes:
        text: its characters in the prompt; None if it is not a single passage.
        share: `mi` over MI with whole heads masked; at least 0. Shares need not add up to 1.
        mi: MI if masks remove only this source's part of a head, nats; higher = more dependent.
        attention: on its tokens at the masked layer, mean over heads, 0 to 1.
        kl: KL divergence of the output without this source in any head of the layer from the
            unmasked output, nats.
    """

    text: str | None
    share: float
    mi: float
    attention: float
    kl: float

    def __float__(self) -> float:
        return self.share


def sources_from(
    stats: Mapping[str, Any], depth: float, texts: Sequence[str], counted: slice
) -> dict[str, Source]:
    """Sources by name: "passage 1", ... if there are several, "context", "elsewhere".

    Args:
        stats: the engine's statistics by source.
        texts: the passages.
        counted: tokens that the score is computed from.
    """
    from lm_polygraph_asmi.maths.information import NO_INFORMATION  # imports torch

    several = range(len(texts)) if len(texts) > 1 else ()
    names = {f"passage {number + 1}": passage(number) for number in several}
    by_name = dict(zip(names or ["context"], texts, strict=True))
    total_mi = float(np.mean(stats[at_depth("asmi_mi", depth)][counted]))
    sources = {}
    for name, source in {**names, "context": "context", "elsewhere": "elsewhere"}.items():

        def mean(statistic: str, of: str = source) -> float:
            return float(np.mean(stats[at_depth(statistic, depth, of)][counted]))

        mi = mean("asmi_mi")
        sources[name] = Source(
            text=by_name.get(name),
            share=mi / total_mi if total_mi > NO_INFORMATION else 0.0,
            mi=mi,
            attention=mean("asmi_source_attention"),
            kl=mean("asmi_source_kl"),
        )
    return sources


def with_context(tokens: Sequence[Token], stats: Mapping[str, Any], depth: float) -> list[Token]:
    """Tokens with their `context_*` fields; `stats`: the engine's statistics by source."""
    names = ("asmi_mi", "asmi_source_share", "asmi_source_attention")
    columns = [stats[at_depth(name, depth, "context")].tolist() for name in names]
    return [
        replace(token, context_mi=mi, context_share=share, context_attention=attention)
        for token, mi, share, attention in zip(tokens, *columns, strict=True)
    ]
