"""`Decision`: a calibration's decision to accept one answer, or to abstain."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.text import Text

from lm_polygraph_asmi.scoring.page import Card, render, render_part, visible
from lm_polygraph_asmi.scoring.provenance import digest_of
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.signals import column_of, signal_of, unit_of

EMPTY = "No decision: the answer is empty."
"""The `reason` if the answer is blank. Such an answer is never accepted."""
WORDS = {True: "accept", False: "abstain", None: "no decision"}


@dataclass(frozen=True, repr=False, kw_only=True)
class Decision:
    """A calibration's decision to accept an answer or to abstain, by its signal.

    Example:
        >>> decision = decider.decide(prompt, " Edda Holm")
        >>> decision.signal, decision.score, decision.accept, decision.reason[:19]
        ('msp', None, None, 'No threshold by MSP')
    """

    accept: bool | None  # True: accept; False: abstain; None: no decision, so abstain, too
    reason: str  # a sentence that explains `accept`
    signal: str  # key of `scoring.signals.SIGNALS`
    value: float | None  # value of the signal, nats, higher = more uncertain; None: unknown
    signals: dict[str, float]  # all signals that were computed, as in `Score.signals`
    threshold: float | None  # largest value that is accepted, nats; None: there is no threshold
    warnings: tuple[str, ...]  # problems of prompt or answer
    prompt: str | list[dict[str, Any]]  # text or messages
    answer: str | list[int]  # as passed, text or token ids; or the model's greedy answer as text
    text: str  # the answer's tokens as text, with those that end it
    ids: tuple[int, ...]  # the answer's token ids, with those that end it
    prompt_tokens: int | None
    settings: dict[str, Any]
    model: str
    calibration: str  # name of the calibration
    score: Score | None  # None if the decision needed no masked pass

    def __repr__(self) -> str:
        return f"Decision({self.word}, {self._number}, answer={self.answer!r})"

    def __str__(self) -> str:
        return "\n".join([visible(self.text), *self.sentences])

    def __rich__(self) -> Text:
        return Text(str(self))

    @property
    def word(self) -> str:
        """The decision: "accept", "abstain" or "no decision"."""
        return WORDS[self.accept]

    @property
    def _number(self) -> str:
        value = "not computed" if self.value is None else f"{self.value:.4g}{unit_of(self.signal)}"
        return f"{signal_of(self.signal).title} {value}"

    @property
    def sentences(self) -> list[str]:
        """The reason for the decision, and the warnings."""
        return [self.reason, *self.warnings]

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived values as plain values for JSON."""
        content = asdict(replace(self, score=None)) | {
            "score": self.score and self.score.to_dict(),
            "unit": "nats",
            "sentences": self.sentences,
        }
        return content | {"digest": self.digest(content)}

    @staticmethod
    def digest(line: Mapping[str, Any]) -> str:
        """Hash of a written row: of its answer, its calibration, and its decision."""
        names = ("signal", "value", "accept", "threshold", "reason", "calibration")
        result = [line.get(name) for name in names]
        if column_of(str(line.get("signal")))[0]:  # the id may replace the question
            result.append(line.get("id"))
        return digest_of({**line, "score": result, "msp": None})

    @property
    def card(self) -> Card:
        """The decision as a card of a page."""
        return Card(
            heading=f"{self.word.capitalize()}: {self._number}",
            prompt=self.prompt,
            text=self.text,
            sentences=self.sentences,
            short=self.word,
            rank=0.0 if self.value is None else -self.value,
            score=self.score,
        )

    def to_html(self, title: str = "Decision on an answer") -> str:
        """A self-contained HTML page. If there is a score, tokens are shaded by fragility."""
        return render([self.card], title)

    def _repr_html_(self) -> str:
        return render_part(self.card)
