"""Accept or abstain: a threshold on one signal, with its risk guarantee."""

from collections.abc import Mapping
from dataclasses import dataclass

from lm_polygraph_asmi.analysis.risk_control import RiskThreshold
from lm_polygraph_asmi.config import METHODS

SIGNALS = {**METHODS, "msp": "MSP", "perplexity": "perplexity", "entropy": "entropy"}
"""Signals of every scored answer: name in settings -> name in sentences."""


@dataclass(frozen=True)
class Decision:
    """Accept an answer if a signal is at most a threshold; else abstain.

    Attributes:
        signal: a key of `SIGNALS`.
        guarantee: the threshold, with its risk guarantee.

    Raises:
        ValueError: unknown signal.

    Example:
        >>> from lm_polygraph_asmi.analysis import risk_threshold
        >>> perplexities, wrong = [0.1] * 150 + [0.9] * 50, [0] * 150 + [1] * 50
        >>> clusters = [str(n) for n in range(200)]  # independent answers
        >>> threshold = risk_threshold(perplexities, wrong, clusters, 0.1, 0.9)
        >>> decision = Decision("perplexity", threshold)
        >>> decision.accepts({"perplexity": 0.05}), decision.accepts({"perplexity": 0.5})
        (True, False)
    """

    signal: str
    guarantee: RiskThreshold

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS:
            raise ValueError(f"expected a signal of {list(SIGNALS)}, got {self.signal!r}")

    def accepts(self, signals: Mapping[str, float]) -> bool | None:
        """True: accept an answer with these signals; False: abstain; None: no threshold."""
        if self.guarantee.threshold is None:
            return None
        return bool(signals[self.signal] <= self.guarantee.threshold)

    def explain(self, signals: Mapping[str, float]) -> str:
        """The decision on an answer, with its reason, in sentences."""
        if self.guarantee.threshold is None:
            return f"No threshold {self}."
        value, kind = signals[self.signal], SIGNALS[self.signal]
        if not self.accepts(signals):
            return f"Abstain: {kind} {value:.4g} nats is above {self.guarantee.threshold:.4g}."
        return (
            f"Accept: {kind} {value:.4g} nats is at most {self.guarantee.threshold:.4g}. Risk "
            f"guarantee: with {100 * self.guarantee.confidence:g}% confidence, the error rate of "
            f"accepted answers is at most {100 * self.guarantee.risk:g}%."
        )

    def __str__(self) -> str:
        return f"by {SIGNALS[self.signal]}: {self.guarantee}"
