"""Labelled rows to a calibration: what is kept, what is scored, what is an error."""

import math

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.analysis.clusters import text_clusters
from lm_polygraph_asmi.decisions import Calibration, calibrate_rows, risk_threshold
from lm_polygraph_asmi.decisions import rows as first_door
from lm_polygraph_asmi.decisions.labels import (
    answer_digest,
    clusters_of,
    is_wrong,
    labels_of,
    text_of,
)
from lm_polygraph_asmi.scoring.rows import Row
from lm_polygraph_asmi.scoring.signals import TITLES
from lm_polygraph_asmi.scoring.unmasked import fingerprints
from tests.decisions.conftest import WORDS, N, labelled, lines_of
from tests.scoring.conftest import PROMPT


def test_signals_are_those_of_the_tokens(scores):
    for one in scores[:5]:
        tokens = one.tokens[: one.counted]
        likelihood = [token.log_likelihood for token in tokens]
        assert one.signals == pytest.approx(
            {
                "asmi": sum(token.mi for token in tokens) / len(tokens),
                "sem": float(one),
                "msp": -sum(likelihood),
                "perplexity": -sum(likelihood) / len(tokens),
                "entropy": sum(token.entropy for token in tokens) / len(tokens),
            }
        )


def test_what_is_made_of_labels(calibration, scores, scorer):
    wrong = np.array([not row["correct"] for row in labelled()])
    clusters = [str(row["cluster"]) for row in labelled()]
    values = [one.signals["perplexity"] for one in scores]
    assert (calibration.signal, calibration.values) == ("perplexity", sorted(values))
    assert (calibration.n, calibration.guarantee.clusters, calibration.errors) == (
        N,
        N // 2,
        wrong.sum(),
    )
    assert calibration.guarantee == risk_threshold(values, wrong, clusters, 0.4, 0.8)
    for kind in scores[0].signals:
        found = calibration.signals[TITLES[kind]]
        each = [one.signals[kind] for one in scores]
        assert found.auroc.value == pytest.approx(roc_auc_score(wrong, each))
        assert found.prr.low <= found.prr.value <= found.prr.high
    assert calibration.settings.items() >= fingerprints(scorer).items()
    assert calibration.prompt_tokens == sorted(one.prompt_tokens for one in scores)
    # Rows may repeat a prompt and an answer; each is counted.
    assert len(calibration.answer_digests) == N


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, 'expected "correct" .* got neither: no field'),
        ({"answer": " 7", "label": 1}, "got neither: the fields answer, label"),
        ({"correct": True, "quality": 1}, r"got \['correct', 'quality'\]"),
        ({"correct": "yes"}, "expected true or false, got 'yes': write it"),
        ({"quality": "good"}, "quality must be a number"),
        ({"quality": math.nan}, "quality must be a number"),
    ],
)
def test_labels_that_are_none(content, message):
    with pytest.raises(ValueError, match=message):
        is_wrong(content)


def test_rows_are_scored_where_they_are_not_yet(scored, scorer, monkeypatch):
    plain = {"prompt", "answer", "correct", "cluster", "id"}
    some = [{k: line[k] for k in plain} if i > 3 else line for i, line in enumerate(scored[:6])]
    asked = {"risk": 0.4, "confidence": 0.8, "signal": "perplexity", "resamples": 20}
    found = calibrate_rows(some, scorer=scorer, **asked)
    monkeypatch.setattr(first_door, "score_rows", lambda *_: pytest.fail("a row was scored"))
    expected = calibrate_rows(scored[:6], scorer=scorer, **asked)
    assert found.values == pytest.approx(expected.values, rel=1e-6)
    assert found.settings == expected.settings
    with pytest.raises(ValueError, match="row 5: expected a row that `score --out` wrote"):
        calibrate_rows(some, **asked)
    with pytest.warns(UserWarning, match="Left out 2 rows without a label"):
        less = calibrate_rows([*scored[:4], *(s | {"correct": None} for s in scored[4:6])], **asked)
    assert less == calibrate_rows(scored[:4], **asked)


def test_labels():
    assert [is_wrong({"correct": value}) for value in (True, False, 1, 0)] == [False, True] * 2
    assert [is_wrong({"quality": value}) for value in (0.49, 0.5, 1)] == [True, False, False]
    assert is_wrong({"quality": 0.6}, 0.7)


