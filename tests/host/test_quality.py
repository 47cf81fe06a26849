"""Quality of extractive answers."""

import random
import string
from collections import Counter
from statistics import harmonic_mean

import numpy as np
import pytest
from lm_polygraph.generation_metrics import RougeMetric

from lm_polygraph_asmi.host import quality
from lm_polygraph_asmi.host.quality import ReferenceInAnswer, reference_in_answer, token_f1


@pytest.mark.parametrize(
    ("answer", "reference", "stands", "f1", "recall"),
    [
        ("Six", "six", 1, 1, 1),
        ("Six-time Grammy winner.", "Six", 0, 0, 0),  # SQuAD joins what a hyphen joins
        ("He won six Grammys", "Six", 1, 2 / 5, 1),
        ("in the Kingdom of France", "Kingdom of France", 1, 6 / 7, 1),
        ("France, the Kingdom of", "Kingdom of France", 0, 1, 1),
        ("Paris", "Kingdom of France", 0, 0, 0),
        ("unkind", "kind", 0, 0, 0),  # whole words
        ("", "six", 0, 0, 0),
        ("the", "a", 1, 1, 1),  # nothing but articles
        ("six", "!", 0, 0, 0),
    ],
)
def test_by_hand(answer, reference, stands, f1, recall):
    assert reference_in_answer(answer, reference) == stands
    assert token_f1(answer, reference) == pytest.approx(f1)
    assert quality.token_recall(answer, reference) == pytest.approx(recall)


def squads_f1(prediction: str, truth: str) -> float:
    def tokens(text):
        kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return [w for w in kept.split() if w not in ("a", "an", "the")]

    one, other = Counter(tokens(prediction)), Counter(tokens(truth))
    same = sum(min(one[word], other[word]) for word in one)
    if not one or not other:
        return float(one == other)
    return harmonic_mean([same / one.total(), same / other.total()])  # of precision and recall


def test_f1_is_that_of_the_definition():
    generator = random.Random(0)
    vocabulary = ["a", "the", "mill", "Mill,", "red", "red-ish", "!"]
    for _ in range(300):
        answer, reference = (
            " ".join(generator.choices(vocabulary, k=generator.randrange(5))) for _ in range(2)
        )
        assert token_f1(answer, reference) == pytest.approx(squads_f1(answer, reference))
        assert reference_in_answer(answer, reference) <= quality.token_recall(answer, reference)


def test_the_best_of_all_accepted_answers_counts():
    stats = {"greedy_texts": ["the red mill", "a kite"]}
    targets = [["blue", "Mill"], ["mill", "kites"]]
    np.testing.assert_array_equal(ReferenceInAnswer()(stats, targets), [1, 0])
    np.testing.assert_array_equal(ReferenceInAnswer()(stats, ["mill", "kite"]), [1, 1])
    assert quality.unread("RougeMetric", [["1931", "Эдда"]]) is None


LOOK_DIFFERENT = [
    ("“Edda Holm”", "Edda Holm"), ("Zoe\u0308", "Zo\u00eb"), ("«Эдда» — 1931", "эдда"),
    ("don’t", "don't"), ("Hawai\u02bbi", "Hawai'i"), ("It has 3\u202f000\u00a0men", "3 000 men"),
    ("co\u00adop\u200b", "Coop"), ("１９３１年。", "1931"), ("STRASSE", "Straße"), ("⑴", "1"),
    ("他住在北京。", "北京"), ("مدينة القاهرة؟", "القاهرة"), ("a\u0300 Paris", "à Paris"),
]  # fmt: skip
ARE_DIFFERENT = [("10²", "102"), ("Zoe", "Zoë"), ("5 €", "5 £"), ("🙂", "🙁"), ("北海", "北京"),
                 ("1½", "11/2")]  # fmt: skip


@pytest.mark.parametrize(("answer", "reference"), LOOK_DIFFERENT + ARE_DIFFERENT)
def test_characters_of_any_script(answer, reference):
    same = (answer, reference) in LOOK_DIFFERENT
    assert reference_in_answer(answer, reference) == same
    assert quality.token_recall(answer, reference) == 1 or not same


@pytest.mark.parametrize(
    ("gold", "by_rouge", "by_words"),
    [
        ("Эдда", True, False), ("北京 2008", True, False), ("🙂", True, False),
        ("القاهرة", True, False), ("Zoë", False, False), ("The", False, True),
        ("5 €", False, False), ("É", True, False), ("１９３１", True, False), ("?!", True, True),
        ("1931", False, False),
    ],
)  # fmt: skip
def test_gold_answers_that_a_metric_cannot_read(gold, by_rouge, by_words):
    for metric in ("RougeMetric", "Rouge_rougeL"):
        assert (quality.unjudged(metric, gold) is not None) == by_rouge
    assert (quality.unjudged("ReferenceInAnswer", gold) is not None) == by_words
    if not by_rouge:  # ROUGE itself agrees with itself
        assert RougeMetric("rougeL")({"greedy_texts": [gold]}, [gold]) == [1]
