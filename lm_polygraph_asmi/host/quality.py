"""Quality metrics for short, extractive answers, in addition to those of LM-Polygraph.

ROUGE-L counts a correct answer as wrong if it is longer than the gold answer, such as "Six-time
Grammy winner" for "Six". The metrics here test whether the answer contains the gold answer, or its
words. In configs:

  generation_metrics: [{name: ReferenceInAnswer}, {name: TokenF1}, {name: TokenRecall}]

LM-Polygraph looks metrics up in its own script, and the callback of the shipped configs adds these
there (`mends.mended`). They compare NFC text without case and punctuation, in any script. Marks
that are part of a number are kept (see `words`), unless `kwargs: {squad: true}` asks for SQuAD's
rule.
"""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from lm_polygraph.generation_metrics.generation_metric import GenerationMetric
from lm_polygraph.generation_metrics.rouge import RougeMetric as HostRouge
from rouge_score.tokenizers import DefaultTokenizer

from lm_polygraph_asmi.validation import is_unspaced, same_text

ALIKE = str.maketrans(
    "\u2212\u2044\u2215\u066b\u066c\u2019\u2032",
    "-//.,''",
    "".join(map(chr, range(0xFE00, 0xFE10))),
)
"""Translates marks in numbers to the ASCII marks they look like: minus, slashes, Arabic separators,
apostrophes. Removes variation selectors."""
SIGNS = string.punctuation + "\u2212\u2044\u2215\u02b9\u02ba\u02bb\u02bc\u02bd"
"""Punctuation of ASCII, and minus, slashes and apostrophes that Unicode classes otherwise."""
THOUSANDS = re.compile(r"(?<![\d.,'])(?!0)\d{1,3}([,'])\d{3}(?:\1\d{3})*(?!\d|[,']\d)")
"""Matches a number whose thousands are separated: 1,000, but not 3,5 or 0,500."""
LEFT_OUT = 0.1
"""Largest share of a run's rows that may have no label; such a run only gets a warning."""
ENGLISH = ("AlignScore", "Bert", "Bart")
"""Prefixes of the names of metrics whose models read English."""


def is_punctuation(character: str) -> bool:
    """Whether a character is punctuation of any script, or an accent without a letter.

    Other symbols are kept: 5 € is not 5 $ (although SQuAD's evaluation drops the $), and an answer
    may be an emoji.
    """
    kind = unicodedata.category(character)
    return kind[0] == "P" or kind == "Sk" or character in SIGNS


def words(text: str, squad: bool = False, gap: str = "") -> list[str]:
    """Words of a text, normalised as in SQuAD's evaluation: without case, punctuation and articles.

    It works for any script: full-width letters and ligatures become plain ones, and in a script
    without spaces, such as Chinese, each character is a word. Numbers are treated otherwise than by
    SQuAD, which takes 3.5 for 35 and -5 for 5. Here, marks between two digits are kept (3.5, 3,5,
    1/2, 10:30, 1914-1918), and so are a minus and a point at the beginning of a number. All dashes
    are equal, all slashes are equal, and 1,000 is 1000.

    Args:
        squad: whether to drop the marks of numbers, too, as in SQuAD's evaluation.
        gap: what replaces a mark: nothing, or a space as in TriviaQA's evaluation.
    """
    plain = "".join(map(_plain, same_text(text).translate(ALIKE)))
    folded = unicodedata.normalize("NFC", plain.casefold())
    spaced = "".join(f" {char} " if is_unspaced(char) else char for char in folded)
    kept, end = "", 0
    for in_marks, characters in groupby(spaced, is_punctuation):
        part = "".join(characters)
        end += len(part)
        if in_marks:
            part = (not squad and _marks_of_number(kept[-2:], part, spaced[end : end + 2])) or gap
        kept += part
    text = unicodedata.normalize("NFC", kept)
    if not squad:
        text = THOUSANDS.sub(lambda number: re.sub("[,']", "", number[0]), text)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _plain(char: str) -> str:
    """The plain character that a character is a form of. All dashes become one."""
    plain = "-" if unicodedata.category(char) == "Pd" else unicodedata.normalize("NFKC", char)
    accent = is_punctuation(char) and len(plain) > 1  # NFKC makes it a space and an accent
    # These would change the meaning as plain digits: 10² is not 102.
    value = unicodedata.decomposition(char).startswith(("<super>", "<sub>", "<fraction>"))
    return char if accent or value else plain


