"""Quality of short, extractive answers, beside LM-Polygraph's own metrics.

ROUGE-L calls a right answer wrong that says more than the reference: "Six-time Grammy winner" for
"Six". These say whether, and how much of, the reference stands in the answer. In configs:

    generation_metrics: [{name: ReferenceInAnswer}, {name: TokenF1}, {name: TokenRecall}]

LM-Polygraph looks metrics up in its own script; `offer` puts these beside them (the callback of the
shipped configs calls it).
"""

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from lm_polygraph.generation_metrics.generation_metric import GenerationMetric


def words(text: str) -> list[str]:
    """Words of a text, normalised as SQuAD's evaluation does: no case, punctuation, articles."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def reference_in_answer(answer: str, reference: str) -> float:
    """1 where the reference is a run of whole words of the answer, else 0; higher = better.

    A reference without a word ("the", "!") stands in answers without a word alone.
    """
    said, wanted = words(answer), words(reference)
    if not wanted:
        return float(not said)
    return float(f" {' '.join(wanted)} " in f" {' '.join(said)} ")


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words, SQuAD's F1; in [0, 1], higher = better."""
    said, wanted = words(answer), words(reference)
    if not said or not wanted:
        return float(said == wanted)
    common = sum((Counter(said) & Counter(wanted)).values())
    return 2 * common / (len(said) + len(wanted))


def token_recall(answer: str, reference: str) -> float:
    """Share of the reference's words that the answer has; in [0, 1], higher = better."""
    said, wanted = words(answer), words(reference)
    if not wanted:
        return float(not said)
    return sum((Counter(said) & Counter(wanted)).values()) / len(wanted)


class _OfWords(GenerationMetric):
    """The best over all accepted answers, one score per example."""

    compare: Callable[[str, str], float]

    def __init__(self) -> None:
        super().__init__(["greedy_texts"], "sequence")

    def __str__(self) -> str:
        return type(self).__name__

    def __call__(self, stats: dict[str, Any], target_texts: list[str | list[str]]) -> np.ndarray:
        return np.array(
            [
                max(
                    type(self).compare(answer, reference)
                    for reference in (accepted if isinstance(accepted, list) else [accepted])
                )
                for answer, accepted in zip(stats["greedy_texts"], target_texts, strict=True)
            ]
        )


class ReferenceInAnswer(_OfWords):
    """See `reference_in_answer`."""

    compare = staticmethod(reference_in_answer)


class TokenF1(_OfWords):
    """See `token_f1`."""

    compare = staticmethod(token_f1)


class TokenRecall(_OfWords):
    """See `token_recall`."""

    compare = staticmethod(token_recall)


METRICS: dict[str, type[GenerationMetric]] = {
    metric.__name__: metric for metric in (ReferenceInAnswer, TokenF1, TokenRecall)
}


def offer(script: dict[str, Any]) -> None:
    """Let LM-Polygraph's script, whose global names these are, find the metrics by name."""
    for name, metric in METRICS.items():
        script.setdefault(name, metric)
