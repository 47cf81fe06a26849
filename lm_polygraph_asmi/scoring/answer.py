"""An answer under the unmasked model alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lm_polygraph_asmi.scoring.provenance import compared


@dataclass(frozen=True, kw_only=True)
class UnmaskedAnswer:
    """An answer and its signals under the unmasked model, without any masked pass.

    Attributes:
        signals: MSP, perplexity and entropy, nats; higher = more uncertain, as `Score.signals`.
        ids: token ids, the end included.
        features: what a learned score reads, group -> (width,); empty if states were not read.
        prompt, answer, scored_text, settings, model, warnings, content_end, ending, answered,
            prompt_tokens, counted: as of `Score`.

    Example:
        >>> answer = scorer.read(prompt, " Edda Holm")
        >>> isinstance(answer, UnmaskedAnswer), sorted(answer.signals)
        (True, ['entropy', 'msp', 'perplexity'])
        >>> abs(answer.signals["msp"] / scorer.score(prompt, " Edda Holm").msp - 1) < 1e-4
        True
    """

    signals: dict[str, float]
    ids: tuple[int, ...]
    prompt: str | list[dict[str, Any]]
    answer: str | list[int]
    scored_text: str
    counted: int
    settings: dict[str, Any]
    model: str
    warnings: tuple[str, ...]
    content_end: int
    ending: str
    answered: bool
    prompt_tokens: int
    features: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @property
    def compared_settings(self) -> dict[str, Any]:
        """As of `Score`."""
        ended = self.content_end < len(self.scored_text)
        return compared(self.prompt, self.model, self.settings, len(self.ids), ended)
