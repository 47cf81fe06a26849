"""What `score` returns: numbers, a table, a page, and what the numbers mean."""

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
"""What `Score.to_dict` holds besides the fields."""
NOT_VALIDATED = "Not validated: the paper finds the effect for whole answers."
BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Token:
    """One token of a scored answer.

    Attributes:
        text: its characters, scored_text[start:end]; empty where a character goes on in the next
            token.
        start, end: character offsets in `Score.scored_text`.
        id: token id.
        mi: MI_t, nats.
        agreement: A_t, in [0, 1].
        u: MI_t with the method's discount, nats; higher = more fragile.
        entropy: of the unmasked model's distribution, nats.
        log_likelihood: of the token under the unmasked model, nats.
        vote: share of masks under which it stays the most likely token.
        alternative: the most frequent other choice of the subnetworks, None if there is none.
        alternative_share: of the masks for it.
        context_mi: MI_t where masks take from heads only what comes from the context, nats; None,
            as the next two, where no context was given.
        context_share: that over MI_t where they take all, at the answer's positions; at least 0,
            and 0 without any MI_t.
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
        """Fragility as a share of the darkest shade, 0 to 1: its square root, as most are small."""
        return min(1.0, math.sqrt(max(0.0, self.u) / FULL_SHADE))

    @property
    def bar(self) -> str:
        """The same as a bar, for eyes and devices without colour."""
        return BARS[round(self.shade * (len(BARS) - 1))]


def tokens_of(
    stats: Mapping[str, Any],
    ids: Sequence[int],
    answer: str,
    places: Sequence[tuple[int, int]],
    gate: float,
    tokenizer: Any,
) -> list[Token]:
    """Tokens from the calculator's statistics; `gate` is 0 for ASMI, 1 for Sem-ASMI."""
    found = []
    for position, (vote, (start, end)) in enumerate(
        zip(votes(stats["asmi_top_token"], ids), places, strict=True)
    ):
        mi, agreement = (float(stats[f"asmi_{n}"][position]) for n in ("mi", "agreement"))
        found.append(
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
    return found


@dataclass(frozen=True)
class Source:
    """What an answer owes to one source: means over the counted tokens, in the scope "response".

    Attributes:
        text: its characters in the prompt; None where it is no single passage.
        share: MI where masks take from heads only what comes from this source, over MI where they
            take all; at least 0. Those of several sources need not add up to one.
        mi: the first of these, nats.
        attention: on its tokens at the masked layer, mean over heads, 0 to 1.
        kl: to the unmasked output of that without this source in any head of the layer, nats.
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
    """Sources by name: "passage 1" and so on where there are several, "context", "elsewhere".

    Args:
        stats: the engine's, by source.
        texts: of the passages.
        counted: tokens that make up the score.
    """
    from lm_polygraph_asmi.maths.information import NO_INFORMATION  # torch: there by now

    several = range(len(texts)) if len(texts) > 1 else ()
    names = {f"passage {number + 1}": passage(number) for number in several}
    by_name = dict(zip(names or ["context"], texts, strict=True))
    whole = float(np.mean(stats[at_depth("asmi_mi", depth)][counted]))
    found = {}
    for name, source in {**names, "context": "context", "elsewhere": "elsewhere"}.items():

        def mean(statistic: str, of: str = source) -> float:
            return float(np.mean(stats[at_depth(statistic, depth, of)][counted]))

        mi = mean("asmi_mi")
        found[name] = Source(
            text=by_name.get(name),
            share=mi / whole if whole > NO_INFORMATION else 0.0,
            mi=mi,
            attention=mean("asmi_source_attention"),
            kl=mean("asmi_source_kl"),
        )
    return found


def with_context(tokens: Sequence[Token], stats: Mapping[str, Any], depth: float) -> list[Token]:
    """Tokens that know what of them comes from the context; `stats` are those by source."""
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
        score: mean of u over the counted tokens, nats, 0 to ln S, or their sum or maximum, as
            `aggregation` says; higher = more fragile.
        prompt: text or messages.
        answer: as it was given, text or token ids; or the model's own as text, without what ends
            it.
        scored_text: what was scored, special and closing tokens included; offsets of tokens refer
            to it.
        tokens: all of them.
        counted: so many of them, from the first, make up the score.
        msp: negative log-likelihood of the answer under the unmasked model, nats.
        diversity, gate: div(x) and alpha(x) of Adapt-ASMI; None for other methods.
        settings: of `config`, those in force, p and S as they were derived, and the layer; of token
            ids no stop strings.
        model: its name; empty for one that has none.
        seconds: of the masked passes.
        warnings: what went otherwise than asked.
        calibration: the run that gives the number a meaning, None without.
        content_end: characters of `scored_text` before what ends the answer.
        answered: False where there is nothing but what ends an answer.
        offsets: of parts that the caller chose, see `with_spans`; None divides the answer itself.
        prompt_tokens: tokens of the prompt; None where that was not kept.
        span_calibration: labelled parts of answers, None without.
        sources: by name, what the answer owes to the context, to each passage of several, and to
            all else; None where no context was given. As an instrument it says what an answer hangs
            on, not whether it is right.

    Example:
        >>> result = scorer.score(prompt, " Edda Holm")
        >>> result.counted == len(result.tokens)  # what closes the answer counts, too
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
        """What `to_dict` gave, or a line of the output file; the input's own fields are left out.

        Args:
            calibration: the run that gives the number a meaning: saved is only its name.

        Raises:
            ValueError: something else.
        """
        names = {field.name for field in fields(cls)}
        try:
            own = {name: value for name, value in content.items() if name in names}
            own["tokens"] = tuple(Token(**token) for token in own["tokens"])
            own["warnings"] = tuple(own["warnings"])
            if own.get("offsets") is not None:
                own["offsets"] = tuple((start, end) for start, end in own["offsets"])
            if own.get("sources") is not None:
                own["sources"] = {name: Source(**of) for name, of in own["sources"].items()}
            return cls(**own | {"calibration": calibration, "span_calibration": None})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"this is no saved score ({error!r}): give what Score.to_dict returned, or a line "
                "that `polygraph_asmi score --out` wrote, with full --tokens"
            ) from error

    def __lt__(self, other: object) -> bool:
        """Scores sort by fragility, the robust first."""
        return self.score < other.score if isinstance(other, Score) else NotImplemented

    def __format__(self, spec: str) -> str:
        return format(self.score, spec) if spec else str(self)

    def __float__(self) -> float:
        return self.score

    def __repr__(self) -> str:
        return f"Score({self.label} {self.score:.4f} nats, answer={self.answer!r})"

    @property
    def config(self) -> ASMIConfig:
        """The settings in force; of samples that were given, not how many there were."""
        return ASMIConfig.from_dict(self.settings | {"num_samples": ASMIConfig.num_samples})

    @property
    def symbol(self) -> str:
        """The method's name, such as "Sem-ASMI"."""
        return self.config.symbol

    @property
    def label(self) -> str:
        """The symbol, and how tokens are aggregated and what masks change, if not as the paper."""
        said = self.config.said("aggregation", "perturbation", "perturbation_scale")
        return f"{self.symbol} ({', '.join(said)})" if said else self.symbol

    @property
    def highest(self) -> float:
        """ln S, nats: no score can be higher; of a sum, that for each counted token."""
        return math.log(self.settings["num_masks"]) * self._times

    @property
    def aggregation(self) -> str:
        """How the score comes of u: "mean", "sum" or "max" over the counted tokens."""
        return self.config.aggregation

    @property
    def _times(self) -> int:
        return self.counted if self.aggregation == "sum" else 1

    @property
    def masking_response(self) -> float:
        """Mean MI_t of the answer's tokens, nats: how far masking moved the model at all."""
        return float(np.mean([token.mi for token in self.tokens]))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The answer's parts: sentences, lines of code, items of lists; or those of `offsets`.

        What ends the answer is part of none. The paper finds its effect for whole answers: these
        numbers are not validated, unless labelled parts did so, see `about_spans`.
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
        """What the numbers of `spans` are worth, and on what ground."""
        if self.span_calibration is None:
            return NOT_VALIDATED
        refusal = self.span_calibration.refusal(self.compared_settings)
        if refusal is not None:
            return f"Not validated: {refusal}"
        run = self.span_calibration
        return f"Probabilities of error are those of labelled parts. {run.worth}{run.ground}."

    def with_spans(self, offsets: Sequence[tuple[int, int]]) -> "Score":
        """The same score with parts of one's own, by characters of `scored_text`.

        Raises:
            ValueError: no pairs of whole numbers, offsets outside the text, or no token between
                them.
        """
        try:
            places = tuple((operator.index(start), operator.index(end)) for start, end in offsets)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"offsets are pairs of whole numbers such as [[0, 12], [13, 40]], got {offsets!r}"
            ) from error
        found = replace(self, offsets=places)
        assert found.spans is not None  # refused here, if at all
        return found

    @property
    def parts(self) -> tuple[Span, ...]:
        """`spans` where they say more than the score of the whole: two of them, or chosen ones."""
        return self.spans if self.offsets is not None or len(self.spans) > 1 else ()

    @property
    def compared_settings(self) -> dict[str, Any]:
        """What a calibration run must share with this answer: settings and model."""
        return self.settings | {"model": self.model}

    @property
    def applied_calibration(self) -> Calibration | None:
        """The calibration run, unless it is of another score or there is no answer."""
        if (
            not self.answered
            or self.calibration is None
            or self.calibration.other_settings(self.compared_settings)
        ):
            return None
        return self.calibration

    @property
    def percentile(self) -> float | None:
        """Share of the calibration run run's answers with a lower score, in %; None without a
        verdict."""
        run = self.applied_calibration
        return None if run is None else run.percentile(self.score)

    @property
    def error_probability(self) -> float | None:
        """Calibrated on the calibration run run; None without a verdict."""
        run = self.applied_calibration
        return None if run is None else run.error_probability(self.score)

    @property
    def probability_of_error(self) -> Interval | None:
        """The same with Wilson's interval of its step of the calibration, 95 %."""
        run = self.applied_calibration
        return None if run is None else run.probability_of_error(self.score)

    @cached_property
    def signals(self) -> dict[str, float]:
        """All that one scored answer says of its own chance to be wrong, higher = more uncertain.

        Keys as `decision.SIGNALS`, over the counted tokens in nats: "asmi" and "sem" aggregated as
        the score is, "msp" a sum, the others means.
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
        """Whether the answer may be shown, by the calibration run's threshold; None without a
        decision.

        What the threshold promises, or why nothing is decided, says `accept_reason`.
        """
        run = self.applied_calibration
        if run is None or run.decision is None:
            return None
        return run.decision.accepts(self.signals)

    @property
    def accept_reason(self) -> str:
        """The ground of `accept`, in a sentence."""
        if not self.answered:
            return "No decision: the model answered nothing."
        if self.calibration is None:
            return "No decision: without a calibration run nothing is known of such answers."
        other = self.calibration.other_settings(self.compared_settings)
        if other:
            return f"No decision: the calibration run is of another score ({'; '.join(other)})."
        if self.calibration.decision is None:
            return (
                "No decision: the calibration run has no threshold; `polygraph_asmi calibrate` "
                "makes one "
                "with a promise."
            )
        return self.calibration.decision.said(self.signals)

    @property
    def confident_but_fragile(self) -> bool | None:
        """MSP below and score above the calibration run run's medians; None without a verdict."""
        run = self.applied_calibration
        if run is None or not run.ranks:
            return None
        return self.msp <= run.msp_median and self.score > run.median

    @property
    def verdict(self) -> list[str]:
        """What the number means and on what ground, in sentences."""
        return verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON."""
        own = asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}
        for name in ("calibration", "span_calibration"):
            run = getattr(self, name)
            own[name] = None if run is None else run.name
        return own | {
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
        """A row per token, columns as the attributes of `Token`."""
        import pandas as pd

        return pd.DataFrame([asdict(token) for token in self.tokens])

    def to_html(self, title: str = "Fragility of an answer") -> str:
        """A page of its own: tokens shaded by fragility, what the subnetworks would have said."""
        return render([self], title)

    def _repr_html_(self) -> str:
        return render_part(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Heat map for a terminal: shades, and bars for terminals without colour."""
        return in_terminal(self, options.max_width)
