"""What `score` returns: numbers, a table, an HTML page and sentences that explain them."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.scores import aggregate, token_scores
from lm_polygraph_asmi.scoring.answer import ScoredAnswer
from lm_polygraph_asmi.scoring.page import Card, render, render_part, visible
from lm_polygraph_asmi.scoring.provenance import digest_of
from lm_polygraph_asmi.scoring.signals import SIGNALS, unmasked_signals
from lm_polygraph_asmi.scoring.tokens import Token

if TYPE_CHECKING:
    import pandas as pd

BOUNDARY = (
    "The score is meant only for answers from the given context. For closed-book questions, try "
    "MSP."
)
NO_SCALE = (
    "Scores have no common scale. A calibration, from labelled answers of this model to similar "
    "questions, tells how likely an error is. In tests on models of 135M to 500M parameters, "
    "Sem-ASMI ranked errors worse than MSP and perplexity, and added little to them; at 1.5B, the "
    "comparison was inconclusive."
)
CAPTION = (
    "Most fragile tokens. Chosen by: masks under which the token is the most likely one; "
    "alternative: the most frequent other."
)


@dataclass(frozen=True, repr=False, kw_only=True)
class Score(ScoredAnswer):
    """A scored answer.

    Example:
        >>> result = scorer.score(prompt, " Edda Holm")
        >>> result.counted == len(result.tokens)  # the closing token counts
        True
        >>> Score.from_dict(result.to_dict()) == result
        True
    """

    score: float  # mean (see `aggregation`) of u over the counted tokens, nats, 0 to ln S
    tokens: tuple[Token, ...]
    msp: float  # negative log-likelihood of the answer under the unmasked model, nats
    diversity: float | None  # div(x) of Adapt-ASMI
    gate: float | None  # alpha(x) of Adapt-ASMI
    seconds: float

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Score":
        """Read what `to_dict` returned, or a row of `score_file`; ValueError: another mapping."""
        names = {field.name for field in fields(cls)}
        try:
            values = {name: value for name, value in content.items() if name in names}
            values["tokens"] = tuple(Token(**token) for token in values["tokens"])
            values |= {name: tuple(values[name]) for name in ("ids", "warnings")}
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"expected what Score.to_dict returns, or a row of `polygraph_asmi score --out "
                f"FILE`; got {error!r}"
            ) from error

    def __format__(self, spec: str) -> str:
        return format(self.score, spec) if spec else str(self)

    def __float__(self) -> float:
        return self.score

    def __repr__(self) -> str:
        return f"Score({self.label} {self.score:.4f} nats, answer={self.answer!r})"

    def __str__(self) -> str:
        """The explanation, a line for each sentence."""
        return "\n".join(self.explanation)

    @property
    def config(self) -> ASMIConfig:
        """The settings in force; `num_samples` is the default, even if samples were passed."""
        return ASMIConfig.from_dict(self.settings | {"num_samples": ASMIConfig.num_samples})

    @property
    def label(self) -> str:
        """The method's name, such as "Sem-ASMI", with the aggregation if it is not the paper's."""
        symbol, other = self.config.symbol, self.config.describe("aggregation")
        return f"{symbol} ({', '.join(other)})" if other else symbol

    @property
    def highest(self) -> float:
        """Upper bound of the score: ln S, nats; for a sum, times the counted tokens."""
        summed = self.counted if self.config.aggregation == "sum" else 1
        return math.log(self.settings["num_masks"]) * summed

    @cached_property
    def signals(self) -> dict[str, float]:
        """Uncertainty signals of this answer, nats; higher = more uncertain.

        Over the counted tokens: "asmi" and "sem" aggregated as the score; others as of
        `unmasked_signals`.
        """
        tokens = self.tokens[: self.counted]
        signals = {
            "asmi": aggregate([token.mi for token in tokens], self.config.aggregation),
            "sem": aggregate(
                [token_scores(t.mi, t.agreement) for t in tokens], self.config.aggregation
            ),
        }
        signals |= unmasked_signals([t.log_likelihood for t in tokens], [t.entropy for t in tokens])
        return signals | {self.config.method: self.score}

    @property
    def explanation(self) -> list[str]:
        """How to read the score, in sentences; the last is its limit."""
        aggregated = {"max": "maximum"}.get(self.config.aggregation, self.config.aggregation)
        free = ", ".join(
            f"{signal.title} {self.signals[name]:.4g}"
            for name, signal in SIGNALS.items()
            if name in self.signals and not signal.masked
        )
        lines = [
            f"{self.label}: {self.score:.4f} nats (0 to {self.highest:.2f}; higher = more "
            f"fragile), the {aggregated} over {self.counted} token{'s' * (self.counted != 1)}.",
            f"To compare, in nats (higher = more uncertain): {free}.",
        ]
        if not self.answered:
            lines.append(
                "The model's answer is empty: the number is the score of the token that ends it."
            )
        return [*lines, *self.warnings, NO_SCALE, BOUNDARY]

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived values as plain values, for JSON."""
        content = asdict(self) | {"signals": self.signals, "ids": list(self.ids)}
        return content | {
            "digest": digest_of(content),
            "unit": "nats",
            "highest": self.highest,
            "explanation": self.explanation,
        }

    def to_df(self) -> "pd.DataFrame":
        """One row per token; columns: the attributes of `Token`."""
        import pandas as pd

        return pd.DataFrame([asdict(token) for token in self.tokens])

    def to_html(self, title: str = "Fragility of an answer") -> str:
        """A self-contained HTML page: tokens shaded by fragility, with the subnetworks' choices."""
        return render([self.card], title)

    @property
    def card(self) -> Card:
        """The score on a page."""
        return Card(
            heading=f"{self.label} {self.score:.4f} nats",
            prompt=self.prompt,
            text=self.scored_text,
            sentences=self.explanation,
            short=f"{self.score:.4f}",
            rank=-self.score,
            score=self,
        )

    def _repr_html_(self) -> str:
        return render_part(self.card)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Texts and a table; no character of the answer controls the terminal."""
        yield Text(visible(self.scored_text))
        yield from map(Text, self.explanation)
        yield Text(CAPTION, style="dim")
        table = Table(
            "token", "u", "", "MI", "chosen by", "alternative", box=None, header_style="dim"
        )
        for token in sorted(self.tokens, key=lambda token: -token.u)[:5]:
            other = "" if token.alternative is None else repr(token.alternative)
            share = f" {token.alternative_share:.0%}" if other else ""
            table.add_row(
                Text(repr(token.text)),
                f"{token.u:.4f}",
                token.bar,
                f"{token.mi:.4f}",
                f"{token.vote:.0%}",
                Text(other + share),
            )
        yield table
