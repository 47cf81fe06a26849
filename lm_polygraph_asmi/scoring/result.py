"""What `score` returns: numbers, a table, a page, and what the numbers mean."""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.mechanism import OVER_ROBUST, votes
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.saved.aggregation import aggregate
from lm_polygraph_asmi.saved.names import at_depth, passage, perturbed_by
from lm_polygraph_asmi.scoring.division import Span, divide, span_of
from lm_polygraph_asmi.scoring.page import (
    FULL_SHADE,
    SOURCES_SAY,
    probability,
    render,
    render_part,
    visible,
)
from lm_polygraph_asmi.scoring.reference import Reference

if TYPE_CHECKING:
    import pandas as pd

DERIVED = (
    "spans", "unit", "highest", "percentile", "error_probability", "confident_but_fragile",
    "verdict", "signals", "accept", "accept_reason", "probability_of_error",
)  # fmt: skip
"""What `Score.to_dict` holds besides the fields."""
NOT_VALIDATED = "Not validated: the paper finds the effect for whole answers."
BARS = " ▁▂▃▄▅▆▇█"
BOUNDARY = (
    "A check of faithfulness for answers that should come from the given context. For closed-book "
    "recall it is of no use: take a sequence probability there."
)


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


def ink(token: Token) -> str:
    """Colours of a token in a terminal, as rich has them: the darker the more fragile."""
    if token.shade <= 0.05:
        return ""
    red, rest = round(255 - 100 * token.shade), round(235 - 200 * token.shade)
    return f"{'white' if token.shade > 0.5 else 'black'} on rgb({red},{rest},{rest})"


