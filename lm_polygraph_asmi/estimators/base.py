"""What the three estimators share: settings, their check, and how tokens become a score."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_polygraph.estimators import Estimator

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.maths import operating_point
from lm_polygraph_asmi.results.aggregation import aggregate
from lm_polygraph_asmi.results.names import at_depth, require
from lm_polygraph_asmi.results.scales import with_scale
from lm_polygraph_asmi.validation import LEVELS, check_one_of


class MaskedHeadsEstimator(Estimator):
    """Sequence-level score: mean over the T response tokens of a per-token score, or their sum or
    maximum.

    In nats, between 0 and ln S (the sum: T ln S); higher = more uncertain. T counts every token
    LM-Polygraph's greedy decoding returned, the closing newline or end token too, exactly as its
    Perplexity does.

    The masked passes are made by the masked-heads calculator, which owns their settings. The
    arguments here say which settings the score is meant to have: they are part of the estimator's
    name, and a calculator that used others is an error rather than a mislabelled score.

    Args:
        config: the settings the score is meant to have; of the seed and the masks' rest, too.
            `closing_token` False leaves the closing token out of the score. An answer that consists
            of its closing token alone is then scored on that token. Of a stop string that takes
            several tokens, only the last is left out.
        level: "sequence", or "claim" for a score of each claim in an answer.
        **settings: in place of those of the config.

    Raises:
        TypeError: a setting there is not.
        ValueError: one out of range.
    """

    symbol: str
    method: str | None = None
    """The setting of this name, for the three of `config.METHODS`."""

    def __init__(
        self, config: ASMIConfig | None = None, *, level: str = "sequence", **settings: Any
    ) -> None:
        source = settings.get("source", "all")
        if not isinstance(source, str):
            raise ValueError(
                f"an estimator reads one source, got {source!r}: name an estimator for each of "
                "them, as the group asmi_sources does"
            )
        if self.method is not None:
            settings |= {"method": self.method}
        self.config = with_scale((config or ASMIConfig()).replace(**settings))
        check_one_of("level", level, LEVELS)
        needed = self._dependencies()
        super().__init__([*needed, "claims"] if level == "claim" else needed, level)

    def _dependencies(self) -> list[str]:
        return [*map(self._name, ("asmi_mi", "asmi_settings")), "asmi_closing"]

    def _name(self, statistic: str) -> str:
        return at_depth(statistic, self.config.depth, self.config.source)

    def __str__(self) -> str:
        """Name in tables and saved runs: depth and K always, the rest where not the default."""
        more = ["claims, experimental"] if self.level == "claim" else []
        return self.config.label(self.symbol, *more)

    @property
    def described(self) -> dict[str, Any]:
        """What a run's manifest says of the score, below its name in the part "methods"."""
        return self.config.to_dict() | {"symbol": self.symbol}

    def __call__(self, stats: dict[str, Any]) -> np.ndarray | list[list[float]]:
        """One score per example of the batch; at the level of claims, a list of them each.

        Raises:
            KeyError: a statistic is missing; the message says which calculator makes it.
            ValueError: the calculator used other settings, or a score would not be finite.
        """
        for settings in require(stats, self._name("asmi_settings")):
            self._check_settings(settings)
        token_scores = self._token_scores(stats)
        if self.level == "claim":
            examples = zip(token_scores, require(stats, "claims"), strict=True)
            by_claim = [[self._of_claim(own, claim) for claim in said] for own, said in examples]
            self._check_finite([score for scores in by_claim for score in scores])
            return by_claim
        scores = []
        for own, closing in zip(token_scores, require(stats, "asmi_closing"), strict=True):
            leave_out = closing and not self.config.closing_token and len(own) > 1
            scores.append(aggregate(own[:-1] if leave_out else own, self.config.aggregation))
        self._check_finite(scores)
        return np.array(scores)

    def _of_claim(self, token_scores: np.ndarray, claim: Any) -> float:
        places = list(claim.aligned_token_ids)
        if not places or not 0 <= min(places) <= max(places) < len(token_scores):
            raise ValueError(
                f"the claim {claim.claim_text!r:.80} names the tokens {places}, but the answer has "
                f"{len(token_scores)}: claims and scores are of other answers"
            )
        return aggregate(token_scores[places], self.config.aggregation)

    def _check_finite(self, scores: Sequence[float]) -> None:
        if not np.isfinite(scores).all():
            raise ValueError(
                f"{self} would return {scores}: LM-Polygraph would take a NaN for the most "
                "confident answer, so the run stops here"
            )

    def _check_settings(self, used: dict[str, Any]) -> None:
        expected = self.config.to_dict("masks") | operating_point(
            used["num_heads"], self.config.num_masks, self.config.mask_rate
        )._asdict()  # fmt: skip
        different = {k: v for k, v in expected.items() if used[k] != v}
        if different:
            raise ValueError(
                f"{self} expects {different}, but the masked-heads calculator used "
                f"{ {k: used[k] for k in different} }: give both the same settings"
            )

    @abstractmethod
    def _token_scores(self, stats: dict[str, Any]) -> list[np.ndarray]:
        """Per-token scores (T,) of each example, in nats."""


class SourceEstimator(MaskedHeadsEstimator):
    """A mean over tokens of what a source gives, made beside the masked passes.

    Raises:
        ValueError: no source; else as every estimator.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        if self.config.source == "all":
            raise ValueError(f"{self.symbol} needs a source, such as source='context'")
