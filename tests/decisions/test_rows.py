"""Labelled rows to a calibration: what is kept, what is left out, what is an error."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions import Calibration, calibrate_rows, risk_threshold
from lm_polygraph_asmi.decisions.fit import best_signal, rank_signals
from lm_polygraph_asmi.decisions.labels import (
    answer_digest,
    clusters_of,
    is_wrong,
    labels_of,
)
from lm_polygraph_asmi.scoring.rows import Row
from lm_polygraph_asmi.scoring.signals import TITLES
from lm_polygraph_asmi.scoring.unmasked import fingerprints
from tests.decisions.conftest import WORDS, N, labelled, lines_of
from tests.scoring.conftest import PROMPT


def numbered(*contents):
    return [Row(n, {"prompt": f"Who {n}?"} | content) for n, content in enumerate(contents, 1)]


def signals_of(score):
    """By its tokens."""
    tokens = score.tokens[: score.counted]
    msp = -sum(token.log_likelihood for token in tokens)
    means = {name: np.mean([getattr(t, name) for t in tokens]) for name in ("mi", "u", "entropy")}
    return {"asmi": means["mi"], "sem": means["u"], "msp": msp, "perplexity": msp / len(tokens),
            "entropy": means["entropy"]}  # fmt: skip


def test_what_is_made_of_labels(calibration, scores, scorer):
    wrong = np.array([not row["correct"] for row in labelled()])
    clusters = [str(row["cluster"]) for row in labelled()]
    values = [one.signals["perplexity"] for one in scores]
    assert (calibration.signal, calibration.values) == ("perplexity", sorted(values))
    assert (calibration.n, calibration.guarantee.clusters) == (N, N // 2)
    assert (calibration.errors, calibration.left_out) == (wrong.sum(), "")
    assert calibration.guarantee == risk_threshold(values, wrong, clusters, 0.4, 0.8)
    for kind, value in scores[0].signals.items():
        assert value == pytest.approx(signals_of(scores[0])[kind])
        found = calibration.signals[TITLES[kind]]
        each = [signals_of(one)[kind] for one in scores]
        assert found.auroc.value == pytest.approx(roc_auc_score(wrong, each))
        assert found.prr.low <= found.prr.value <= found.prr.high
    assert calibration.settings.items() >= fingerprints(scorer).items()
    assert calibration.prompt_tokens == sorted(one.prompt_tokens for one in scores)
    # Rows may repeat a prompt and an answer; each is counted.
    assert len(calibration.answer_digests) == N


def test_the_best_signal():
    wrong, noise = np.arange(60) % 2, np.random.default_rng(0).permutation(60) / 60
    columns = {"noise": noise, "good": wrong + 0.01 * noise, "bad": -wrong}
    answers = Labelled(wrong, range(60), resamples=200)
    ranked = rank_signals(columns, answers)
    assert best_signal(columns, answers) == "good"
    assert (ranked["good"].prr.value, ranked["bad"].prr.high < 0) == (1, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, 'expected "correct" .* got neither: no field'),
        ({"answer": " 7", "label": 1}, "got neither: the fields answer, label"),
        ({"correct": True, "quality": 1}, r"got \['correct', 'quality'\]"),
        *(({"correct": value}, "expected true or false, got") for value in ("yes", 2, 0.5)),
        *(({"quality": value}, "quality must be a number")
          for value in ("good", "0.9", True, math.nan, math.inf)),
        *(({"quality": value}, "between 0 and 1, got") for value in (90, 1.2, -0.1, 2)),
    ],
)  # fmt: skip
def test_labels_that_are_none(content, message):
    with pytest.raises(ValueError, match=message):
        is_wrong(content)


def test_labels():
    assert [is_wrong({"correct": value}) for value in (True, False, 1, 0)] == [False, True] * 2
    right = (0.49, None), (0.5, None), (1, None), (0.6, 0.7), (90, 50), (10, 50), (-1.0, -2.0)
    found = [is_wrong({"quality": quality}, limit) for quality, limit in right]
    assert found == [True, False, False, True, False, True, False]
    assert not is_wrong({"quality": 1 + 1e-9})  # a metric's rounding
    for right_from in (math.nan, math.inf, True, "0.5"):
        with pytest.raises(ValueError, match="right_from must be a number"):
            is_wrong({"quality": 0.9}, right_from)


ASKED = {"risk": 0.4, "confidence": 0.8, "signal": "msp", "resamples": 20}


def test_rows_without_a_label_or_an_answer_are_left_out(scored, scorer):
    """Answers of nothing are, as they are never accepted."""
    blank = {"prompt": PROMPT, "answer": "\n", "correct": True, "cluster": "blank"}
    blanks = lines_of(scorer, [blank, blank | {"answer": ""}])
    rows = [*scored[:6], *blanks, *(line | {"correct": None} for line in scored[6:9])]
    found = calibrate_rows(rows, **ASKED)
    assert found == calibrate_rows(scored[:6], **ASKED)
    assert found.left_out == "3 without a label, 2 empty"
    assert "Rows left out: 3 without a label, 2 empty." in str(found)
    with pytest.raises(ValueError, match="only empty or blank ones"):
        calibrate_rows(blanks, 0.1)
    expected = calibrate_rows(scored[:6], unlabelled=scored, **ASKED)
    assert calibrate_rows(scored[:6], unlabelled=[*scored, *blanks], **ASKED) == expected
    assert expected.guarantee.share == 0
    assert calibrate_rows(scored[:6], unlabelled=blanks, **ASKED) == found  # no score is left


PLAIN = (
    "expected a row with scores, got the fields prompt, answer, correct.*: run `polygraph_asmi "
    "score ROWS --model M --out answers.csv` first, label its column `correct`, then calibrate"
)


def test_rows_that_cannot_be_used(scored):
    rows = scored[:4]
    for number, changed, message in (
        (2, {"cluster": None}, "in all rows or in none, got none in row 3"),
        (3, {"id": "q1"}, "row 4: \"id\": row 2 has 'q1', too: label it once"),
        (1, {"correct": 2}, 'row 2: "correct": expected true or false, got 2'),
        (1, {"correct": None, "quality": math.nan}, "row 2: quality must be a number, got nan"),
        (3, {"answer": " Rell"}, "row 4: prompt, answer, settings or scores were changed"),
        (3, {"digest": None}, "row 4: expected a row with scores, got the fields"),
    ):
        some = [row | changed if i == number else row for i, row in enumerate(rows)]
        with pytest.raises(ValueError, match=message):
            calibrate_rows(some, 0.1)
    for some, how, message in (
        (labelled(4), {}, f"row 1: {PLAIN}"),
        ([row | {"correct": None} for row in labelled(4)], {}, "row 1: expected a row with scores"),
        ([row | {"correct": None} for row in rows], {}, "expected at least two labelled answers"),
        ([row | {"correct": False} for row in rows], {}, "expected right and wrong answers"),
        ([Row(7, {"line": "{"}, "not JSON"), *numbered(*rows)], {}, "row 7: not JSON"),
        ([], {}, "at least two labelled answers"),
        (rows, {"unlabelled": labelled(4)}, "unlabelled row 1: expected a row with scores"),
        (rows, {"signal": "magic"}, "expected signal best, score or one of"),
        (rows, {"signal": "adapt"}, "expected a signal of asmi, sem, msp, perplexity, entropy"),
        (rows, {"risk": 2}, "risk must lie strictly between 0 and 1, got 2"),
        (rows, {"confidence": 95}, "confidence must lie strictly between 0 and 1, got 95"),
        (rows, {"resamples": 0}, "resamples must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate_rows(some, **{"risk": 0.1, "confidence": 0.9, **how})


@pytest.mark.parametrize("form", [str, lambda t: [t], lambda t: {"text": t}])
def test_passages_are_found_by_their_context_or_else_their_prompt(form):
    """Of a chat only the text counts."""
    passages = [f"{word} was built in Brask in 1931 by three brothers. " * 3 for word in WORDS]
    rows = numbered(*({"context": form(passages[n // 2])} for n in range(6)))
    assert [clusters_of(rows).index(key) for key in clusters_of(rows)] == [0, 0, 2, 2, 4, 4]
    chats = [[{"role": "user", "content": f"{passages[n // 2]} {n}?"}] for n in range(6)]
    found = clusters_of(numbered(*({"prompt": chat, "context": " "} for chat in chats)))
    assert [found.index(key) for key in found] == [0, 0, 2, 2, 4, 4]


def test_answers_that_are_all_right_give_a_threshold(scored, tmp_path):
    rows = [line | {"correct": True, "cluster": i} for i, line in enumerate(scored[:40:2])]
    run = calibrate_rows(rows, 0.3, resamples=50)
    guarantee = run.guarantee  # 16 tested: .7 to the power of 16 is below .05
    assert (guarantee.coverage, guarantee.error_rate) == (1, 0)
    assert guarantee.threshold == max(run.values)
    assert "nan" not in str(run)
    run.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json").guarantee == guarantee


@pytest.mark.parametrize(
    "names",
    [
        (1, 1.0, "1", " 1\n", "1.0", np.int64(1), np.float32(1)),
        ("Zo\u00eb", "Zoe\u0308", "Zo\u00eb\u200b"),
        ("Doc a", "Doc\u00a0a ", "Doc\r\na", "Doc  a"),
        (0.5, "0.5"),
    ],
)
def test_one_cluster_under_several_names(names):
    rows = numbered(*({"cluster": name} for name in names))
    assert len(set(clusters_of(rows))) == 1
    assert Labelled([0] * len(names), list(names)).n_clusters == 1
    others = numbered(*({"cluster": name} for name in ("1", "01", "A", 2**60, 2**60 + 1)))
    assert len(set(clusters_of(others))) == 5


@pytest.mark.parametrize("cluster", [math.nan, "", " \n", True, ["a"], {"a": 1}], ids=repr)
def test_a_cluster_without_a_name_is_refused_by_its_row(cluster):
    with pytest.raises(ValueError, match='row 2: "cluster": expected a text or a number'):
        clusters_of(numbered({"cluster": "a"}, {"cluster": cluster}))
    with pytest.raises(ValueError, match="clusters, row 1: expected a text or a number"):
        Labelled([0, 1], ["a", cluster])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Who?", "Who? "),
        ("Who\nbuilt it?", "Who\r\nbuilt it?"),
        ("Zo\u00eb?", "Zoe\u0308?"),
        ("Who?", "\ufeffWho?"),
        ([{"role": "user", "content": "Who?"}], [{"role": "user", "content": "Who? "}]),
    ],
)
def test_a_question_labelled_twice_is_one_cluster(first, second):
    named = ((first, "a"), (second, "b"), ("When?", "b"), ("Why?", "c"))
    rows = numbered(*({"prompt": prompt, "cluster": cluster} for prompt, cluster in named))
    found = clusters_of(rows)
    assert len(set(found[:3])) == 1
    assert found[3] not in found[:3]
    unnamed = clusters_of([Row(n, {"prompt": p}) for n, p in enumerate((first, second, "When?"))])
    assert unnamed[0] == unnamed[1] != unnamed[2]
    assert answer_digest(first, " Holm") == answer_digest(second, "Holm\n")
    assert answer_digest(first, "Holm") != answer_digest(first, "Rell")


def test_an_id_under_two_names_is_one():
    rows = [row | {"correct": True} for row in ({"id": 1}, {"id": "1.0"})]
    with pytest.raises(ValueError, match=r"row 2: .id.: row 1 has .1\.0., too"):
        labels_of(numbered(*rows))
