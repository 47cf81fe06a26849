"""What the three estimators share: settings, their check, and how tokens become a score."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_polygraph.estimators import Estimator

from lm_polygraph_asmi.maths import operating_point
from lm_polygraph_asmi.saved.aggregation import aggregate, aggregated_by
from lm_polygraph_asmi.saved.doses import dose_of
from lm_polygraph_asmi.saved.names import ABSENT, at_depth, perturbed_by, require
from lm_polygraph_asmi.validation import (
    check_aggregation,
    check_level,
    check_settings,
    check_source,
)


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
        depth: relative depth of the masked layer, in (0, 1).
        top_k: K, tokens kept per distribution.
        num_masks: S; None is the number derived from the model's heads and p (`operating_point`).
        mask_rate: p; None is the rate derived from the model's heads.
        mask_sampler: how masks are drawn.
        scope: positions at which heads are masked.
        source: what a masked head loses, "all" its output or what comes from one source; one of
            those that the calculator scores.
        seed: base seed of the masks.
        perturbation: what a mask changes: "heads", or another arm of the falsifier.
        dose: of it, a number or a file of doses; None leaves the change as it is.
        closing_token: False leaves the closing token out of the score. An answer that consists of
            its closing token alone is then scored on that token. Of a stop string that takes
            several tokens, only the last is left out.
        aggregation: how the score comes of its tokens': "mean", the paper's, "sum" or "max".

    Raises:
        ValueError: depth or p outside (0, 1), K below 1, S below 2, or no such aggregation.
    """

    symbol: str

    def __init__(
        self,
        depth: float = 0.6,
        top_k: int = 64,
        num_masks: int | None = None,
        mask_rate: float | None = None,
        mask_sampler: str = "bernoulli",
        scope: str = "all",
        source: str = "all",
        seed: int = 0,
        closing_token: bool = True,
        level: str = "sequence",
        perturbation: str = "heads",
        dose: float | str | None = None,
        aggregation: str = "mean",
    ) -> None:
        masked = {"depth": depth, "scope": scope, "mask_rate": mask_rate}
        dose = dose_of(dose, perturbation, masked)
        point = (top_k, num_masks, mask_rate, mask_sampler, scope)
        check_settings([depth], *point, perturbation, dose)
        if not isinstance(source, str):
            raise ValueError(
                f"an estimator reads one source, got {source!r}: name an estimator for each of "
                "them, as the group asmi_sources does"
            )
        check_source(source, scope, perturbation)
        check_level(level)
        check_aggregation(aggregation)
        self.depth, self.source = depth, source
        self.closing_token, self.aggregation = closing_token, aggregation
        self.expected: dict[str, Any] = {
            "top_k": top_k,
            "num_masks": num_masks,
            "mask_rate": mask_rate,
            "mask_sampler": mask_sampler,
            "scope": scope,
            "seed": seed,
            "perturbation": perturbation,
            "dose": dose,
        }
        needed = self._dependencies()
        super().__init__([*needed, "claims"] if level == "claim" else needed, level)

    def _dependencies(self) -> list[str]:
        return [
            *map(self._name, ("asmi_mi", "asmi_settings")),
            "asmi_closing",
        ]

    def _name(self, statistic: str) -> str:
        return at_depth(statistic, self.depth, self.source)

    def __str__(self) -> str:
        """Name in tables and saved runs: depth and K always, the rest where not the default."""
        defaults = {"mask_sampler": "bernoulli", "scope": "all", "seed": 0}
        labels = {"top_k": "K", "num_masks": "S", "mask_rate": "p"}
        parts = [f"{100 * self.depth:g}%"]
        for name, value in self.expected.items():
            if name not in ABSENT and value != defaults.get(name):
                parts.append(f"{labels.get(name, name)}={value}")
        if self.source != "all":
            parts.append(f"source={self.source}")
        parts += aggregated_by({"aggregation": self.aggregation})
        parts += perturbed_by(self.expected)
        if not self.closing_token:
            parts.append("no closing token")
        if self.level == "claim":
            parts.append("claims, experimental")
        return f"{self.symbol} ({', '.join(parts)})"

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
            leave_out = closing and not self.closing_token and len(own) > 1
            scores.append(aggregate(own[:-1] if leave_out else own, self.aggregation))
        self._check_finite(scores)
        return np.array(scores)

    def _of_claim(self, token_scores: np.ndarray, claim: Any) -> float:
        places = list(claim.aligned_token_ids)
        if not places or not 0 <= min(places) <= max(places) < len(token_scores):
            raise ValueError(
                f"the claim {claim.claim_text!r:.80} names the tokens {places}, but the answer has "
                f"{len(token_scores)}: claims and scores are of other answers"
            )
        return aggregate(token_scores[places], self.aggregation)

    def _check_finite(self, scores: Sequence[float]) -> None:
        if not np.isfinite(scores).all():
            raise ValueError(
                f"{self} would return {scores}: LM-Polygraph would take a NaN for the most "
                "confident answer, so the run stops here"
            )

    def _check_settings(self, used: dict[str, Any]) -> None:
        point = operating_point(
            used["num_heads"], self.expected["num_masks"], self.expected["mask_rate"]
        )
        expected = self.expected | point._asdict()
        used = ABSENT | used
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
        if self.source == "all":
            raise ValueError(f"{self.symbol} needs a source, such as source='context'")
