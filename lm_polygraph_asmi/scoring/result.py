"""Results of scoring: an answer with its scores, its tokens, and sentences that explain them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lm_polygraph_asmi.analysis.mechanism import votes
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.scores import aggregate, token_scores
from lm_polygraph_asmi.core.statistics import AnswerStatistics
from lm_polygraph_asmi.inputs import text_of
from lm_polygraph_asmi.scoring.page import FULL_SHADE, Card, render, render_part, visible
from lm_polygraph_asmi.scoring.provenance import answer_end, digest_of, prompt_format
from lm_polygraph_asmi.scoring.signals import SIGNALS, unmasked_signals

if TYPE_CHECKING:
    import pandas as pd

BARS = " ▁▂▃▄▅▆▇█"
BOUNDARY = (
    "The score is meant only for answers that a given context determines. For closed-book "
    "questions, try MSP."
)
NO_SCALE = (
    "Scores have no common scale. A calibration, from labelled answers of this model to similar "
    "questions, tells how likely an error is. In tests on models of 135M to 500M parameters, "
    "Sem-ASMI ranked errors worse than MSP and perplexity, and added little to them; at 1.5B, the "
    "comparison was inconclusive."
)


@dataclass(frozen=True)
class Token:
    """One token of a scored answer.

    Example:
        >>> first = scorer.score(prompt, " Edda Holm").tokens[0]
        >>> isinstance(first, Token), first.start, first.u == first.mi * (1 - first.agreement)
        (True, 0, True)
    """

    text: str  # scored_text[start:end]; empty if a later token completes its character
    start: int
    end: int
    id: int
    mi: float  # MI_t, nats
    agreement: float  # A_t, in [0, 1]
    u: float  # MI_t times the method's discount, nats; higher = more fragile
    entropy: float  # of the unmasked model's next-token distribution, nats
    log_likelihood: float  # under the unmasked model, nats, at most 0
    vote: float  # share of masks under which this token is the most likely one
    alternative: str | None  # the other token that is most often the most likely one
    alternative_share: float  # share of masks under which the alternative is the most likely one

    @property
    def shade(self) -> float:
        """Darkness in [0, 1]: the square root of u / (0.1 nats), at most 1."""
        return min(1.0, math.sqrt(max(0.0, self.u) / FULL_SHADE))

    @property
    def bar(self) -> str:
        """The shade as a bar, readable without colour."""
        return BARS[round(self.shade * (len(BARS) - 1))]


def tokens_of(
    stats: AnswerStatistics,
    answer: str,
    offsets: Sequence[tuple[int, int]],
    gate: float,
    tokenizer: Any,
) -> list[Token]:
    """The tokens of an answer, built from the engine's statistics.

    Args:
        answer: the scored text.
        offsets: the characters (start, end) of each token in it.
        gate: alpha, the weight of the semantic discount (`core.scores.discount`).
        tokenizer: decodes the alternatives.
    """
    ids = stats.tokens.tolist()
    numbers = zip(
        stats.mi.tolist(),
        stats.agreement.tolist(),
        stats.entropy.tolist(),
        stats.log_likelihood.tolist(),
        strict=True,
    )
    return [
        Token(
            text=answer[start:end],
            start=start,
            end=end,
            id=token,
            mi=mi,
            agreement=agreement,
            u=token_scores(mi, agreement, gate),
            entropy=entropy,
            log_likelihood=log_likelihood,
            vote=vote.agree,
            alternative=None if vote.alternative is None else tokenizer.decode([vote.alternative]),
            alternative_share=vote.share,
        )
        for token, vote, (start, end), (mi, agreement, entropy, log_likelihood) in zip(
            ids, votes(stats.top_token, ids), offsets, numbers, strict=True
        )
    ]


@dataclass(frozen=True, kw_only=True)
class ScoredAnswer:
    """An answer that was scored, without its numbers."""

    prompt: str | list[dict[str, Any]]
    answer: str | list[int]  # as passed; the model's own is without the tokens that end it
    scored_text: str  # all scored tokens as text; token offsets refer to it
    ids: tuple[int, ...]  # token ids, with those that end the answer
    counted: int  # the score is computed from this many tokens, from the first
    settings: dict[str, Any]  # of `config`, with derived ones; without `stop` for given token ids
    model: str  # the model's name; may be empty
    warnings: tuple[str, ...]  # problems with prompt, answer or tokenizer
    content_end: int  # number of characters of `scored_text` before the ending
    ending: str  # text that ends the answer, such as "</s>"; empty if the answer was cut off
    answered: bool  # False if the answer is empty or blank
    prompt_tokens: int

    @property
    def compared_settings(self) -> dict[str, Any]:
        """What answers must share to be comparable: settings, model, forms of prompt and answer."""
        settings = dict(self.settings)
        described = prompt_format(self.prompt, settings.pop("template", {}))
        described["model"] = self.model
        if settings.get("closing_token", True):
            described["answer_end"] = answer_end(
                self.content_end < len(self.scored_text),
                len(self.ids),
                settings.get("max_new_tokens"),
            )
        return described | settings


@dataclass(frozen=True, kw_only=True)
class UnmaskedAnswer(ScoredAnswer):
    """An answer read without masked passes: from `Scorer.read`, or from a row of a file.

    Example:
        >>> answer = scorer.read(prompt, " Edda Holm")
        >>> isinstance(answer, UnmaskedAnswer), sorted(answer.signals)
        (True, ['entropy', 'msp', 'perplexity'])
    """

    signals: dict[str, float]  # as `Score.signals`; `Scorer.read` gives those that need no masks
    # Inputs of a learned score: group -> array (width,). Empty if hidden states were not read.
    features: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "UnmaskedAnswer | None":
        """The answer in a row that `score_file` wrote, with all its signals.

        None: the row was changed since it was written, or is not a scored row.
        """
        names = {each.name for each in fields(cls)} - {"features"}
        if not names <= row.keys() or row.get("digest") != digest_of(row):
            return None
        values = {name: row[name] for name in names}
        return cls(**values | {name: tuple(values[name] or ()) for name in ("ids", "warnings")})

    @classmethod
    def of_table(cls, row: Mapping[str, Any], signals: dict[str, float]) -> "UnmaskedAnswer":
        """The answer in a row of any other table, with signals computed elsewhere.

        Its model, its tokens, and how it ended are unknown.
        """
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
        """Read what `to_dict` returned, or a row of `score_file`. Raises ValueError otherwise."""
        names = {field.name for field in fields(cls)}
        try:
            values = {name: value for name, value in content.items() if name in names}
            values["tokens"] = tuple(Token(**token) for token in values["tokens"])
            values |= {name: tuple(values[name]) for name in ("ids", "warnings")}
            return cls(**values)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                "expected what Score.to_dict returns, or a row of `polygraph_asmi score --out "
                "FILE`; "
                f"got {error!r}"
            ) from error

    def __format__(self, spec: str) -> str:
        return format(self.score, spec) if spec else str(self)

    def __float__(self) -> float:
        return self.score

    def __repr__(self) -> str:
        return f"Score({self.label} {self.score:.4f} nats, answer={self.answer!r})"

    def __str__(self) -> str:
        """The explanation, one sentence per line."""
        return "\n".join(self.explanation)

    @property
    def config(self) -> ASMIConfig:
        """The settings used, but `num_samples` is the default even if samples were passed."""
        return ASMIConfig.from_dict(self.settings | {"num_samples": ASMIConfig.num_samples})

    @property
    def label(self) -> str:
        """The method's name, such as "Sem-ASMI", with any aggregation other than the paper's."""
        symbol, other = self.config.symbol, self.config.describe("aggregation")
        return f"{symbol} ({', '.join(other)})" if other else symbol

    @property
    def highest(self) -> float:
        """Upper bound of the score in nats: ln S, or for a sum, ln S times the counted tokens."""
        summed = self.counted if self.config.aggregation == "sum" else 1
        return math.log(self.settings["num_masks"]) * summed

    @cached_property
    def signals(self) -> dict[str, float]:
        """Uncertainty signals of this answer, nats; higher = more uncertain.

        They are computed from the counted tokens. "asmi" and "sem" are aggregated as the score is;
        for the others, see `unmasked_signals`.
        """
        tokens = self.tokens[: self.counted]
        aggregation = self.config.aggregation
        return {
            "asmi": aggregate([t.mi for t in tokens], aggregation),
            "sem": aggregate([token_scores(t.mi, t.agreement) for t in tokens], aggregation),
            **unmasked_signals([t.log_likelihood for t in tokens], [t.entropy for t in tokens]),
            self.config.method: self.score,
        }

    @property
    def explanation(self) -> list[str]:
        """Sentences on how to read the score; the last says what the score is not meant for."""
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
                "The model's answer is empty, so the score is that of the token that ends it."
            )
        return [*lines, *self.warnings, NO_SCALE, BOUNDARY]

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived values as plain values for JSON."""
        content = asdict(self) | {"signals": self.signals, "ids": list(self.ids)}
        return content | {
            "digest": digest_of(content),
            "unit": "nats",
            "highest": self.highest,
            "explanation": self.explanation,
        }

    def to_df(self) -> "pd.DataFrame":
        """A table with one row per token, and the attributes of `Token` as columns."""
        import pandas as pd

        return pd.DataFrame([asdict(token) for token in self.tokens])

    def to_html(self, title: str = "Fragility of an answer") -> str:
        """A self-contained HTML page: tokens are shaded by fragility, and alternatives listed."""
        return render([self.card], title)

    @property
    def card(self) -> Card:
        """The score as a card of a page."""
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
        """The texts and a table. The answer's characters cannot control the terminal."""
        yield Text(visible(self.scored_text))
        yield from map(Text, self.explanation)
        yield Text(
            "The most fragile tokens. Chosen by: share of masks under which the token is the most "
            "likely one; alternative: the most frequent other choice, with its share.",
            style="dim",
        )
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
