"""Labelled rows to a calibration: what is kept, what is left out, what is refused."""

import copy
import io
import json
import re

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from lm_polygraph_asmi.decisions import Calibration, calibrate_rows, risk_threshold
from lm_polygraph_asmi.decisions.rows import saved_answers
from lm_polygraph_asmi.host import smollm2
from lm_polygraph_asmi.scoring import UnmaskedAnswer
from lm_polygraph_asmi.scoring.provenance import digest_of, loadable
from lm_polygraph_asmi.scoring.rows import in_chat
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.signals import SIGNALS
from lm_polygraph_asmi.tables import Row
from tests.decisions.conftest import ASKED, N, labelled, lines_of
from tests.scoring.conftest import PROMPT


def test_what_is_made_of_labels(calibration, scores, scorer):
    wrong = np.array([not row["correct"] for row in labelled()])
    clusters = [str(row["cluster"]) for row in labelled()]
    values = [one.signals["perplexity"] for one in scores]
    assert calibration.signal == "perplexity"
    assert (calibration.n, calibration.guarantee.clusters) == (N, N // 2)
    assert (calibration.errors, calibration.left_out) == (wrong.sum(), "")
    assert calibration.guarantee == risk_threshold(values, wrong, clusters, 0.4, 0.8)
    for kind in scores[0].signals:
        found = calibration.signals[SIGNALS[kind].title]
        each = [one.signals[kind] for one in scores]
        assert found.auroc.value == pytest.approx(roc_auc_score(wrong, each))
        assert found.prr.low <= found.prr.value <= found.prr.high
    assert calibration.settings.items() >= scorer.fingerprints().items()
    assert calibration.prompt_tokens == sorted(one.prompt_tokens for one in scores)
    # Rows may repeat a prompt and an answer; each is counted.
    assert len(calibration.question_digests) == N


def test_rows_without_a_label_or_an_answer_are_left_out(scored, scorer):
    """Answers of nothing are, as they are never accepted."""
    blank = {"prompt": PROMPT, "answer": "\n", "correct": True, "cluster": "blank"}
    blanks = lines_of(scorer, [blank, blank | {"answer": ""}])
    rows = [*scored[:6], *blanks, *(line | {"correct": None} for line in scored[6:9])]
    found = calibrate_rows(rows, **ASKED)
    assert found == calibrate_rows(scored[:6], **ASKED)
    assert found.left_out == "3 without a label, 2 empty"
    with pytest.raises(ValueError, match="2 among 2 rows, all empty"):
        calibrate_rows(blanks, 0.1)
    expected = calibrate_rows(scored[:6], unlabelled=scored[6:], **ASKED)
    assert calibrate_rows(scored[:6], unlabelled=[*scored[6:], *blanks], **ASKED) == expected
    assert expected.guarantee.share == 0
    with pytest.raises(ValueError, match="unlabelled rows have questions of the labelled"):
        calibrate_rows(scored[:6], unlabelled=scored[5:], **ASKED)
    assert calibrate_rows(scored[:6], unlabelled=blanks, **ASKED) == found  # no score is left


def test_answers_that_are_all_right_give_a_threshold(scored, tmp_path):
    rows = [line | {"correct": True, "cluster": i} for i, line in enumerate(scored[:40:2])]
    run = calibrate_rows(rows, 0.3, resamples=50)
    guarantee = run.guarantee  # 16 tested: .7 to the power of 16 is below .05
    assert (guarantee.coverage, guarantee.error_rate) == (1, 0)
    assert guarantee.threshold == max(line["signals"][run.signal] for line in rows)
    assert "nan" not in str(run)
    run.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json").guarantee == guarantee


@pytest.mark.parametrize(
    ("change", "asked", "words"),
    [  # of all rows, or of one by its place; or other rows
        ({1: {"correct": 2}}, {}, 'row 2: "correct": expected true or false, got 2'),
        ({3: {"answer": " Rell"}}, {}, "row 4: prompt, answer, settings or scores were changed"),
        ({3: {"digest": None}}, {}, "row 4: expected a row with scores, got the fields"),
        ({"correct": None}, {}, "expected labelled answers, got none among 4 rows"),
        ({"correct": False}, {}, "expected right and wrong answers, got 4, all wrong"),
        (labelled(4), {}, "row 1: expected a row with scores, got the fields prompt, answer"),
        ([Row(7, {"line": "{"}, "not JSON"), Row(8, {"digest": "0"})], {}, "row 7: not JSON"),
        ([], {}, "expected labelled answers, got none"),
        ({}, {"unlabelled": labelled(4)}, "row 1: expected a row with scores"),
        ({}, {"signal": "magic"}, "expected a signal of .*got 'magic'"),
        ({}, {"signal": "adapt"}, "expected a signal of asmi, sem, msp, perplexity, entropy"),
        ({}, {"risk": 2}, "risk must lie strictly between 0 and 1, got 2"),
        ({}, {"confidence": 95}, "confidence must lie strictly between 0 and 1, got 95"),
        ({}, {"resamples": 0}, "resamples must be at least 1"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(scored, change, asked, words):
    rows = change
    if isinstance(change, dict):
        every = {name: value for name, value in change.items() if isinstance(name, str)}
        rows = [row | every | change.get(i, {}) for i, row in enumerate(scored[:4])]
    with pytest.raises(ValueError, match=words):
        calibrate_rows(rows, **{"risk": 0.1, "confidence": 0.9, **asked})


def refused(rows):
    said = []
    for number, row in enumerate(rows, start=1):
        try:
            saved_answers([Row(number, row)])
        except ValueError as error:
            said.append(str(error))
    assert all("score ROWS --model M --out answers" in one for one in said)
    return [int(re.match(r"row (\d+): ", one)[1]) for one in said]


@pytest.mark.parametrize(
    "change",
    [
        *({name: 1} for name in ("counted", "content_end", "prompt_tokens", "score", "msp")),
        *({"signals": {name: 0.001}} for name in ("entropy", "msp", "perplexity", "asmi", "sem")),
        {"answered": False}, {"scored_text": " Brask"}, {"ids": [7]}, {"digest": None},
        {"answer": " Sorell"}, {"settings": {}}, {"model": "another"}, {"prompt": "Who sailed it?"},
    ],
    ids=str,
)  # fmt: skip
def test_a_digest_covers_what_is_read_of_a_row(scored, change):
    """Labels, contexts and other fields may change."""
    first, second, line = copy.deepcopy(scored[:3])
    signals = line["signals"] | change.get("signals", {})
    line |= change | {"signals": signals}
    assert UnmaskedAnswer.of_row(line) is None
    assert refused([first, second | {"correct": True, "context": "C", "note": 1}, line]) == [3]


def test_prompts_and_scores_that_changed_places(scored):
    first, last = scored[0], scored[-1]
    every = "score", "msp", "counted", "scored_text", "content_end", "signals", "ids"
    for names in (["prompt"], every):
        one, other = ({name: line[name] for name in names} for line in (first, last))
        assert refused([first | other, *scored[1:3], last | one]) == [1, 4]
    assert refused([in_chat(line) for line in scored[:3]]) == [1, 2, 3]


def test_a_file_that_passed_through_a_table(scored):
    frame = pd.DataFrame(scored)
    text = frame.sample(frac=1, random_state=0).to_json(orient="records", lines=True)
    rows = [json.loads(line) for line in io.StringIO(text)]
    assert rows != scored
    assert refused(rows) == []
    read = [UnmaskedAnswer.of_row(line).signals for line in scored]
    assert read == [line["signals"] for line in scored]
    assert digest_of({"msp": 1.23456789e-6}) == digest_of({"msp": 1.2e-6})  # seven decimals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"depth": 0.9}, r"depth 0\.9, not 0\.6"),
        ({"stop": "?"}, r"stop \['\?'\], not \['\\n'\]"),
        ({}, "prompt_format 'chat', not 'text'"),
    ],
)
def test_all_rows_are_scored_alike(scorer, scored, change, words):
    other = Scorer(scorer.model, scorer.config.replace(**change), tokenizer=scorer.tokenizer)
    (row,) = labelled(1)
    (line,) = lines_of(other, [row if change else in_chat(row)])
    with pytest.raises(ValueError, match=rf"row 4: scored otherwise than row 1 \(.*{words}"):
        calibrate_rows([*scored[1:4], line], 0.4)
    with pytest.raises(ValueError, match="unlabelled: row 1: scored otherwise than row 1"):
        calibrate_rows(scored[1:4], 0.4, unlabelled=[line])


def test_rows_that_do_not_know_their_model(scored, monkeypatch, tmp_path):
    """The demo's model is known by its folder."""
    bare = {n: v for n, v in scored[0]["settings"].items() if n != "weights"}
    line = scored[0] | {"settings": bare}
    with pytest.raises(ValueError, match="row 1: weights not recorded, as of a model with hooks"):
        saved_answers([Row(1, line | {"digest": digest_of(line)})])
    monkeypatch.setattr(smollm2, "smollm2_source", lambda: (tmp_path, None))
    assert (loadable(str(tmp_path)), loadable("m")) == ("smollm2", "m")
