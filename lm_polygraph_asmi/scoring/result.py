"""What scoring returns: an answer with its numbers, its tokens, and sentences that explain them."""

import json
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
from lm_polygraph_asmi.scoring.provenance import answer_end, digest_of, prompt_format, short_hash
from lm_polygraph_asmi.scoring.signals import SIGNALS, unmasked_signals

if TYPE_CHECKING:
    import pandas as pd

BARS = " ▁▂▃▄▅▆▇█"
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


@dataclass(frozen=True)
class Token:
    """One token of a scored answer.

    Example:
        >>> first = scorer.score(prompt, " Edda Holm").tokens[0]
        >>> isinstance(first, Token), first.start, first.u == first.mi * (1 - first.agreement)
        (True, 0, True)
    """

    text: str  # scored_text[start:end]; empty if its character ends in a later token
    start: int
    end: int
    id: int
    mi: float  # MI_t, nats
    agreement: float  # A_t, in [0, 1]
    u: float  # MI_t times the method's discount, nats; higher = more fragile
    entropy: float  # of the unmasked model's next-token distribution, nats
    log_likelihood: float  # under the unmasked model, nats, at most 0
    vote: float  # share of masks under which it is the most likely token
    alternative: str | None  # the subnetworks' most frequent other choice
    alternative_share: float  # share of masks that choose it

    @property
    def shade(self) -> float:
        """Square root of u / 0.1 nats, at most 1: the darkest shade is 1."""
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
    """The tokens of an answer, from the engine's statistics.

    Args:
        answer: the scored text.
        offsets: the characters (start, end) of each token in it.
        gate: alpha, the weight of the semantic discount (`core.scores.discount`).
        tokenizer: writes the subnetworks' other choices.
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
        """What answers must share to be compared: settings, model, forms of prompt and answer."""
        settings = dict(self.settings)
        described = prompt_format(self.prompt) | {"model": self.model}
        if settings.get("closing_token", True):
            described["answer_end"] = answer_end(
                self.content_end < len(self.scored_text),
                len(self.ids),
                settings.get("max_new_tokens"),
            )
        # Questions have documents of their own. Tools and other variables are part of the form.
        template = settings.pop("template", {})
        if beside := {name: value for name, value in template.items() if name != "documents"}:
            described["template"] = short_hash(json.dumps(beside, default=str))
        return described | settings


@dataclass(frozen=True, kw_only=True)
class UnmaskedAnswer(ScoredAnswer):
    """An answer without its masked passes: what `Scorer.read` returns, or what a row records.

    Example:
        >>> answer = scorer.read(prompt, " Edda Holm")
        >>> isinstance(answer, UnmaskedAnswer), sorted(answer.signals)
        (True, ['entropy', 'msp', 'perplexity'])
    """

    signals: dict[str, float]  # as `Score.signals`; from `Scorer.read`, those without masks
    # What a learned score reads, group -> (width,); empty if states were not read.
    features: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of_row(cls, row: Mapping[str, Any]) -> "UnmaskedAnswer | None":
        """The answer of a row that `score_file` wrote, with all its signals.

        None: the row was changed since, or is of another kind.
        """
        names = {each.name for each in fields(cls)} - {"features"}
        if not names <= row.keys() or row.get("digest") != digest_of(row):
            return None
        values = {name: row[name] for name in names}
        return cls(**values | {name: tuple(values[name] or ()) for name in ("ids", "warnings")})

    @classmethod
    def of_table(cls, row: Mapping[str, Any], signals: dict[str, float]) -> "UnmaskedAnswer":
        """The answer of a row of any table, with signals from elsewhere.

        Its model, its tokens and what ended it are unknown.
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
