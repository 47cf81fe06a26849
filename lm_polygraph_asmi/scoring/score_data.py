"""The numbers of a scored answer; `Score` adds the texts."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.maths.scores import aggregate, token_scores
from lm_polygraph_asmi.scoring.calibration import Calibration
from lm_polygraph_asmi.scoring.provenance import answer_end, prompt_format
from lm_polygraph_asmi.scoring.segments import Span, segment_answer, span_of
from lm_polygraph_asmi.scoring.tokens import Token

if TYPE_CHECKING:
    from typing_extensions import Self

NOT_VALIDATED = "Not validated: the paper finds the effect for whole answers."


@dataclass(frozen=True, repr=False)
class ScoreData:
    """Fields and derived numbers of a `Score`, which documents them."""

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
        other = self.config.describe("aggregation", "perturbation", "perturbation_scale")
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

    def with_spans(self, offsets: Sequence[tuple[int, int]]) -> "Self":
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
