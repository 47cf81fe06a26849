"""An answer as it was scored, with or without masks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from lm_polygraph_asmi.inputs import text_of
from lm_polygraph_asmi.scoring.provenance import answer_end, digest_of, prompt_format, short_hash


@dataclass(frozen=True, kw_only=True)
class ScoredAnswer:
    """What is known of every answer that was scored."""

    prompt: str | list[dict[str, Any]]
    answer: str | list[int]  # as passed; or the model's own, without the tokens that end it
    scored_text: str  # all scored tokens as text; their offsets refer to it
    ids: tuple[int, ...]  # token ids, the end included
    counted: int  # number of tokens, from the first, that the score is computed from
    settings: dict[str, Any]  # of `config`, with derived ones; no `stop` of token ids
    model: str  # its name, or empty
    warnings: tuple[str, ...]  # problems with prompt, answer or tokenizer
    content_end: int  # characters of `scored_text` before what ends the answer
    ending: str  # such as "</s>"; empty if the answer was cut off
    answered: bool  # False if the answer is empty or blank
    prompt_tokens: int

    @property
    def compared_settings(self) -> dict[str, Any]:
        """Settings, model, and form of prompt and answer, which a calibration must share."""
        settings = dict(self.settings)
        described = prompt_format(self.prompt) | {"model": self.model}
        if settings.get("closing_token", True):
            described["answer_end"] = answer_end(
                self.content_end < len(self.scored_text),
                len(self.ids),
                settings.get("max_new_tokens"),
            )
        # Documents differ from question to question; tools and other variables, if all share them,
        # belong to the form of the prompt.
        template = settings.pop("template", {})
        if beside := {name: value for name, value in template.items() if name != "documents"}:
            described["template"] = short_hash(json.dumps(beside, default=str))
        return described | settings


@dataclass(frozen=True, kw_only=True)
class UnmaskedAnswer(ScoredAnswer):
    """An answer under the unmasked model alone, as `Scorer.read` returns it; or of a written row.

    Example:
        >>> answer = scorer.read(prompt, " Edda Holm")
        >>> isinstance(answer, UnmaskedAnswer), sorted(answer.signals)
        (True, ['entropy', 'msp', 'perplexity'])
    """

    signals: dict[str, float]  # those without masks (of a row, all), as `Score.signals`
    # What a learned score reads, group -> (width,); empty if states were not read.
    features: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "UnmaskedAnswer | None":
        """The answer of a row that `score_file` wrote, with all its signals; None: it was changed
        since, or is another kind of row."""
        names = {each.name for each in fields(cls)} - {"features"}
        if not names <= row.keys() or row.get("digest") != digest_of(row):
            return None
        values = {name: row[name] for name in names}
        return cls(**values | {name: tuple(values[name] or ()) for name in ("ids", "warnings")})

    @classmethod
    def of_table(cls, row: Mapping[str, Any], signals: dict[str, float]) -> "UnmaskedAnswer":
        """The answer of a row of any table, with signals of others: its model, tokens and end are
        unknown."""
        answer = row.get("answer")
        text = text_of(answer)
        return cls(
            signals=signals,
            prompt=row.get("prompt") or "",
            answer=answer or "",
            scored_text=text,
            answered=answer is None or bool(text.strip()),
            ids=(),
            counted=0,
            settings={"closing_token": False},
            model="",
            warnings=(),
            content_end=len(text),
            ending="",
            prompt_tokens=0,
        )
