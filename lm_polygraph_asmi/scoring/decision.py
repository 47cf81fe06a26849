"""Whether an answer may be shown: a threshold with its promise, and what it was made on."""

from collections.abc import Mapping
from dataclasses import dataclass

from lm_polygraph_asmi.analysis.risk_control import RiskThreshold
from lm_polygraph_asmi.config import METHODS

SIGNALS = {**METHODS, "msp": "MSP", "perplexity": "perplexity", "entropy": "mean entropy"}
"""Signals that a scored answer has for free, by name in settings -> name in sentences."""


@dataclass(frozen=True)
class Decision:
    """Answers are accepted where a signal is at most a threshold.

    Attributes:
        signal: a key of `SIGNALS`.
        found: the threshold, with its promise.

    Example:
        >>> from lm_polygraph_asmi.analysis import risk_threshold
        >>> perplexities, wrong = [0.1] * 150 + [0.9] * 50, [0] * 150 + [1] * 50
        >>> own = [str(n) for n in range(200)]  # no two answers err together
        >>> decision = Decision("perplexity", risk_threshold(perplexities, wrong, own, 0.1, 0.9))
        >>> decision.accepts({"perplexity": 0.05}), decision.accepts({"perplexity": 0.5})
        (True, False)
    """

    signal: str
    found: RiskThreshold

    def __post_init__(self) -> None:
        if self.signal not in SIGNALS:
            raise ValueError(f"there is no signal {self.signal!r}, but {list(SIGNALS)}")

    def accepts(self, signals: Mapping[str, float]) -> bool | None:
        """Of an answer with these signals; None where there is no threshold."""
        if self.found.threshold is None:
            return None
        return bool(signals[self.signal] <= self.found.threshold)

    def said(self, signals: Mapping[str, float]) -> str:
        """The decision on an answer, and its ground."""
        if self.found.threshold is None:
            return f"No threshold: {self}."
        value, kind = signals[self.signal], SIGNALS[self.signal]
        accepted = bool(self.accepts(signals))
        said = "Accepted" if accepted else "Refused"
        return (
            f"{said}: {kind} {value:.4g} is {'not ' * accepted}above {self.found.threshold:.4g}. "
            f"The promise: of accepted answers at most {self.found.risk:.0%} are wrong, with "
            f"confidence {self.found.confidence:.0%}."
        )

    def __str__(self) -> str:
        return f"by {SIGNALS[self.signal]}, {self.found}"
