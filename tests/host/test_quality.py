"""Quality of extractive answers."""

import random
import string
from statistics import harmonic_mean

import numpy as np
import pytest

from lm_polygraph_asmi.host import quality
from lm_polygraph_asmi.host.quality import ReferenceInAnswer, reference_in_answer, token_f1


def by_squad(prediction: str, truth: str) -> tuple[float, float, float]:
    """Whether the answer has the gold words in sequence, F1 and recall, by their definitions."""

    def tokens(text):
        kept = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return [w for w in kept.split() if w not in ("a", "an", "the")]

    found, wanted = tokens(prediction), tokens(truth)
    if not found or not wanted:
        return (float(found == wanted),) * 3
    starts = range(len(found))
    same = sum(min(found.count(word), wanted.count(word)) for word in {*wanted})
    recall = same / len(wanted)
    f1 = harmonic_mean([recall, same / len(found)])
    return float(any(found[i : i + len(wanted)] == wanted for i in starts)), f1, recall


def test_metrics_are_those_of_the_definitions():
    """On drawn texts; SQuAD joins what a hyphen joins, and "unkind" is another word than "kind"."""
    generator, drawn = random.Random(0), set()
    vocabulary = ["a", "the", "mill", "Mill,", "red", "red-ish", "reddish", "!"]
    metrics = reference_in_answer, token_f1, quality.token_recall
    for _ in range(500):
        texts = (" ".join(generator.choices(vocabulary, k=generator.randrange(5))) for _ in "ab")
        answer, reference = texts
        found = tuple(metric(answer, reference) for metric in metrics)
        assert found == pytest.approx(by_squad(answer, reference)), (answer, reference)
        drawn.add(found)
    assert len(drawn) > 15


def test_the_best_of_all_accepted_answers_counts():
    stats = {"greedy_texts": ["the red mill", "a kite"]}
    for golds, expected in (([["blue", "Mill"], ["mill", "kites"]], [1, 0]),
                            (["mill", "kite"], [1, 1])):  # fmt: skip
        np.testing.assert_array_equal(ReferenceInAnswer()(stats, golds), expected)
    assert quality.unread_rows("AlignScore", [["1931", "Эдда"]]) == {}


LOOK_DIFFERENT = [
    ("“Edda Holm”", "Edda Holm"), ("Zoe\u0308", "Zo\u00eb"), ("«Эдда» — 1931", "эдда"),
    ("don’t", "don't"), ("Hawai\u02bbi", "Hawai'i"), ("It has 3\u202f000\u00a0men", "3 000 men"),
    ("co\u00adop\u200b", "Coop"), ("１９３１年。", "1931"), ("STRASSE", "Straße"), ("⑴", "1"),
    ("他住在北京。", "北京"), ("مدينة القاهرة؟", "القاهرة"), ("a\u0300 Paris", "à Paris"),
    ("owl", "an owl"),
]  # fmt: skip
ARE_DIFFERENT = [("10²", "102"), ("Zoe", "Zoë"), ("5 €", "5 £"), ("🙂", "🙁"), ("北海", "北京"),
                 ("1½", "11/2"), ("car", "c r")]  # fmt: skip


