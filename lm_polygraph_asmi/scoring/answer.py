"""An answer and its signals, without the scores of its tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from lm_polygraph_asmi.scoring.provenance import compared, digest_of


@dataclass(frozen=True, kw_only=True)
class UnmaskedAnswer:
    """An answer under the unmasked model alone, as `read` returns it; or that of a written row.

    Attributes:
        signals: MSP, perplexity and entropy (of a row, all), as `Score.signals`.
        ids: token ids, the end included.
        features: what a learned score reads, group -> (width,); empty if states were not read.
        prompt, answer, scored_text, settings, model, warnings, content_end, ending, answered,
            prompt_tokens, counted: as of `Score`.

    Example:
        >>> answer = read(scorer, prompt, " Edda Holm")
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
        return compared(self)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "UnmaskedAnswer | None":
        """The answer of a row that `score_file` wrote, with all its signals; None: it was changed
        since, or is another kind of row."""
        names = {each.name for each in fields(cls)} - {"features"}
        if not names <= row.keys() or row.get("digest") != digest_of(row):
            return None
        values = {name: row[name] for name in names}
        return cls(**values | {name: tuple(values[name] or ()) for name in ("ids", "warnings")})
