"""Labelled rows to a calibration: what is kept, what is scored, what is an error."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.metrics import roc_auc_score

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.analysis.clusters import text_clusters
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.decisions import Calibration, Decision, calibrate_rows, risk_threshold
from lm_polygraph_asmi.decisions import rows as first_door
from lm_polygraph_asmi.decisions.labels import (
    answer_digest,
    clusters_of,
    is_wrong,
    labels_of,
    text_of,
)
from lm_polygraph_asmi.scoring.rows import Row, score_rows
from lm_polygraph_asmi.scoring.signals import SIGNALS, TITLES
from lm_polygraph_asmi.scoring.unmasked import fingerprints
from tests import tiny_lm
from tests.decisions.conftest import WORDS, N, labelled, limited
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
    assert (calibration.n, calibration.clusters, calibration.errors) == (N, N // 2, wrong.sum())
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


def test_scored_lines_may_be_labelled_as_they_are(scored, scorer, calibration, monkeypatch):
    lines, missing = scored[:6], []

    def counted(scorer, rows):
        missing.extend(rows)
        return score_rows(scorer, rows)

    monkeypatch.setattr(first_door, "score_rows", counted)

    def calibrated(rows):
        """The calibration, and how many rows were scored anew."""
        missing.clear()
        found = calibrate_rows(rows, scorer, 0.4, 0.8, signal="perplexity", resamples=20)
        assert found.n == 6
        return found, len(missing)

    whole, anew = calibrated(lines)
    assert (set(whole.values) <= set(calibration.values), anew) == (True, 0)
    plain = {"prompt", "answer", "correct", "cluster", "id"}
    for name, change, expected in (
        ("moved", lambda _, line: line | {"score": 1.1 * line["score"]}, 6),
        ("edited", lambda i, line: line | {"answer": " kites"} if i in (1, 4) else line, 2),
        ("others", lambda i, line: line | {"settings": line["settings"] | {"num_masks": 5 - i % 2}},
         3),
        ("told", lambda i, line: line | {"signals": {}} if i else line, 5),
        ("some", lambda i, line: {k: line[k] for k in plain} if i > 3 else line, 2),
        ("model", lambda _, line: line | {"model": "other"}, 6),
    ):  # fmt: skip
        found, anew = calibrated([change(i, line) for i, line in enumerate(lines)])
        assert anew == expected, name
        if name != "edited":
            assert found.values == pytest.approx(whole.values, abs=1e-6), name


def test_labels():
    assert [is_wrong({"correct": value}) for value in (True, False, 1, 0)] == [False, True] * 2
    assert [is_wrong({"quality": value}) for value in (0.49, 0.5, 1)] == [True, False, False]
    assert is_wrong({"quality": 0.6}, 0.7)


def test_rows_that_cannot_be_used(scorer):
    """All that can be known before a row is scored is known then."""
    rows = labelled(4)

    def calibrated(rows, risk=0.1, confidence=0.9, **how):
        scored = "a row was scored"
        return calibrate_rows(
            rows, scorer, risk, confidence, progress=lambda *_: pytest.fail(scored), **how
        )

    for number, changed, message in (
        (0, {"correct": None}, "row 1: expected"),
        (1, {"answer": None}, 'row 2: expected an "answer"'),
        (2, {"cluster": None}, "in all rows or in none, got none in row 3"),
        (3, {"id": "q1"}, "row 4: \"id\": row 2 has 'q1', too: label it once"),
        (1, {"correct": 2}, 'row 2: "correct": expected true or false, got 2'),
        (1, {"correct": None, "quality": math.nan}, "row 2: quality must be a number, got nan"),
        (3, {"prompt": PROMPT * 100}, "row 4 cannot be scored"),
        (3, {"answer": [10**6]}, "row 4 cannot be scored: token ids must lie"),
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
    rows = labelled(6)
    blank = {"prompt": PROMPT, "answer": "\n", "correct": True, "cluster": "blank"}
    seen = []
    found, expected = (
        calibrate_rows(some, scorer, 0.4, 0.8, resamples=20, progress=lambda *at: seen.append(at))
        for some in ([*rows, blank, blank | {"answer": ""}], scored[:6])
    )
    assert found == expected
    assert seen == [(done, 7) for done in range(1, 8)]
    with pytest.raises(ValueError, match="only empty or blank ones"):
        calibrate_rows([blank], scorer, 0.1)


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory, few_resamples):  # noqa: ARG001 - no test below asks for intervals
    place = tmp_path_factory.mktemp("command")
    tiny_lm.save(place / "model")
    blank = {"prompt": PROMPT, "answer": "\n", "correct": True, "cluster": "blank"}
    empty = [*labelled(8), blank, blank | {"answer": ""}]
    for name, rows in {"rows": labelled(8), "empty": empty}.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def run(*arguments):
    found = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return found.exit_code, " ".join(found.output.split())


OPTIONS = ("--num-masks", 4, "--mask-rate", 0.3, "--top-k", 8, "--stop", "\\n")


def test_from_rows_to_decisions_by_command(folder):
    model = folder / "model"
    code, said = run("calibrate", folder / "rows.jsonl", "--model", model, "--risk", 0.4,
                     "--confidence", 0.8, "--out", folder / "calibration.json",
                     *OPTIONS)  # fmt: skip
    assert code == 0, said
    found = Calibration.load(folder / "calibration.json")
    assert found.guarantee.threshold is None
    assert f"Promise: none. No threshold by {found.title} could be shown" in said
    assert "Too few clusters, wrong or right answers to compare signals." in said
    assert "empty answers" not in said
    given = ("decide", "--model", model, folder / "rows.jsonl", "--calibration")
    code, said = run(*given, folder / "calibration.json", "--out", folder / "out.jsonl")
    assert code == 0, said
    assert "8 without a decision." in said
    assert f"Warning: No threshold by {found.title}" in said
    assert "Warning: No answer has a decision, so abstain on all. The calibration has no" in said
    limited(found, found.values[4]).save(folder / "limited.json")
    code, said = run(*given, folder / "limited.json", "--out", folder / "decided.jsonl",
                     "--html", folder / "decided.html")  # fmt: skip
    assert code == 0, said
    lines = [json.loads(line) for line in (folder / "decided.jsonl").read_text().splitlines()]
    assert [line["accept"] for line in lines] == [v <= found.values[4] for v in
                                                  (line["value"] for line in lines)]  # fmt: skip
    assert f"{sum(line['accept'] for line in lines)} accepted, " in said
    assert [Decision.from_dict(line).digest(line) for line in lines] == [
        line["digest"] for line in lines
    ]
    assert (folder / "decided.html").read_text().count('id="answer-') == 8
    masked = SIGNALS[found.signal].masked
    assert all((line["score"] is None) != masked for line in lines)
    code, text = run(*given, folder / "limited.json", "--stop", "?", "--out", folder / "x.jsonl")
    assert code == 1
    assert "settings differ from the calibration rows.jsonl (stop" in text
    assert not list(folder.glob("x.jsonl*"))
    for source in ("rows.jsonl", "model"):  # neither rows nor a folder are a calibration
        code, text = run(*given, folder / source, "--out", folder / "x.jsonl")
        assert code == 1
        assert "expected a Calibration or a .json file, got" in text


def test_calibrate_by_command(folder):
    """Labels on scored lines, whose scores are kept; and calls that are errors."""
    model = folder / "model"
    code, said = run("score", "--model", model, folder / "rows.jsonl", *OPTIONS,
                     "--out", folder / "scored.jsonl")  # fmt: skip
    assert code == 0, said
    again = ("calibrate", folder / "scored.jsonl", "--model", model, "--risk", 0.4,
             "--out", folder / "again.json", *OPTIONS)  # fmt: skip
    for options, warned, limit in (
        ((), False, 64),  # of the rows
        (("--max-new-tokens", 7), False, 7),  # of later answers
        (("--seed", 1), True, 64),
    ):
        code, text = run(*again, *options)
        assert (code, "Scored 8 of 8 rows again" in text) == (0, warned), text
        assert Calibration.load(folder / "again.json").config.max_new_tokens == limit
        if options != ("--seed", 1):
            (folder / "again.json").unlink()
    code, said = run(*again)
    assert code == 1
    assert "again.json exists: name another file, or remove it" in said
    assert "each further calibration lowers the confidence; choosing the best one voids the" in said
    given = ("--model", model, "--risk", 0.4, "--out", folder / "few.json")
    code, said = run("calibrate", folder / "empty.jsonl", *given, *OPTIONS)
    assert code == 0, said
    assert "Left out 2 empty answers: they are never accepted." in said
    for own, message in (
        ((folder / "rows.jsonl", "--metric", "TokenF1", *given), "--metric needs --run"),
        ((folder / "rows.jsonl", *given[2:]), "ROWS need the --model that answered them"),
        ((folder / "rows.jsonl", *given[:2], "--risk", 1.4, "--out", folder / "new.json"),
         "risk must lie strictly between 0 and 1, got 1.4"),
    ):  # fmt: skip
        code, said = run("calibrate", *own)
        assert code != 0
        assert message in said
    assert not (folder / "new.json").exists()


def test_answers_that_are_all_right_give_a_threshold(scorer, scored, tmp_path):
    rows = [line | {"correct": True, "cluster": i} for i, line in enumerate(scored[:40:2])]
    run = calibrate_rows(rows, scorer, 0.3, resamples=50)
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
