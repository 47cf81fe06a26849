"""What `score` returns: numbers, a table, an HTML page and a verdict in sentences."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult

from lm_polygraph_asmi.scoring.calibration import Calibration
from lm_polygraph_asmi.scoring.page import render, render_part
from lm_polygraph_asmi.scoring.provenance import digest_of
from lm_polygraph_asmi.scoring.score_data import ScoreData
from lm_polygraph_asmi.scoring.terminal import in_terminal
from lm_polygraph_asmi.scoring.tokens import Token
from lm_polygraph_asmi.scoring.verdict import verdict

if TYPE_CHECKING:
    import pandas as pd

DERIVED = (
    "spans", "unit", "highest", "percentile", "error_probability", "confident_but_fragile",
    "verdict", "signals", "accept", "accept_reason", "error_probability_interval", "digest",
)  # fmt: skip
"""Entries of `Score.to_dict` besides the fields."""


class Score(ScoreData):
    """A scored answer.

    Attributes:
        score: mean of u over the counted tokens (sum or maximum, see `aggregation`), nats, 0 to
            ln S; higher = more fragile.
        prompt: text or messages.
        answer: as passed, text or token ids; or the model's greedy answer as text, without the
            tokens that end it.
        scored_text: the scored tokens as text, special and closing tokens included; the offsets of
            tokens refer to it.
        tokens: all tokens.
        counted: number of tokens, from the first, that the score is computed from.
        msp: negative log-likelihood of the answer under the unmasked model, nats.
        diversity, gate: div(x) and alpha(x) of Adapt-ASMI; None for other methods.
        settings: of `config`, with the derived p and S, and the layer; no stop strings if the
            answer was token ids.
        model: its name, or empty.
        seconds: of the masked passes.
        warnings: problems with prompt, answer or tokenizer.
        calibration: the calibration; None without.
        content_end: characters of `scored_text` before the tokens that end the answer.
        ending: what ends `scored_text`, such as "</s>" or a stop string; empty if the answer was
            cut off, None if not saved. To an answer passed as text, the likeliest end was added.
        answered: False if the answer is empty or blank.
        offsets: parts chosen by the caller, see `with_spans`; None: see `spans`.
        prompt_tokens: tokens of the prompt; None if not saved.
        span_calibration: calibration from labelled parts of answers; None without.

    Example:
        >>> result = scorer.score(prompt, " Edda Holm")
        >>> result.counted == len(result.tokens)  # the closing token counts
        True
        >>> result.percentile is None  # without a calibration
        True
        >>> Score.from_dict(result.to_dict()) == result
        True
    """

    @classmethod
    def from_dict(
        cls, content: Mapping[str, Any], calibration: Calibration | None = None
    ) -> "Score":
        """Read what `to_dict` returned, or a line of the output file; other fields are dropped.

        Args:
            calibration: the calibration, of which only the name is saved.

        Raises:
            ValueError: `content` is not a saved score.
        """
        names = {field.name for field in fields(cls)}
        try:
            values = {name: value for name, value in content.items() if name in names}
            values["tokens"] = tuple(Token.from_dict(token) for token in values["tokens"])
            values["warnings"] = tuple(values["warnings"])
            if values.get("offsets") is not None:
                values["offsets"] = tuple((start, end) for start, end in values["offsets"])
            return cls(**values | {"calibration": calibration, "span_calibration": None})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"expected what Score.to_dict returns, or a line of `polygraph_asmi score --out "
                f"FILE --tokens full`; got {error!r}"
            ) from error

    def __lt__(self, other: object) -> bool:
        """Scores sort by fragility, least fragile first."""
        return self.score < other.score if isinstance(other, Score) else NotImplemented

    def __format__(self, spec: str) -> str:
        return format(self.score, spec) if spec else str(self)

    def __float__(self) -> float:
        return self.score

    def __repr__(self) -> str:
        return f"Score({self.label} {self.score:.4f} nats, answer={self.answer!r})"

    @property
    def verdict(self) -> list[str]:
        """How to read the score, and on which data that rests, in sentences."""
        return verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived values as plain values, for JSON."""
        content = asdict(self) | {"tokens": [asdict(token) for token in self.tokens]}
        for name in ("calibration", "span_calibration"):
            run = getattr(self, name)
            content[name] = None if run is None else run.name
        return content | {
            "digest": digest_of(content),
            "spans": [asdict(span) for span in self.parts],
            "unit": "nats",
            "highest": self.highest,
            "percentile": self.percentile,
            "error_probability": self.error_probability,
            "confident_but_fragile": self.confident_but_fragile,
            "verdict": self.verdict,
            "signals": self.signals,
            "accept": self.accept,
            "accept_reason": self.accept_reason,
            "error_probability_interval": self.error_probability_interval,
        }

    def to_df(self) -> "pd.DataFrame":
        """One row per token; columns: the attributes of `Token`."""
        import pandas as pd

        return pd.DataFrame([asdict(token) for token in self.tokens])

    def to_html(self, title: str = "Fragility of an answer") -> str:
        """A self-contained HTML page: tokens shaded by fragility, with the subnetworks' choices."""
        return render([self], title)

    def _repr_html_(self) -> str:
        return render_part(self)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Heat map for a terminal: shades, and bars to read without colour."""
        return in_terminal(self, options.max_width)
