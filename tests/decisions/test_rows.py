"""Labelled rows to a calibration: what is kept, what is left out, what is refused."""

import io
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions import calibrate_rows, risk_threshold
from lm_polygraph_asmi.decisions.fit import CalibrationOptions, fit, rank_signals
from lm_polygraph_asmi.decisions.rows import saved_answers
from lm_polygraph_asmi.host import smollm2
from lm_polygraph_asmi.scoring.provenance import digest_of, loadable
from lm_polygraph_asmi.scoring.rows import in_chat
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.signals import SIGNALS
from lm_polygraph_asmi.tables import Row
from tests.analysis.simulation import keys
from tests.decisions.conftest import ABOUT, ASKED, N, labelled, lines_of, numbered, refused
from tests.scoring.conftest import PROMPT


def test_what_is_made_of_labels(calibration, scores, scorer):
    wrong = np.array([not row["correct"] for row in labelled()])
    answers = Labelled(wrong, [str(row["cluster"]) for row in labelled()])
    columns = {kind: [one.signals[kind] for one in scores] for kind in scores[0].signals}
    expected = {
        "guarantee": risk_threshold(columns["perplexity"], answers, 0.4, 0.8),
        "signal": "perplexity", "left_out": "", "n": N, "errors": wrong.sum(),
        "prompt_tokens": sorted(one.prompt_tokens for one in scores),
    }  # fmt: skip
    assert {name: getattr(calibration, name) for name in expected} == expected
    for kind, column in columns.items():
        found = calibration.signals[SIGNALS[kind].title]
        assert found.auroc.value == pytest.approx(roc_auc_score(wrong, column))
        assert found.prr.low <= found.prr.value <= found.prr.high
    assert calibration.settings.items() >= scorer.fingerprints().items()
    assert len(calibration.question_digests) == N  # rows may repeat a prompt; each is counted


def test_rows_without_a_label_or_an_answer_are_left_out(scored, scorer):
    """Answers of nothing are, as they are never accepted, and rows that could not be scored."""
    blank = {"prompt": PROMPT, "answer": "\n", "correct": True, "cluster": "blank"}
    blanks, some = lines_of(scorer, [blank, blank | {"answer": ""}]), scored[:6]
    plain = calibrate_rows(some, **ASKED)
    for unlabelled, failed in product((0, 3, 8), (0, 6)):
        more = [line | {"correct": None} for line in scored[6 : 6 + unlabelled]]
        lines = [*some, *blanks, *more, *[{"prompt": PROMPT, "error": "no answer"}] * failed]
        found, without = calibrate_rows(lines, **ASKED), unlabelled + failed
        words = f"{without} without a label, 2 empty" if without else "2 empty"
        assert (found, found.left_out) == (plain, words)
    assert calibrate_rows(some, unlabelled=blanks, **ASKED) == plain  # no score is left
    expected, also = (
        calibrate_rows(some, unlabelled=rows, **ASKED)
        for rows in (scored[6:], [*scored[6:], *blanks])
    )
    assert expected == also
    assert len(expected.sample.unlabelled) == len(also.sample.unlabelled) == N - 6
    refused(
        (partial(calibrate_rows, blanks, **ASKED), "2 rows, all empty"),
        (partial(calibrate_rows, some, unlabelled=scored[5:], **ASKED), "questions"),
    )


def test_labels_of_the_surest_are_not_random(scored):
    """Where five or more are labelled, five or more are not, and none of these is surer."""
    lines = sorted(
        ({**row, "cluster": i} for i, row in enumerate(scored)),
        key=lambda row: row["signals"]["msp"],
    )
    for places, random in (({0, 1, 2, 3}, True), ({0, 1, 2, 3, 5}, True), ({*range(5)}, False)):
        rows = [row if i in places else row | {"correct": None} for i, row in enumerate(lines)]
        rows[0] |= {"correct": True}
        expected = (
            nullcontext() if random else pytest.raises(ValueError, match=r"5 labelled .* surest by")
        )
        with expected:
            assert calibrate_rows(rows, **ASKED).n == len(places)


