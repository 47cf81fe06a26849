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
from lm_polygraph_asmi.analysis.mechanism import OVER_ROBUST
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.maths.scores import aggregate, token_scores
from lm_polygraph_asmi.scoring.calibration import Calibration
from lm_polygraph_asmi.scoring.page import probability, render, render_part
from lm_polygraph_asmi.scoring.provenance import answer_end, digest_of, prompt_format
from lm_polygraph_asmi.scoring.segments import Span, segment_answer, span_of
from lm_polygraph_asmi.scoring.terminal import in_terminal
from lm_polygraph_asmi.scoring.tokens import Token

if TYPE_CHECKING:
    import pandas as pd

BOUNDARY = (
    "The score is meant only for answers from the given context. For closed-book questions, try "
    "MSP."
)
NOT_VALIDATED = "Not validated: the paper finds the effect for whole answers."
DERIVED = (
    "spans", "unit", "highest", "percentile", "error_probability", "confident_but_fragile",
    "verdict", "signals", "accept", "accept_reason", "error_probability_interval", "digest",
)  # fmt: skip
"""Entries of `Score.to_dict` besides the fields."""


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
        calibration: the calibration; None without.
        content_end: characters of `scored_text` before the tokens that end the answer.
        ending: what ends `scored_text`, such as "</s>" or a stop string; empty if the answer was
            cut off, None if not saved. To an answer passed as text, the likeliest end was added.
        answered: False if the answer is empty or blank.
        offsets: parts chosen by the caller, see `with_spans`; None: see `spans`.
        prompt_tokens: tokens of the prompt; None if not saved.
        span_calibration: calibration from labelled parts of answers; None without.

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
    prompt_tokens: int | None = None
    ending: str | None = None

    @classmethod
    def from_dict(
        cls, content: Mapping[str, Any], calibration: Calibration | None = None
    ) -> "Score":
        """Read what `to_dict` returned, or a line of the output file; other fields are dropped.

        Args:
            calibration: the calibration, of which only the name is saved.

        Raises:
            ValueError: `content` is not a saved score.
        """
        names = {field.name for field in fields(cls)}
        try:
            values = {name: value for name, value in content.items() if name in names}
            values["tokens"] = tuple(Token.from_dict(token) for token in values["tokens"])
            values["warnings"] = tuple(values["warnings"])
            if values.get("offsets") is not None:
                values["offsets"] = tuple((start, end) for start, end in values["offsets"])
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
        """The symbol, with the aggregation if it is not the paper's."""
        other = self.config.describe("aggregation")
        return f"{self.symbol} ({', '.join(other)})" if other else self.symbol

    @property
    def highest(self) -> float:
        """Upper bound of the score: ln S, nats; for a sum, times the counted tokens."""
        return math.log(self.settings["num_masks"]) * self._summed_tokens

    @property
    def aggregation(self) -> str:
        """How u is aggregated over the counted tokens: "mean", "sum" or "max"."""
        return self.config.aggregation

    @property
    def _summed_tokens(self) -> int:
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
        offsets = self.offsets
        if offsets is None:
            content = self.scored_text[: self.content_end]
            offsets = tuple(segment_answer(content))
        calibration = self.span_calibration
        if calibration is not None and calibration.other_settings(self.compared_settings):
            calibration = None
        return tuple(
            span_of(self.scored_text, *span, self.tokens, calibration, self.aggregation)
            for span in offsets
        )

    @property
    def about_spans(self) -> str:
        """Whether the numbers of `spans` are validated, and on which data."""
        if self.span_calibration is None:
            return NOT_VALIDATED
        reason = self.span_calibration.mismatch(self.compared_settings)
        if reason is not None:
            return f"Not validated: {reason}"
        run = self.span_calibration
        numbers = f"{run.brier_sentence}{run.ground}."
        return f"Error probabilities are calibrated on labelled parts. {numbers}"

    def with_spans(self, offsets: Sequence[tuple[int, int]]) -> "Score":
        """The same score with parts at these (start, end) characters of `scored_text`.

        Raises:
            ValueError: not pairs of integers, offsets outside the text, or a part without a token.
        """
        try:
            pairs = tuple((operator.index(start), operator.index(end)) for start, end in offsets)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"expected offsets as pairs of integers, like [[0, 12], [13, 40]], got {offsets!r}"
            ) from error
        score = replace(self, offsets=pairs)
        assert score.spans is not None  # raises here, not later
        return score

    @property
    def parts(self) -> tuple[Span, ...]:
        """`spans` if there are several or the caller chose them; else none."""
        return self.spans if self.offsets is not None or len(self.spans) > 1 else ()

    @property
    def compared_settings(self) -> dict[str, Any]:
        """Settings, model, and form of prompt and answer, which a calibration must share."""
        described = prompt_format(self.prompt) | {"model": self.model}
        if self.config.closing_token and self.content_end is not None:
            ended = self.content_end < len(self.scored_text)
            limit = self.settings.get("max_new_tokens")
            described["answer_end"] = answer_end(ended, len(self.tokens), limit)
        return described | self.settings

    @property
    def applied_calibration(self) -> Calibration | None:
        """The calibration; None if its settings differ or the answer is empty."""
        if (
            not self.answered
            or self.calibration is None
            or self.calibration.other_settings(self.compared_settings)
        ):
            return None
        return self.calibration

    @property
    def percentile(self) -> float | None:
        """Share of the calibration answers with a lower score, in %; None: no verdict."""
        run = self.applied_calibration
        return None if run is None else run.percentile(self.score)

    @property
    def error_probability(self) -> float | None:
        """Probability that the answer is wrong, by the calibration; None: no verdict."""
        run = self.applied_calibration
        return None if run is None else run.error_probability(self.score)

    @property
    def error_probability_interval(self) -> Interval | None:
        """`error_probability` with the 95 % Wilson interval of its calibration step."""
        run = self.applied_calibration
        return None if run is None else run.error_probability_interval(self.score)

    @cached_property
    def signals(self) -> dict[str, float]:
        """Uncertainty signals of this answer, nats; higher = more uncertain.

        Over the counted tokens: "asmi" and "sem" aggregated as the score, "msp" the negative
        log-likelihood, "perplexity" its mean (the log of the perplexity), "entropy" a mean.
        """
        tokens = self.tokens[: self.counted]
        signals = {
            "asmi": aggregate([token.mi for token in tokens], self.aggregation),
            "sem": aggregate([token_scores(t.mi, t.agreement) for t in tokens], self.aggregation),
            "msp": self.msp,
            "perplexity": self.msp / self.counted,
            "entropy": float(np.mean([token.entropy for token in tokens])),
        }
        return signals | {self.config.method: self.score}

    @property
    def accept(self) -> bool | None:
        """True: accept; False: abstain, by the calibration's threshold; None: no decision.

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
            return "No decision: pass a calibration."
        other = self.calibration.other_settings(self.compared_settings)
        if other:
            return f"No decision: settings differ from the calibration ({'; '.join(other)})."
        if self.calibration.decision is None:
            return (
                "No decision: the calibration has no threshold. `polygraph_asmi calibrate` "
                "computes one with a risk guarantee."
            )
        reason = self.calibration.decision.explain(self.signals)
        if not self.accept:
            return reason
        values = {"prompt_tokens": self.prompt_tokens, "msp": self.msp}
        return " ".join([reason, *self.calibration.out_of_range(values)])

    @property
    def confident_but_fragile(self) -> bool | None:
        """MSP below and score above the calibration's medians; None: no verdict."""
        run = self.applied_calibration
        if run is None or not run.ranks:
            return None
        return self.msp <= run.msp_median and self.score > run.median

    @property
    def verdict(self) -> list[str]:
        """How to read the score, and on which data that rests; the last sentence is its limit."""
        aggregated = {"max": "maximum"}.get(self.aggregation, self.aggregation)
        scope = "; heads masked only while the model predicts the answer" * (
            self.config.scope == "response"
        )
        lines = [
            f"{self.label}: {self.score:.4f} nats (0 to {self.highest:.2f}; higher = more "
            f"fragile), the {aggregated} over {self.counted} token{'s' * (self.counted != 1)}"
            f"{scope}."
        ]
        if not self.answered:
            lines.append(
                "No verdict: the model's answer is empty. The number is the score of the token "
                "that ends the answer."
            )
        elif self.calibration is None:
            lines.append(
                "No verdict: it needs a calibration (labelled answers of this model to similar "
                "questions). In tests on four models of up to 1.5B parameters, there was no "
                "evidence that Sem-ASMI helps beyond simpler scores (MSP, entropy and length)."
            )
        else:
            run_lines = self.calibration.verdict(self.score, self.compared_settings)
            applied = self.applied_calibration
            if applied is None or applied.decision is None:
                lines += run_lines
            else:  # valid even if this score ranks nothing: it may use another signal
                lines.insert(1, self.accept_reason)
                no_verdict = f"{self.symbol}: no verdict:"
                lines += [line.replace("No verdict:", no_verdict, 1) for line in run_lines]
            if self.confident_but_fragile:
                lines.append(self._about_confidence(self.calibration))
        return [*lines, *self._over_robust(), *self.warnings, BOUNDARY]

    def _about_confidence(self, run: Calibration) -> str:
        return (
            f"Confident but fragile: the answer's probability {probability(self.msp)} is above the "
            f"calibration's median ({probability(run.msp_median)}), and so is its score (median "
            f"{run.median:.4f}). This describes the whole answer: the paper finds no such effect "
            "for single tokens."
        )

    def _over_robust(self) -> list[str]:
        """A sentence if masking changes little, in the calibration or, without, in this answer."""
        response, where = None, "the model's predictions on the calibration answers"
        if self.calibration is not None:
            response = self.calibration.masking_response
        if response is None:
            response, where = self.masking_response, "the predictions"
        if response >= OVER_ROBUST:
            return []
        return [
            f"Masking heads hardly changed {where} (mean MI {response:.4f} nats, below "
            f"{OVER_ROBUST}): the score may carry no information (not validated)."
        ]

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived values as plain values, for JSON."""
        content = asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}
        for name in ("calibration", "span_calibration"):
            run = getattr(self, name)
            content[name] = None if run is None else run.name
        return content | {
            "digest": digest_of(content),
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
            "error_probability_interval": self.error_probability_interval,
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