def _marks_of_number(before: str, marks: str, after: str) -> str:
    """The marks before a number that are kept in its word; "" if no number follows.

    `before` and `after`: the two characters on each side of the marks.
    """
    if after and unicodedata.category(after[0]) == "Sc":  # a currency
        after = after[1:]
    if not after[:1].isnumeric():
        return ""
    within = before[-1:].isnumeric()
    # Brackets and quotes (Ps, Pe, Pi, Pf) separate numbers: 17(3) is 17 and 3.
    apart = any(c == '"' or unicodedata.category(c) in ("Ps", "Pe", "Pi", "Pf") for c in marks)
    if within and not apart:
        return re.sub(r"(?<=.)\+", "", re.sub("[$%]", "", marks) or marks)
    if marks == "-" and re.fullmatch(r"\de", before):  # 1e-5
        return marks
    begins = re.search(r"(?<![^\W_])(?<![.-])-?\.?$", before[-1:] + marks.rstrip("$"))
    sign = begins[0] if begins else ""
    return f" {sign}" if sign or within else ""


def unreadable(metric: str, gold: str) -> str | None:
    """Why a metric, given by its class or its name, cannot read a gold answer; None if it can.

    ROUGE reads only a-z and 0-9: it takes "Хольм 1931" for "1931", and "Huế" for "Huệ". The models
    of the metrics `ENGLISH` have seen little other than English.
    """
    gold_words, rouge = words(gold), metric.startswith("Rouge")
    empty = rouge and not DefaultTokenizer().tokenize(gold)
    if not gold_words and (not gold.strip() or empty or metric.startswith((*METRICS,))):
        return "has no word except articles and punctuation"
    if empty:
        return "has no letter from a to z and no digit"
    if rouge and (dropped := _dropped_by_rouge(gold)):
        return f"has {dropped!r}, which this metric drops"
    if metric.startswith(ENGLISH) and any(map(_is_foreign, gold_words)):
        return "is not in Latin script"
    return None


def _dropped_by_rouge(gold: str) -> str:
    """The letters, accents and digits of a text that ROUGE's tokenizer drops."""
    left = Counter("".join(DefaultTokenizer().tokenize(gold)))
    letters = unicodedata.normalize("NFC", gold.lower())
    return "".join(
        char for char in dict.fromkeys(letters)
        if (char.isalnum() or unicodedata.combining(char)) and letters.count(char) > left[char]
    )  # fmt: skip


def _is_foreign(word: str) -> bool:
    """Whether a word has letters or digits, but none is Latin. "à" and "€" are not foreign."""
    names = [unicodedata.name(char, "") for char in word if char.isalnum() and not char.isascii()]
    latin = re.search("[a-z0-9]", word) or any(name.startswith("LATIN") for name in names)
    return bool(names) and not latin


def unread_rows(
    metric: str,
    golds: Sequence[Any],
    ids: Sequence[Any] | None = None,
    process: Callable[[str], str] = str,
) -> dict[Any, tuple[str, str]]:
    """Rows whose gold answers a metric cannot read: id -> (gold answer, reason).

    If a row has several gold answers, it is enough that a metric reads one. ROUGE must read all: a
    gold answer that it reads in part can make a wrong answer right, and one that it cannot read can
    make a right answer wrong.

    Args:
        golds: for each row, one text or several. `process` is applied before a metric reads them.
        ids: ids of the rows; None: numbers from 0.
    """
    enough = any if metric.startswith("Rouge") else all
    rows: dict[Any, tuple[str, str]] = {}
    for row, gold in zip(range(len(golds)) if ids is None else ids, golds, strict=True):
        texts = gold if isinstance(gold, list) else [gold]
        reasons = {text: unreadable(metric, process(text)) for text in texts}
        if reasons and enough(reasons.values()):
            rows[row] = next((text, why) for text, why in reasons.items() if why)
    return rows