NUMBERS = [
    ("1000", "1,000"), ("1,000,000.50", "1000000.50"), ("1914-1918", "1914–1918"), ("−5", "-5"),
    ("1⁄2 cup", "1/2"), ("It was 35.", "35"), ("COVID19", "COVID-19"), ("+5", "5"),
    ("10^+5", "10^5"), ("$3.50", "3.50"), ("-$5", "-5"), ("(-5)", "-5"), ("f(-5)", "-5"),
    ("５，０００", "5000"), ("1e+5", "1e5"), ("...5", "5"), ("3.5.", "3.5"), ("9/11,", "9/11"),
    ("气温是-5度", "-5"), ("٣٫٥", "٣.٥"), ("10’000", "10000"), ("5%-10%", "5-10"),
    ("\ufe63.5", "-.5"), ("At 10:30!", "10:30"), ("Article 17(3)", "17"),
    ("3(-5)", "-5"), ('5"x6"', '5x6'), ("E-3", "E3"), ("_-1", "-1"), ("E-.5", "E5"),
    ("5)6", "5 6"), ("5”6", "5 6"), ('5"6', "5 6"), ("5“6", "5 6"), ("3.(2", "3 2"),
    ("1e:-5", "1e -5"), ("123,456", "123456"), ("1,000,000,000", "1000000000"),
    ("д-5", "д5"),
]  # fmt: skip
OTHER_NUMBERS = [
    (" 35", "3.5"), ("5", "-5"), ("-5", "5"), ("12", "1/2"), ("1 2", "1/2"), ("35", "3,5"),
    ("1030", "10:30"), ("105", "10^5"), ("5", ".5"), ("10^-5", "10^5"), ("1e-5", "1e5"),
    ("0,500", "0500"), ("1,00", "100"), ("1,000,00", "100000"), ("3·5", "35"), ("5'11", "511"),
    ("气温是-5度", "5"), ("f(-5)", "f(5)"), ("-½", "½"), ("10²-5", "10²5"), ("-€5", "€5"),
    ("12,345,67", "1234567"), ("v1.2", "v12"), ("19141918", "1914-1918"), ("1.000", "1000"),
    ("17(3)", "173"), ("3(-5)", "5"), ("1,10000", "1,10,000"), ("10000,1", "10,000,1"),
    ("115551", "11,5551"), ("1234567", "1234,567"), ("1000000", "1,000'000"), ("55", "5+5"),
    ("56", "5%6"), ("-.5", "5"), ("1.5,000", "1.5000"), ("1'2,000", "1'2000"),
    ("1,000'5", "1000'5"), ("½.5", "½5"),
]  # fmt: skip
LOOK_DIFFERENT += NUMBERS
ARE_DIFFERENT += OTHER_NUMBERS


@pytest.mark.parametrize("metric", quality.METRICS.values())
def test_squads_rule_is_a_setting(metric):
    stats = {"greedy_texts": ["35", "It is -5", "1,000", "3.5"]}
    golds = ["3.5", "5", "1000", "3.5"]
    np.testing.assert_array_equal(metric()(stats, golds) == 1, [False, False, True, True])
    assert (metric(squad=True)(stats, golds) > 0).all()
    named = metric.__name__, f"{metric.__name__}_squad"
    assert (str(metric()), str(metric(squad=True))) == named
    assert quality.unreadable(named[1], "?!")
    with pytest.raises(ValueError, match="'yes'"):
        metric(squad="yes")


@pytest.mark.parametrize(("answer", "reference"), LOOK_DIFFERENT + ARE_DIFFERENT)
def test_characters_of_any_script(answer, reference):
    same = (answer, reference) in LOOK_DIFFERENT
    assert reference_in_answer(answer, reference) == same
    assert quality.token_recall(answer, reference) == 1 or not same
    words = quality.words(answer)
    assert quality.words(" ".join(words)) == words  # after `process_output_fn`, too


@pytest.mark.parametrize(
    ("gold", "by_rouge", "by_words"),
    [
        ("Эдда", True, False), ("北京 2008", True, False), ("🙂", True, False),
        ("القاهرة", True, False), ("Zoë", True, False), ("The", False, True),
        ("5 €", False, False), ("É", True, False), ("１９３１", True, False), ("?!", True, True),
        ("1931", False, False), ("Huế", True, False), ("Zoe\u0308", True, False),
        ("1½", True, False), ("Łódź", True, False), ("10²", True, False),
        ("Dünkirchen 1940", True, False),
        ("it's 5 €!", False, False), ("K", False, False),
    ],
)  # fmt: skip
def test_gold_answers_that_a_metric_cannot_read(gold, by_rouge, by_words):
    for metric in ("RougeMetric", "Rouge_rougeL"):
        assert (quality.unreadable(metric, gold) is not None) == by_rouge
    assert (quality.unreadable("ReferenceInAnswer", gold) is not None) == by_words
    # ROUGE itself agrees with itself, or gives no label.
    own = quality.RougeMetric("rougeL")({"greedy_texts": [gold]}, [gold])
    np.testing.assert_array_equal(own, [np.nan if by_rouge else 1])
