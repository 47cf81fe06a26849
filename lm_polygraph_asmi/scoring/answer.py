"""An answer and its signals, without the scores of its tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from lm_polygraph_asmi.scoring.provenance import compared, digest_of


@dataclass(frozen=True, kw_only=True)
class UnmaskedAnswer:
    """An answer under the unmasked model alone, as `Scorer.read` returns it; or of a written row.

    Example:
        >>> answer = scorer.read(prompt, " Edda Holm")
        >>> isinstance(answer, UnmaskedAnswer), sorted(answer.signals)
        (True, ['entropy', 'msp', 'perplexity'])
    """

    signals: dict[str, float]  # those without masks (of a row, all), as `Score.signals`
    ids: tuple[int, ...]  # token ids, the end included
    prompt: str | list[dict[str, Any]]  # this and the next as of `Score`
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
    # What a learned score reads, group -> (width,); empty if states were not read.
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