def why_unread(metric: str, rows: Mapping[Any, tuple[str, str]], of: int) -> str:
    """A sentence on the rows that `unread_rows` found among `of` rows, and what to do."""
    shown = "; ".join(f"{row}: {text!r:.80} {why}" for row, (text, why) in [*rows.items()][:3])
    advice = (
        "use generation_metrics=[{name: AccuracyMetric}] with process_output_fn=null and "
        "process_target_fn=null, which compares texts as they are, or leave these rows out"
        if any("word" in why for _, why in rows.values())
        else "use generation_metrics=[{name: ReferenceInAnswer}], which reads any script"
    )
    return f"{metric} cannot read the gold answers of {len(rows)} of {of} rows ({shown}): {advice}"


def reference_in_answer(answer: str, reference: str, squad: bool = False) -> float:
    """1 if the answer contains the gold answer's words in sequence, otherwise 0.

    A gold answer without words ("the", "!") is contained only in an answer without words. `squad`:
    see `words`.
    """
    answer_words, gold_words = words(answer, squad), words(reference, squad)
    if not gold_words:
        return float(not answer_words)
    return float(f" {' '.join(gold_words)} " in f" {' '.join(answer_words)} ")


def token_f1(answer: str, reference: str, squad: bool = False) -> float:
    """SQuAD's F1: harmonic mean of precision and recall of words; in [0, 1], higher = better."""
    answer_words, gold_words = words(answer, squad), words(reference, squad)
    if not answer_words or not gold_words:
        return float(answer_words == gold_words)
    common = sum((Counter(answer_words) & Counter(gold_words)).values())
    return 2 * common / (len(answer_words) + len(gold_words))


def token_recall(answer: str, reference: str, squad: bool = False) -> float:
    """Share of the gold answer's words that the answer has; in [0, 1], higher = better."""
    answer_words, gold_words = words(answer, squad), words(reference, squad)
    if not gold_words:
        return float(not answer_words)
    return sum((Counter(answer_words) & Counter(gold_words)).values()) / len(gold_words)


class _WordMetric(GenerationMetric):
    """A metric of words. Each example gets its maximum over all accepted gold answers.

    Args:
        squad: whether numbers lose their marks, as in SQuAD's evaluation. It is part of the name.
    """

    compare: Callable[[str, str, bool], float]

    def __init__(self, squad: bool = False) -> None:
        super().__init__(["greedy_texts"], "sequence")
        if not isinstance(squad, bool):
            raise ValueError(f"expected squad: true or false in kwargs, got {squad!r}")
        self.squad = squad

    def __str__(self) -> str:
        return type(self).__name__ + "_squad" * self.squad

    def __call__(self, stats: dict[str, Any], target_texts: list[str | list[str]]) -> np.ndarray:
        lists = [gold if isinstance(gold, list) else [gold] for gold in target_texts]
        pairs = zip(stats["greedy_texts"], lists, strict=True)
        return np.array(
            [
                max(self.compare(answer, gold, self.squad) for gold in golds)
                for answer, golds in pairs
            ]
        )


class ReferenceInAnswer(_WordMetric):
    """See `reference_in_answer`."""

    compare = staticmethod(reference_in_answer)


class TokenF1(_WordMetric):
    """See `token_f1`."""

    compare = staticmethod(token_f1)


class TokenRecall(_WordMetric):
    """See `token_recall`."""

    compare = staticmethod(token_recall)


class RougeMetric(HostRouge):
    """LM-Polygraph's ROUGE, but NaN (no label) if it cannot read the whole gold answer."""

    def _score_single(self, t1: str, t2: str) -> float:
        return np.nan if _dropped_by_rouge(t2) else float(super()._score_single(t1, t2))


METRICS: dict[str, type[GenerationMetric]] = {
    metric.__name__: metric for metric in (ReferenceInAnswer, TokenF1, TokenRecall)
}
