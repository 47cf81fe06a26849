"""Quality metrics for short, extractive answers, in addition to those of LM-Polygraph.

ROUGE-L counts a correct answer as wrong if it is longer than the gold answer: "Six-time Grammy
winner" for "Six". These test whether the answer contains the gold answer, or its words. In configs:

    generation_metrics: [{name: ReferenceInAnswer}, {name: TokenF1}, {name: TokenRecall}]

LM-Polygraph looks metrics up in its own script. The callback of the shipped configs adds these with
`mends.mended`. They compare NFC text without case and punctuation of any script.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lm_polygraph.generation_metrics.generation_metric import GenerationMetric

from lm_polygraph_asmi.validation import is_unspaced, same_text

SIGNS = string.punctuation + "\u2212\u2044\u02b9\u02ba\u02bb\u02bc\u02bd"
"""ASCII's punctuation, and minus, fraction slash and apostrophes that Unicode calls letters."""
ENGLISH = ("AlignScore", "Bert", "Bart")
"""Beginnings of the names of metrics whose models read English."""
VALUES = ("<super>", "<sub>", "<fraction>")
"""Compatibility characters that are not what they look like in plain digits: 10² is not 102."""


def is_punctuation(character: str) -> bool:
    """Whether a character is punctuation of any script, or an accent alone.

    Other symbols stay: 5 € is not 5 $ (though SQuAD's evaluation drops the ASCII one), and an
    answer may be an emoji.
    """
    kind = unicodedata.category(character)
    selector = "\ufe00" <= character <= "\ufe0f"
    return kind[0] == "P" or kind == "Sk" or selector or character in SIGNS


def words(text: str) -> list[str]:
    """Words of a text, normalised as SQuAD's evaluation does: no case, punctuation, articles.

    For any script: full-width letters and ligatures are plain ones, and of a script without spaces,
    such as Chinese, each character is a word.
    """
    plain = "".join(
        char if unicodedata.decomposition(char).startswith(VALUES)
        else unicodedata.normalize("NFKC", char)
        for char in same_text(text)
        if not is_punctuation(char)
    )  # fmt: skip
    text = unicodedata.normalize("NFC", plain.casefold())
    text = "".join(
        f" {char} " if is_unspaced(char) else char for char in text if not is_punctuation(char)
    )
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def unjudged(metric: str, gold: str) -> str | None:
    """Why a metric, by its class or its name in a run, cannot judge by this gold answer; or None.

    ROUGE reads only a-z and 0-9, so it takes "Хольм 1931" for "1931"; the models of `ENGLISH`
    have seen little else.
    """
    gold_words = words(gold)
    empty = metric.startswith("Rouge") and not re.search("[a-z0-9]", gold.lower())
    if not gold_words and (not gold.strip() or empty or metric in METRICS):
        return "has no word but articles and punctuation"
    if empty:
        return "has no letter from a to z and no digit"
    if metric.startswith(("Rouge", *ENGLISH)) and any(map(_is_foreign, gold_words)):
        return "is not in Latin script"
    return None


def _is_foreign(word: str) -> bool:
    """Whether a word has letters or digits, and none of them Latin: not "à", nor a sign as "€"."""
    names = [unicodedata.name(char, "") for char in word if char.isalnum() and not char.isascii()]
    latin = re.search("[a-z0-9]", word) or any(name.startswith("LATIN") for name in names)
    return bool(names) and not latin


def unread(
    metric: str,
    golds: Sequence[Any],
    ids: Sequence[Any] | None = None,
    process: Callable[[str], str] = str,
) -> str | None:
    """Rows without a gold answer by which a metric can judge, and what can; None without any.

    Args:
        golds: of each row, a text or several; `process` is applied before a metric sees them.
        ids: None: numbers from 0.
    """
    rows: dict[Any, tuple[str, str]] = {}
    for row, gold in zip(range(len(golds)) if ids is None else ids, golds, strict=True):
        texts = gold if isinstance(gold, list) else [gold]
        reasons = [unjudged(metric, process(text)) for text in texts]
        if reasons and all(reasons):
            rows[row] = texts[0], str(reasons[0])
    if not rows:
        return None
    shown = "; ".join(f"{row}: {text!r:.80} {why}" for row, (text, why) in [*rows.items()][:3])
    advice = "use generation_metrics=[{name: ReferenceInAnswer}], which reads any script"
    if any("word" in why for _, why in rows.values()):
        advice = (
            "use generation_metrics=[{name: AccuracyMetric}] with process_output_fn=null and "
            "process_target_fn=null, which compares texts as they are, or leave these rows out"
        )
    return (
        f"{metric} cannot judge by the gold answers of {len(rows)} of {len(golds)} rows ({shown}): "
        f"{advice}"
    )


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