@pytest.mark.parametrize(
    ("change", "asked", "words"),
    [  # of all rows, or of one by its place; or other rows
        ({1: {"correct": 2}}, {}, 'row 2: "correct"'),
        ({3: {"answer": " Rell"}}, {}, "row 4: .*changed"),
        ({3: {"settings": {}}}, {}, r"row 4: .*score ROWS --model M"),
        ({3: {"digest": None}}, {}, "row 4: expected a row with scores"),
        ({"correct": None}, {}, "none among 4 rows"),
        ({"correct": False}, {}, "all wrong"),
        (labelled(4), {}, "row 1: .*fields prompt, answer"),
        ([Row(7, {"line": "{"}, "not JSON"), Row(8, {"digest": "0"})], {}, "row 7: not JSON"),
        ([], {}, "expected labelled answers, got none"),
        ({}, {"unlabelled": labelled(4)}, "row 1: expected a row with scores"),
        ({}, {"signal": "magic"}, "expected a signal of .*got 'magic'"),
        ({}, {"signal": "adapt"}, "expected a signal of asmi, sem, msp, perplexity, entropy"),
        ({}, {"risk": 2}, "risk .*got 2"),
        ({}, {"confidence": 95}, "confidence .*got 95"),
        ({}, {"resamples": 0}, "resamples"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_used(scored, change, asked, words):
    rows = change
    if isinstance(change, dict):
        every = {name: value for name, value in change.items() if isinstance(name, str)}
        rows = [row | every | change.get(i, {}) for i, row in enumerate(scored[:4])]
    with pytest.raises(ValueError, match=words):
        calibrate_rows(rows, **{"risk": 0.1, "confidence": 0.9, **asked})


def test_a_file_that_passed_through_a_table(scored):
    text = pd.DataFrame(scored).to_json(orient="records", lines=True)
    rows = [json.loads(line) for line in io.StringIO(text)]
    assert (rows != scored, len(saved_answers(numbered(*rows)))) == (True, N)
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
    refused(
        (partial(calibrate_rows, [*scored[1:4], line], 0.4), rf"row 4: .* than row 1 \(.*{words}"),
        (partial(calibrate_rows, scored[1:4], 0.4, unlabelled=[line]), "unlabelled: row 1"),
    )


def test_passed_samples_may_differ_in_number(scorer):
    config, samples = scorer.config.replace(method="adapt"), [" Brask", " 1931", " kites"]
    other = Scorer(scorer.model, config, tokenizer=scorer.tokenizer)
    rows = [row | {"samples": samples[: 2 + i % 2]} for i, row in enumerate(labelled(6))]
    found = calibrate_rows(lines_of(other, rows), 0.4, signal="adapt", resamples=20)
    assert (found.n, found.settings["samples"]) == (6, "passed")


def test_rows_that_do_not_know_their_model(scored, monkeypatch, tmp_path):
    """The demo's model is known by its folder."""
    bare = {n: v for n, v in scored[0]["settings"].items() if n != "weights"}
    line = scored[0] | {"settings": bare}
    with pytest.raises(ValueError, match="row 1: weights not recorded"):
        saved_answers([Row(1, line | {"digest": digest_of(line)})])
    monkeypatch.setattr(smollm2, "smollm2_source", lambda: (tmp_path, None))
    assert (loadable(str(tmp_path)), loadable("m")) == ("smollm2", "m")


OPTIONS = CalibrationOptions(0.4, 0.8)
WRONG, NOISE = np.arange(60) % 2.0, np.random.default_rng(0).permutation(60) / 60
ANSWERS = Labelled(WRONG, keys(60, 1), resamples=200)
COLUMNS = {"asmi": WRONG + NOISE, "sem": NOISE, "msp": WRONG + 0.01 * NOISE, "entropy": -WRONG}


@pytest.mark.parametrize(
    ("columns", "signal", "expected", "signals"),
    [
        (COLUMNS, "best", "msp", 2), (COLUMNS, "sem", "sem", 1), (COLUMNS, "asmi", "asmi", 1),
        ({"asmi": NOISE, "sem": WRONG}, "best", "sem", 2),  # a run may have no others
        ({"msp": WRONG, "entropy": 2 * WRONG, "sem": WRONG}, "best", "msp", 2),
    ],
)  # fmt: skip
def test_the_signal_that_decides(columns, signal, expected, signals):
    """The best of two unmasked ones has half of the level; one that needs masks is to be named."""
    for unlabelled in (None, {name: column[::2] for name, column in columns.items()}):
        asked = replace(OPTIONS, signal=signal, largest=1)
        found = fit(columns, ANSWERS, asked, unlabelled=unlabelled or {}, **ABOUT)
        assert (found.signal, found.n, found.errors) == (expected, 60, 30)
        rule = risk_threshold(
            columns[expected], ANSWERS, 0.4, 1 - 0.2 / signals,
            unlabelled=unlabelled and unlabelled[expected],
        )  # fmt: skip
        assert found.guarantee == replace(rule, confidence=0.8, signals=signals)
    with pytest.raises(ValueError, match=rf"signal of {', '.join(columns)}; got 'perplexity'"):
        fit(columns, ANSWERS, replace(OPTIONS, signal="perplexity"), **ABOUT)


def test_a_learned_score_that_ranks_worse_leaves_it_to_an_unmasked_signal():
    asked, useless = replace(OPTIONS, signal="learned"), {"hidden": NOISE[:, None]}
    assert fit(COLUMNS, ANSWERS, asked, features=useless.copy, **ABOUT).signal == "msp"


def test_signals_are_ranked():
    ranked = rank_signals(COLUMNS, ANSWERS)
    assert (ranked["msp"].prr.value, ranked["entropy"].prr.high < 0) == (1, True)
