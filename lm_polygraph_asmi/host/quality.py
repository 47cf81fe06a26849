"""Quality metrics for short, extractive answers, in addition to those of LM-Polygraph.

ROUGE-L counts a correct answer as wrong if it is longer than the gold answer: "Six-time Grammy
winner" for "Six". These test whether the answer contains the gold answer, or its words. In configs:

    generation_metrics: [{name: ReferenceInAnswer}, {name: TokenF1}, {name: TokenRecall}]

LM-Polygraph looks metrics up in its own script. The callback of the shipped configs adds these with
`register_metrics`.
"""

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from lm_polygraph.generation_metrics.generation_metric import GenerationMetric

from lm_polygraph_asmi.host.align_score import AlignScore, HostAlignScore


def words(text: str) -> list[str]:
    """Words of a text, normalised as SQuAD's evaluation does: no case, punctuation, articles."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def reference_in_answer(answer: str, reference: str) -> float:
    """1 if the answer contains the words of the gold answer in sequence, else 0; higher = better.

    Only an answer without words contains a gold answer without words ("the", "!").
    """
    answer_words, gold_words = words(answer), words(reference)
    if not gold_words:
        return float(not answer_words)
    return float(f" {' '.join(gold_words)} " in f" {' '.join(answer_words)} ")


def token_f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of words, SQuAD's F1; in [0, 1], higher = better."""
    answer_words, gold_words = words(answer), words(reference)
    if not answer_words or not gold_words:
        return float(answer_words == gold_words)
    common = sum((Counter(answer_words) & Counter(gold_words)).values())
    return 2 * common / (len(answer_words) + len(gold_words))


def token_recall(answer: str, reference: str) -> float:
    """Share of the gold answer's words in the answer; in [0, 1], higher = better."""
    answer_words, gold_words = words(answer), words(reference)
    if not gold_words:
        return float(not answer_words)
    return sum((Counter(answer_words) & Counter(gold_words)).values()) / len(gold_words)


class _WordMetric(GenerationMetric):
    """Maximum over all accepted gold answers, one score per example."""

    compare: Callable[[str, str], float]

    def __init__(self) -> None:
        super().__init__(["greedy_texts"], "sequence")

    def __str__(self) -> str:
        return type(self).__name__

    def __call__(self, stats: dict[str, Any], target_texts: list[str | list[str]]) -> np.ndarray:
        lists = [gold if isinstance(gold, list) else [gold] for gold in target_texts]
        pairs = zip(stats["greedy_texts"], lists, strict=True)
        return np.array([max(type(self).compare(a, gold) for gold in golds) for a, golds in pairs])


class ReferenceInAnswer(_WordMetric):
    """See `reference_in_answer`."""

    compare = staticmethod(reference_in_answer)


class TokenF1(_WordMetric):
    """See `token_f1`."""

    compare = staticmethod(token_f1)


class TokenRecall(_WordMetric):
    """See `token_recall`."""

    compare = staticmethod(token_recall)


METRICS: dict[str, type[GenerationMetric]] = {
    metric.__name__: metric for metric in (ReferenceInAnswer, TokenF1, TokenRecall)
}


def register_metrics(script: dict[str, Any]) -> None:
    """Add the metrics to `script`, the global names of LM-Polygraph's script.

    Its own AlignScore is replaced by one that raises an error on another model's checkpoint.
    """
    for name, metric in METRICS.items():
        script.setdefault(name, metric)
    if script.get(AlignScore.__name__) is HostAlignScore:
        script[AlignScore.__name__] = AlignScore
