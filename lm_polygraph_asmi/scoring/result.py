"""What `score` returns: numbers, a table, an HTML page and a verdict in sentences."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.mechanism import votes
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.results.aggregation import aggregate
from lm_polygraph_asmi.results.names import at_depth, passage
from lm_polygraph_asmi.scoring.calibration import Calibration
from lm_polygraph_asmi.scoring.page import FULL_SHADE, render, render_part
from lm_polygraph_asmi.scoring.segments import Span, segment_answer, span_of
from lm_polygraph_asmi.scoring.terminal import in_terminal
from lm_polygraph_asmi.scoring.verdict import verdict

if TYPE_CHECKING:
    import pandas as pd

DERIVED = (
    "spans", "unit", "highest", "percentile", "error_probability", "confident_but_fragile",
    "verdict", "signals", "accept", "accept_reason", "probability_of_error",
)  # fmt: skip
"""Entries of `Score.to_dict` besides the fields."""
NOT_VALIDATED = "Not validated: the paper finds the effect for whole answers."
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
    places: Sequence[tuple[int, int]],
    gate: float,
    tokenizer: Any,
) -> list[Token]:
    """Tokens from the engine's statistics; `gate`: 0 for ASMI, 1 for Sem-ASMI, else alpha(x)."""
    tokens = []
    for position, (vote, (start, end)) in enumerate(
        zip(votes(stats["asmi_top_token"], ids), places, strict=True)
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
    whole = float(np.mean(stats[at_depth("asmi_mi", depth)][counted]))
    sources = {}
    for name, source in {**names, "context": "context", "elsewhere": "elsewhere"}.items():

        def mean(statistic: str, of: str = source) -> float:
            return float(np.mean(stats[at_depth(statistic, depth, of)][counted]))

        mi = mean("asmi_mi")
        sources[name] = Source(
            text=by_name.get(name),
            share=mi / whole if whole > NO_INFORMATION else 0.0,
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


@dataclass(frozen=True, repr=False)
class Score:
    """A scored answer.

    Attributes:
        score: mean of u over the counted tokens (sum or maximum, see `aggregation`), nats, 0 to
            ln S; higher = more fragile.
        prompt: text or messages.
        answer: as passed, text or token ids; or the model's greedy answer as text, without the
            tokens that end it.
        scored_text: the scored tokens as text, special and closing tokens included; the offsets of
            tokens refer to it.
        tokens: all tokens.
        counted: number of tokens, from the first, that the score is computed from.
        msp: negative log-likelihood of the answer under the unmasked model, nats.
        diversity, gate: div(x) and alpha(x) of Adapt-ASMI; None for other methods.
        settings: of `config`, with the derived p and S, and the layer; no stop strings if the
            answer was token ids.
        model: its name, or empty.
        seconds: of the masked passes.
        warnings: problems with prompt, answer or tokenizer.
        calibration: the calibration run; None without.
        content_end: characters of `scored_text` before the tokens that end the answer.
        answered: False if the answer is empty or blank.
        offsets: parts chosen by the caller, see `with_spans`; None: see `spans`.
        prompt_tokens: tokens of the prompt; None if not saved.
        span_calibration: calibration from labelled parts of answers; None without.
        sources: by name, how much the answer depends on the context, on each of several passages,
            and on the rest; None without `context`. It does not tell whether the answer is right.

    Example:
        >>> result = scorer.score(prompt, " Edda Holm")
        >>> result.counted == len(result.tokens)  # the closing token counts
        True
        >>> result.percentile is None  # without a calibration
        True
        >>> Score.from_dict(result.to_dict()) == result
        True
    """

    score: float
    prompt: str | list[dict[str, Any]]
    answer: str | list[int]
    scored_text: str
    tokens: tuple[Token, ...]
    counted: int
    msp: float
    diversity: float | None
    gate: float | None
    settings: dict[str, Any]
    model: str
    seconds: float
    warnings: tuple[str, ...]
    calibration: Calibration | None
    content_end: int | None = None
    answered: bool = True
    offsets: tuple[tuple[int, int], ...] | None = None
    span_calibration: Calibration | None = None
    sources: dict[str, Source] | None = None
    prompt_tokens: int | None = None

    @classmethod
    def from_dict(
        cls, content: Mapping[str, Any], calibration: Calibration | None = None
    ) -> "Score":
        """Read what `to_dict` returned, or a line of the output file; other fields are dropped.

        Args:
            calibration: the calibration run, of which only the name is saved.

        Raises:
            ValueError: `content` is not a saved score.
        """
        names = {field.name for field in fields(cls)}
        try:
            values = {name: value for name, value in content.items() if name in names}
            values["tokens"] = tuple(Token(**token) for token in values["tokens"])
            values["warnings"] = tuple(values["warnings"])
            if values.get("offsets") is not None:
                values["offsets"] = tuple((start, end) for start, end in values["offsets"])
            if values.get("sources") is not None:
                values["sources"] = {name: Source(**of) for name, of in values["sources"].items()}
            return cls(**values | {"calibration": calibration, "span_calibration": None})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"expected what Score.to_dict returns, or a line of `polygraph_asmi score --out "
                f"FILE --tokens full`; got {error!r}"
            ) from error

    def __lt__(self, other: object) -> bool:
        """Scores sort by fragility, least fragile first."""
        return self.score < other.score if isinstance(other, Score) else NotImplemented

    def __format__(self, spec: str) -> str:
        return format(self.score, spec) if spec else str(self)

    def __float__(self) -> float:
        return self.score

    def __repr__(self) -> str:
        return f"Score({self.label} {self.score:.4f} nats, answer={self.answer!r})"

    @property
    def config(self) -> ASMIConfig:
        """The settings in force; `num_samples` is the default, even if samples were passed."""
        return ASMIConfig.from_dict(self.settings | {"num_samples": ASMIConfig.num_samples})

    @property
    def symbol(self) -> str:
        """The method's name, such as "Sem-ASMI"."""
        return self.config.symbol

    @property
    def label(self) -> str:
        """The symbol, with aggregation and perturbation if they differ from the paper's."""
        other = self.config.said("aggregation", "perturbation", "perturbation_scale")
        return f"{self.symbol} ({', '.join(other)})" if other else self.symbol

    @property
    def highest(self) -> float:
        """Upper bound of the score: ln S, nats; for a sum, times the counted tokens."""
        return math.log(self.settings["num_masks"]) * self._times

    @property
    def aggregation(self) -> str:
        """How u is aggregated over the counted tokens: "mean", "sum" or "max"."""
        return self.config.aggregation

    @property
    def _times(self) -> int:
        return self.counted if self.aggregation == "sum" else 1

    @property
    def masking_response(self) -> float:
        """Mean MI_t of the answer's tokens, nats: how much masking changes the predictions."""
        return float(np.mean([token.mi for token in self.tokens]))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The answer's parts: sentences, lines of code, list items; or those of `offsets`.

        Tokens that end the answer are in no part. The paper validates whole answers only: see
        `about_spans`.
        """
        places = self.offsets
        if places is None:
            content = self.scored_text[: self.content_end]
            places = tuple(segment_answer(content))
        correctness = self.span_calibration
        if correctness is not None and correctness.other_settings(self.compared_settings):
            correctness = None
        return tuple(
            span_of(self.scored_text, *place, self.tokens, correctness, self.aggregation)
            for place in places
        )

    @property
    def about_spans(self) -> str:
        """Whether the numbers of `spans` are validated, and on which data."""
        if self.span_calibration is None:
            return NOT_VALIDATED
        reason = self.span_calibration.refusal(self.compared_settings)
        if reason is not None:
            return f"Not validated: {reason}"
        run = self.span_calibration
        return f"Error probabilities are calibrated on labelled parts. {run.worth}{run.ground}."

    def with_spans(self, offsets: Sequence[tuple[int, int]]) -> "Score":
        """The same score with parts at these (start, end) characters of `scored_text`.

        Raises:
            ValueError: not pairs of integers, offsets outside the text, or a part without a token.
        """
        try:
            places = tuple((operator.index(start), operator.index(end)) for start, end in offsets)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"expected offsets as pairs of integers, like [[0, 12], [13, 40]], got {offsets!r}"
            ) from error
        score = replace(self, offsets=places)
        assert score.spans is not None  # raises here, not later
        return score

    @property
    def parts(self) -> tuple[Span, ...]:
        """`spans` if there are several or the caller chose them; else none."""
        return self.spans if self.offsets is not None or len(self.spans) > 1 else ()

    @property
    def compared_settings(self) -> dict[str, Any]:
        """Settings and model, which a calibration run must share."""
        return self.settings | {"model": self.model}

    @property
    def applied_calibration(self) -> Calibration | None:
        """The calibration run; None if its settings differ or the answer is empty."""
        if (
            not self.answered
            or self.calibration is None
            or self.calibration.other_settings(self.compared_settings)
        ):
            return None
        return self.calibration

    @property
    def percentile(self) -> float | None:
        """Share of the calibration run's answers with a lower score, in %; None: no verdict."""
        run = self.applied_calibration
        return None if run is None else run.percentile(self.score)

    @property
    def error_probability(self) -> float | None:
        """Probability that the answer is wrong, by the calibration run; None: no verdict."""
        run = self.applied_calibration
        return None if run is None else run.error_probability(self.score)

    @property
    def probability_of_error(self) -> Interval | None:
        """`error_probability` with the 95 % Wilson interval of its calibration step."""
        run = self.applied_calibration
        return None if run is None else run.probability_of_error(self.score)

    @cached_property
    def signals(self) -> dict[str, float]:
        """Uncertainty signals of this answer, nats; higher = more uncertain.

        Over the counted tokens: "asmi" and "sem" aggregated as the score, "msp" the negative
        log-likelihood, "perplexity" its mean (the log of the perplexity), "entropy" a mean.
        """
        tokens = self.tokens[: self.counted]
        found = {
            "asmi": aggregate([token.mi for token in tokens], self.aggregation),
            "sem": aggregate([t.mi * (1 - t.agreement) for t in tokens], self.aggregation),
            "msp": self.msp,
            "perplexity": self.msp / self.counted,
            "entropy": float(np.mean([token.entropy for token in tokens])),
        }
        return found | {self.config.method: self.score}

    @property
    def accept(self) -> bool | None:
        """True: accept; False: abstain, by the calibration run's threshold; None: no decision.

        The risk guarantee, or why there is no decision: `accept_reason`.
        """
        run = self.applied_calibration
        if run is None or run.decision is None:
            return None
        return run.decision.accepts(self.signals)

    @property
    def accept_reason(self) -> str:
        """The reason for `accept`, in sentences."""
        if not self.answered:
            return "No decision: the answer is empty."
        if self.calibration is None:
            return "No decision: pass a calibration run."
        other = self.calibration.other_settings(self.compared_settings)
        if other:
            return f"No decision: settings differ from the calibration run ({'; '.join(other)})."
        if self.calibration.decision is None:
            return (
                "No decision: the calibration run has no threshold. `polygraph_asmi calibrate` "
                "computes one with a risk guarantee."
            )
        return self.calibration.decision.said(self.signals)

    @property
    def confident_but_fragile(self) -> bool | None:
        """MSP below and score above the calibration run's medians; None: no verdict."""
        run = self.applied_calibration
        if run is None or not run.ranks:
            return None
        return self.msp <= run.msp_median and self.score > run.median

    @property
    def verdict(self) -> list[str]:
        """How to read the score, and on which data that rests, in sentences."""
        return verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived values as plain values, for JSON."""
        content = asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}
        for name in ("calibration", "span_calibration"):
            run = getattr(self, name)
            content[name] = None if run is None else run.name
        return content | {
            "spans": [asdict(span) for span in self.parts],
            "unit": "nats",
            "highest": self.highest,
            "percentile": self.percentile,
            "error_probability": self.error_probability,
            "confident_but_fragile": self.confident_but_fragile,
            "verdict": self.verdict,
            "signals": self.signals,
            "accept": self.accept,
            "accept_reason": self.accept_reason,
            "probability_of_error": self.probability_of_error,
        }

    def to_df(self) -> "pd.DataFrame":
        """One row per token; columns: the attributes of `Token`."""
        import pandas as pd

        return pd.DataFrame([asdict(token) for token in self.tokens])

    def to_html(self, title: str = "Fragility of an answer") -> str:
        """A self-contained HTML page: tokens shaded by fragility, with the subnetworks' choices."""
        return render([self], title)

    def _repr_html_(self) -> str:
        return render_part(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Heat map for a terminal: shades, and bars to read without colour."""
        return in_terminal(self, options.max_width)
