"""Uncertainty signals of an answer: what each is called, and what it needs.

Signals are in nats, higher = more uncertain.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from lm_polygraph_asmi.config import METHODS, ASMIConfig


class Signal(NamedTuple):
    """A signal of a finished answer."""

    title: str  # its name in sentences
    masked: bool  # whether it needs masked passes; else the unmasked pass is enough
    states: bool = False  # whether it needs that pass's hidden states, after the masked layer

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings that it depends on."""
        if self.masked:
            return (*ASMIConfig.names("masks", "score"), "layer", "samples")
        return UNMASKED_SETTINGS + (("depth", "layer", "structure") if self.states else ())


UNMASKED_SETTINGS = ("closing_token", "stop")
"""Settings that decide which tokens an answer has, and which of them count."""
LEARNED = "learned"
"""Name of the signal that a calibration learns."""
SIGNALS = {
    **{method: Signal(title, masked=True) for method, title in METHODS.items()},
    "msp": Signal("MSP", masked=False),
    "perplexity": Signal("perplexity", masked=False),
    "entropy": Signal("entropy", masked=False),
    LEARNED: Signal("learned score", masked=False, states=True),
}
"""Name in settings -> signal."""

COLUMN = "column:"
"""Beginning of the name of a signal that is a column of a table, of any other score."""


def column_of(signal: str) -> tuple[str, int]:
    """Column of a signal "column:NAME", and -1 for "column:-NAME", a confidence; else no name."""
    name = signal.removeprefix(COLUMN) if signal.startswith(COLUMN) else ""
    return (name[1:], -1) if name.startswith("-") else (name, 1)


def signal_of(name: str) -> Signal:
    """The signal of this name, or of a column; ValueError: neither."""
    column, sign = column_of(name)
    if column:
        return Signal(f"minus {column}" if sign < 0 else column, masked=False)
    if name not in SIGNALS:
        raise ValueError(f"expected a signal of {', '.join(SIGNALS)}, or column:NAME; got {name!r}")
    return SIGNALS[name]


def unmasked_signals(
    log_likelihood: Sequence[float] | Float[np.ndarray, " T"],
    entropy: Sequence[float] | Float[np.ndarray, " T"],
) -> dict[str, float]:
    """The signals of the unmasked pass, from the counted tokens.

    "msp": the negative log-likelihood; "perplexity": its mean (the log of the perplexity);
    "entropy": a mean.
    """
    msp = -float(np.sum(log_likelihood))
    return {
        "msp": msp,
        "perplexity": msp / len(log_likelihood),
        "entropy": float(np.mean(entropy)),
    }


def unit_of(signal: str) -> str:
    """The unit of a signal, with a space before it; empty for a column, whose unit is unknown."""
    return "" if column_of(signal)[0] else " nats"