def test_rows_that_cannot_be_used(scorer, monkeypatch):
    """All that can be known before a row is scored is known then."""
    rows = labelled(4)

    monkeypatch.setattr(first_door, "score_rows", lambda *_: pytest.fail("a row was scored"))

    def calibrated(rows, risk=0.1, confidence=0.9, **how):
        return calibrate_rows(rows, risk, confidence, scorer=scorer, **how)

    for number, changed, message in (
        (1, {"answer": None}, 'row 2: expected the field "answer"'),
        (2, {"cluster": None}, "in all rows or in none, got none in row 3"),
        (3, {"id": "q1"}, "row 4: \"id\": row 2 has 'q1', too: label it once"),
        (1, {"correct": 2}, 'row 2: "correct": expected true or false, got 2'),
        (1, {"correct": None, "quality": math.nan}, "row 2: quality must be a number, got nan"),
        (3, {"prompt": PROMPT * 100}, "row 4: "),
        (3, {"answer": [10**6]}, "row 4: token ids must lie"),
        (3, {"answer": [2**70]}, "row 4: expected token ids of an answer that fit into 64 bits"),
        (3, {"samples": [" a", None]}, "row 4: expected sample 2 as text or a list of token ids"),
    ):
        some = [row | changed if i == number else row for i, row in enumerate(rows)]
        with pytest.raises(ValueError, match=message):
            calibrated(some)
    with pytest.raises(ValueError, match="expected right and wrong answers"):
        calibrated([row | {"correct": False} for row in rows])
    with pytest.raises(ValueError, match="only empty or blank ones"):
        calibrated([row | {"answer": " "} for row in rows])
    for how, message in (
        ({"signal": "magic"}, "expected signal best, score or one of"),
        ({"risk": 2}, "risk must lie strictly between 0 and 1, got 2"),
        ({"confidence": 95}, "confidence must lie strictly between 0 and 1, got 95"),
        ({"resamples": 0}, "resamples must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrated(rows, **how)
    with pytest.raises(ValueError, match="at least two labelled answers"):
        calibrated([])


def test_answers_of_nothing_are_left_out_as_they_are_never_accepted(scored, scorer):
    blank = {"prompt": PROMPT, "answer": "\n", "correct": True, "cluster": "blank"}
    rows = [*scored[:6], *lines_of(scorer, [blank, blank | {"answer": ""}])]
    assert calibrate_rows(rows, 0.4, 0.8, resamples=20) == calibrate_rows(
        scored[:6], 0.4, 0.8, resamples=20
    )
    with pytest.raises(ValueError, match="only empty or blank ones"):
        calibrate_rows(rows[6:], 0.1)
    asked = {"risk": 0.4, "signal": "msp", "resamples": 20}
    found = calibrate_rows(scored[:6], unlabelled=[*scored, blank], scorer=scorer, **asked)
    assert found == calibrate_rows(scored[:6], unlabelled=scored, **asked)


def test_passages_are_found_by_their_prompts():
    passages = [
        "The ferry Ondine was built in Brask in 1931 by three brothers. " * 3,
        "Kites are flown in Sorell every spring, the blue ones first of all. " * 3,
    ]
    prompts = [
        f"Answer from the passage.\n{passage}\nQuestion: {question}\nAnswer:"
        for passage in passages
        for question in ("Who?", "When was that, and where?", "Why?")
    ]
    assert [key == text_clusters(prompts)[0] for key in text_clusters(prompts)] == (
        [True] * 3 + [False] * 3
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    assert len(set(text_clusters([text_of(chat) for chat in chats]))) == 2
    apart = [f"Question: who was the {word}?" for word in WORDS]
    assert len(set(text_clusters(apart))) == len(WORDS)
    assert len(set(text_clusters(["same"] * 3))) == 1


def test_answers_that_are_all_right_give_a_threshold(scored, tmp_path):
    rows = [line | {"correct": True, "cluster": i} for i, line in enumerate(scored[:40:2])]
    run = calibrate_rows(rows, 0.3, resamples=50)
    guarantee = run.guarantee  # 16 tested: .7 to the power of 16 is below .05
    assert (guarantee.coverage, guarantee.error_rate) == (1, 0)
    assert guarantee.threshold == max(run.values)
    assert "nan" not in str(run)
    run.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json").guarantee == guarantee


@pytest.mark.parametrize("quality", [90, 10, 1.2, -0.1, 2, 5, math.inf, True, "0.9"], ids=repr)
def test_a_quality_of_an_unknown_scale(quality):
    with pytest.raises(ValueError, match=r"between 0 and 1, got|must be a number"):
        is_wrong({"quality": quality})


def test_a_quality_of_a_scale_that_was_named():
    assert [is_wrong({"quality": q}, 50) for q in (90, 10)] == [False, True]
    assert [is_wrong({"quality": q}, -2.0) for q in (-1.0, -3.0)] == [False, True]
    assert not is_wrong({"quality": 1 + 1e-9})  # a metric's rounding
    for right_from in (math.nan, math.inf, True, "0.5"):
        with pytest.raises(ValueError, match="right_from must be a number"):
            labels_of([Row(1, {"prompt": "a", "answer": "b", "quality": 0.9})], right_from)


def numbered(*contents):
    return [Row(n, {"prompt": f"Who {n}?"} | content) for n, content in enumerate(contents, 1)]


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
    rows = [row | {"answer": " a", "correct": True} for row in ({"id": 1}, {"id": "1.0"})]
    with pytest.raises(ValueError, match=r"row 2: .id.: row 1 has .1\.0., too"):
        labels_of(numbered(*rows))
