"""Uncertainty signals of an answer: their names, and what is needed to compute them.

Signals are in nats, higher = more uncertain.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from lm_polygraph_asmi.config import METHODS, ASMIConfig


class Signal(NamedTuple):
    """A signal computed for a finished answer."""

    title: str  # its name in sentences
    masked: bool  # whether it needs masked passes, or only the unmasked pass
    states: bool = False  # whether it needs that pass's hidden states after the masked layer

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of the settings that the signal depends on."""
        if self.masked:
            return (*ASMIConfig.names("masks", "score"), "layer", "samples")
        # The first two decide which tokens an answer has, and which of them the score counts.
        return ("closing_token", "stop", *(("depth", "layer", "structure") if self.states else ()))


LEARNED = "learned"  # name of the signal that is learned during calibration
SIGNALS = {
    **{method: Signal(title, masked=True) for method, title in METHODS.items()},
    "msp": Signal("MSP", masked=False),
    "perplexity": Signal("perplexity", masked=False),
    "entropy": Signal("entropy", masked=False),
    LEARNED: Signal("learned score", masked=False, states=True),
}
"""Name of a signal in the settings -> the signal."""

COLUMN = "column:"  # prefix of a signal that is read from a column, as another method's score


def column_of(signal: str) -> tuple[str, int]:
    """The column named by a signal and its sign: "column:-NAME" is a confidence, with sign -1.

    The name is empty if the signal is not a column.
    """
    name = signal.removeprefix(COLUMN) if signal.startswith(COLUMN) else ""
    return (name[1:], -1) if name.startswith("-") else (name, 1)


def signal_of(name: str) -> Signal:
    """The signal with this name, or of this column; ValueError if there is none."""
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
    """Signals of the unmasked pass, computed from the counted tokens.

    "msp" is the negative log-likelihood, "perplexity" its mean over tokens (the log of the
    perplexity), and "entropy" the mean entropy.
    """
    msp = -float(np.sum(log_likelihood))
    return {
        "msp": msp,
        "perplexity": msp / len(log_likelihood),
        "entropy": float(np.mean(entropy)),
    }


def unit_of(signal: str) -> str:
    """The unit of a signal after a space. It is empty for a column, whose unit is unknown."""
    return "" if column_of(signal)[0] else " nats"