def _start_of(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


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
        reference: the run that gives the number a meaning, None without.
        content_end: characters of `scored_text` before what ends the answer.
        answered: False where there is nothing but what ends an answer.
        offsets: of parts that the caller chose, see `with_spans`; None divides the answer itself.
        prompt_tokens: tokens of the prompt; None where that was not kept.
        span_reference: labelled parts of answers, None without.
        sources: by name, what the answer owes to the context, to each passage of several, and to
            all else; None where no context was given. As an instrument it says what an answer hangs
            on, not whether it is right.

    Example:
        >>> result = scorer.score(prompt, " Edda Holm")
        >>> result.counted == len(result.tokens)  # what closes the answer counts, too
        True
        >>> result.percentile is None  # without a reference
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
    reference: Reference | None
    content_end: int | None = None
    answered: bool = True
    offsets: tuple[tuple[int, int], ...] | None = None
    span_reference: Reference | None = None
    sources: dict[str, Source] | None = None
    prompt_tokens: int | None = None

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], reference: Reference | None = None) -> "Score":
        """What `to_dict` gave, or a line of the output file; the input's own fields are left out.

        Args:
            reference: the run that gives the number a meaning: saved is only its name.

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
            return cls(**own | {"reference": reference, "span_reference": None})
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
        said = self.config.said("aggregation", "perturbation", "dose")
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
            places = tuple(divide(content))
        judge = self.span_reference
        if judge is not None and judge.other_settings(self._compared):
            judge = None
        return tuple(
            span_of(self.scored_text, *place, self.tokens, judge, self.aggregation)
            for place in places
        )

    @property
    def about_spans(self) -> str:
        """What the numbers of `spans` are worth, and on what ground."""
        if self.span_reference is None:
            return NOT_VALIDATED
        refusal = self.span_reference.refusal(self._compared)
        if refusal is not None:
            return f"Not validated: {refusal}"
        run = self.span_reference
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
    def _compared(self) -> dict[str, Any]:
        return self.settings | {"model": self.model}

    @property
    def _yardstick(self) -> Reference | None:
        """The reference run, unless it is of another score, or there is no answer to judge."""
        if (
            not self.answered
            or self.reference is None
            or self.reference.other_settings(self._compared)
        ):
            return None
        return self.reference

    @property
    def percentile(self) -> float | None:
        """Share of the reference run's answers with a lower score, in %; None without a verdict."""
        run = self._yardstick
        return None if run is None else run.percentile(self.score)

    @property
    def error_probability(self) -> float | None:
        """Calibrated on the reference run; None without a verdict."""
        run = self._yardstick
        return None if run is None else run.error_probability(self.score)

    @property
    def probability_of_error(self) -> Interval | None:
        """The same with Wilson's interval of its step of the calibration, 95 %."""
        run = self._yardstick
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
        """Whether the answer may be shown, by the reference's threshold; None without a decision.

        What the threshold promises, or why nothing is decided, says `accept_reason`.
        """
        run = self._yardstick
        if run is None or run.decision is None:
            return None
        return run.decision.accepts(self.signals)

    @property
    def accept_reason(self) -> str:
        """The ground of `accept`, in a sentence."""
        if not self.answered:
            return "No decision: the model answered nothing."
        if self.reference is None:
            return "No decision: without a reference nothing is known of such answers."
        other = self.reference.other_settings(self._compared)
        if other:
            return f"No decision: the reference is of another score ({'; '.join(other)})."
        if self.reference.decision is None:
            return (
                "No decision: the reference has no threshold; `polygraph_asmi calibrate` makes one "
                "with a promise."
            )
        return self.reference.decision.said(self.signals)

    @property
    def confident_but_fragile(self) -> bool | None:
        """MSP below and score above the reference run's medians; None without a verdict."""
        run = self._yardstick
        if run is None or not run.ranks:
            return None
        return self.msp <= run.msp_median and self.score > run.median

    @property
    def verdict(self) -> list[str]:
        """What the number means and on what ground, in sentences."""
        times = f"{self._times} " if self._times > 1 else ""
        named = {"max": "maximum"}.get(self.aggregation, self.aggregation)
        said = [
            f"{self.label}: {self.score:.4f} nats (0 to {times}ln S = {self.highest:.2f}; higher "
            f"= more fragile), the {named} over {self.counted} token{'s' * (self.counted != 1)}"
            f"{'; masks at the answer alone' * (self.config.scope == 'response')}."
        ]
        if self.config.is_control:
            said.append(
                f"Not the method: masks change {', '.join(perturbed_by(self.settings))} in the "
                "layer, an arm of the falsifier in the place of heads. A control, no score to use."
            )
        if not self.answered:
            said.append(
                "No verdict: the model answered nothing. The number is that of the token that ends "
                "an answer, where an answer should stand."
            )
        elif self.reference is None:
            said.append(
                "No verdict: without a reference run of this model on such questions, nobody "
                "knows which way this number points. On the small models measured so far Sem-ASMI "
                "was not found to tell more of errors than probability, entropy and length do, and "
                "how well it ranks them hangs on the prompt and on the masked layer."
            )
        else:
            of_run = self.reference.verdict(self.score, self._compared)
            if self._yardstick is None or self._yardstick.decision is None:
                said += of_run
            else:  # which may be by another signal, and stands whatever this one is worth
                said.insert(1, self.accept_reason)
                said += [one.replace("No verdict:", f"Of {self.symbol}:", 1) for one in of_run]
                seen = {"prompt_tokens": self.prompt_tokens, "msp": self.msp}
                said += self._yardstick.unlike(seen)
            if self.confident_but_fragile:
                run = self.reference
                said.append(
                    f"Confident but fragile: the answer's probability {probability(self.msp)} is "
                    f"above that of the reference run's median answer "
                    f"({probability(run.msp_median)}), and its score above the median score "
                    f"({run.median:.4f}), too. This is a mark of the whole answer: the paper finds "
                    "no such effect among single tokens."
                )
        screened = None if self.reference is None else self.reference.masking_response
        if screened is not None and screened < OVER_ROBUST:
            said.append(
                f"Masking heads hardly moved the model on the reference run (mean MI "
                f"{screened:.4f} nats, below {OVER_ROBUST}): there may be nothing to read. A "
                "candidate screen, not a validated one."
            )
        elif screened is None and self.masking_response < OVER_ROBUST:
            said.append(
                f"Masking heads hardly moved the model here (mean MI {self.masking_response:.4f} "
                f"nats, below {OVER_ROBUST}): a robust answer, or, if all answers are like this, a "
                "model too robust for the score to read anything. A candidate screen, not a "
                "validated one."
            )
        return [*said, *self.warnings, BOUNDARY]

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, fit for JSON."""
        own = asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}
        for name in ("reference", "span_reference"):
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
        shaded, bars = Text(), Text(style="red")
        for token in self.tokens:
            # Line breaks would part the two lines, and other control characters steer a terminal.
            text = Text(visible(token.text), style=ink(token))
            shaded.append_text(text)
            bars.append(token.bar * text.cell_len)
        # Cut by hand, so that a line of a long answer and its bars stay together.
        cuts: list[tuple[int, int]] = []  # characters and cells before each cut
        cells = start = 0  # cells so far, and of them those of finished lines
        for position, character in enumerate(shaded.plain):
            width = cell_len(character)
            if cells - start + width > options.max_width:
                cuts.append((position, cells))
                start = cells
            cells += width
        lines = shaded.divide([position for position, _ in cuts])
        for line, bar in zip(lines, bars.divide([cell for _, cell in cuts]), strict=True):
            yield from (line, bar)
        yield from (Text(line) for line in self.verdict)
        table = Table("token", "u", "MI", "kept by", "else", box=None, header_style="dim")
        for token in sorted(self.tokens, key=lambda token: -token.u)[:5]:
            other = "" if token.alternative is None else repr(token.alternative)
            share = f" {token.alternative_share:.0%}" if other else ""
            table.add_row(Text(repr(token.text)), f"{token.u:.4f}", f"{token.mi:.4f}",
                          f"{token.vote:.0%}", Text(other + share))  # fmt: skip
        yield table
        if self.sources:
            yield Text(f"What the answer hangs on. {SOURCES_SAY}")
            table = Table("source", "share of MI", "attention", "KL without", "", box=None,
                          header_style="dim")  # fmt: skip
            for name, source in self.sources.items():
                shown = "" if source.text is None else _start_of(visible(source.text))
                table.add_row(name, f"{source.share:.0%}", f"{source.attention:.0%}",
                              f"{source.kl:.4f}", Text(shown))  # fmt: skip
            yield table
        if self.parts:
            yield Text(f"Parts of the answer. {self.about_spans}")
            validated = self.parts[0].validated
            table = Table("part", *["P(error)"] * validated, "u", "MI", "entropy", "perplexity",
                          "else", box=None, header_style="dim")  # fmt: skip
            for span in self.parts:
                other = (
                    ""
                    if span.alternative is None
                    else f"{visible(span.alternative)} for {visible(span.instead_of or '·')} "
                    f"{span.alternative_share:.0%}"
                )
                chance = [f"{span.error_probability:.2f}"] if validated else []
                table.add_row(Text(visible(span.text)), *chance, f"{span.u:.4f}", f"{span.mi:.4f}",
                              f"{span.entropy:.3f}", f"{span.perplexity:.2f}",
                              Text(other))  # fmt: skip
            yield table
