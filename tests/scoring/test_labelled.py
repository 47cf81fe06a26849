"""Labelled parts of answers: what gives the numbers of `spans` a meaning."""

import json
from dataclasses import replace

import numpy as np
import pytest

from lm_polygraph_asmi import score
from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.comparison import prr_intervals
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.scoring import Calibration
from lm_polygraph_asmi.scoring.calibration import calibrate, of_answers_and_parts, probability_at
from lm_polygraph_asmi.scoring.provenance import digest_of
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.scoring.conftest import PROMPT
from tests.scoring.test_page import Elements
from tests.scoring.test_result import printed, reference_for

pytestmark = pytest.mark.usefixtures("few_resamples")


@pytest.fixture(scope="module")
def found(model, tokenizer):
    return score(model, PROMPT, " In Brask. It was né 🪁.", tokenizer=tokenizer, num_masks=4)


@pytest.fixture(scope="module")
def rows(found):
    """Forty rows as `score --out` writes them: wrong parts are more fragile, one is not judged."""
    draw = np.random.default_rng(5)
    own = json.loads(json.dumps(found.to_dict()))
    made = []
    for number in range(40):
        wrong = (draw.random(2) < 0.5).tolist()
        level = np.median([span["u"] for span in own["spans"]])
        spans = [
            span | {"u": level * (0.5 + label + draw.random())}
            for span, label in zip(own["spans"], wrong, strict=True)
        ]
        labels = [None if number == 7 and not n else not label for n, label in enumerate(wrong)]
        about = {"row": number, "prompt": f"Question {number // 2}", "spans": spans}
        line = own | about | {"spans_correct": labels}
        made.append(line | {"digest": digest_of(line)})
    return made


def save(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def calibration(rows, tmp_path_factory):
    return Calibration.read(save(tmp_path_factory.mktemp("labelled") / "rows.jsonl", rows))


def test_what_labels_give(found, rows, calibration):
    scores, wrong, clusters, likelihoods = [], [], [], []
    for row in rows:
        for span, label in zip(row["spans"], row["spans_correct"], strict=True):
            if label is not None:
                scores.append(span["u"])
                wrong.append(not label)
                clusters.append(row["prompt"])
                likelihoods.append(span["tokens"] * span["perplexity"])
    assert (calibration.n, calibration.clusters, calibration.errors) == (79, 20, sum(wrong))
    assert calibration.scores == sorted(scores)
    assert calibration.calibration == calibrate(np.array(scores), np.array(wrong))
    quality = 1 - np.array(wrong, dtype=float)
    expected, _ = prr_intervals({"u": scores}, Labelled(quality=quality, clusters=clusters))
    assert calibration.prr == expected["u"]
    assert calibration.ranks
    assert calibration.msp_median == pytest.approx(np.median(likelihoods))
    assert (calibration.unit, calibration.model) == ("parts", found.model)
    assert calibration.ground.startswith(
        f"rows.jsonl: 79 parts, {sum(wrong)} wrong by their labels"
    )


def test_parts_get_a_probability_of_error(model, tokenizer, found, calibration):
    tested = Scorer(model, tokenizer=tokenizer, num_masks=4, calibration=calibration).score(
        PROMPT, found.answer
    )
    expected = [span.u for span in found.spans]
    assert [span.u for span in tested.spans] == pytest.approx(expected, abs=1e-7)
    for span in tested.spans:
        assert span.validated is True
        assert span.error_probability == probability_at(calibration.calibration, span.u)
    # Of the whole answer nothing is known by this.
    assert tested.calibration is tested.error_probability is None
    assert tested.verdict == found.verdict
    content = json.loads(json.dumps(tested.to_dict(), allow_nan=False))
    assert content["span_calibration"] == "rows.jsonl"
    page = Elements(tested.to_html()).text
    terminal = " ".join(printed(tested, width=200).split())
    for span, part in zip(tested.spans, content["spans"], strict=True):
        assert (part["validated"], part["error_probability"]) == (True, span.error_probability)
        for shown in (page, terminal):
            assert f"{span.error_probability:.2f}" in shown
    for shown in (page, terminal):
        assert "ot validated" not in shown
        assert "P(error)" in shown
        assert calibration.ground in shown
        assert calibration.brier_sentence.strip() in shown


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prr": Interval(0.3, -0.1, 0.6)}, "there is no evidence that the score ranks errors"),
        (
            {"settings": {"num_masks": 9}},
            "the calibration used other settings (num_masks 9 there, 4",
        ),
        ({"model": "some/other"}, "other settings (model other there"),
    ],
)
def test_labels_that_show_nothing(found, calibration, changed, said):
    own = replace(found, model="this", span_calibration=replace(calibration, **changed))
    assert own.about_spans.startswith("Not validated: ")
    assert said in own.about_spans
    for span in own.spans:
        assert (span.validated, span.error_probability) == (False, None)
    for shown in (Elements(own.to_html()).text, " ".join(printed(own, width=300).split())):
        assert own.about_spans in shown
        assert "P(error)" not in shown


def test_one_of_answers_and_one_of_parts(found, calibration, tmp_path):
    answers = reference_for(found)
    answers.save(tmp_path / "answers.json")
    calibration.save(tmp_path / "parts.json")
    assert Calibration.load(tmp_path / "parts.json") == calibration
    given = [tmp_path / "parts.json", tmp_path / "answers.json"]
    assert of_answers_and_parts(given, {}) == (answers, calibration)
    with pytest.raises(ValueError, match=r"got two of parts: rows\.jsonl and rows\.jsonl"):
        of_answers_and_parts([calibration, tmp_path / "parts.json"], {})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"spans_correct": [True]},
            r"expected `spans_correct` as a list of true, false or null, one for each of its 2",
        ),
        (
            {"spans_correct": [True, "no"]},
            "expected `spans_correct` as a list of true, false or null",
        ),
        ({"spans_correct": True}, "line 1 of .*: expected a line of .*polygraph_asmi score"),
        ({"spans_correct": [None, None]}, "no part of an answer in .* has a label"),
        ({"spans_correct": [False, False]}, r"expected right and wrong parts, got 2, all wrong"),
        ({"spans_correct": [True, True]}, r"expected right and wrong parts, got 2, all right"),
        ({"spans": None}, "line 1 of .*: expected a line of .*polygraph_asmi score"),
    ],
)
def test_rows_that_teach_nothing(rows, tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        Calibration.from_spans(save(tmp_path / "rows.jsonl", [rows[0] | changed]))


def test_files_that_hold_no_labels(rows, tmp_path):
    unlabelled = {name: value for name, value in rows[0].items() if name != "spans_correct"}
    with pytest.raises(ValueError, match=r"expected a line of .* got KeyError\('spans_correct'\)"):
        Calibration.read(save(tmp_path / "rows.jsonl", [unlabelled]))
    (tmp_path / "rows.jsonl").write_text("\n{no\n")
    with pytest.raises(ValueError, match="line 2 of"):
        Calibration.read(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="at least one row"):
        Calibration.read(tmp_path / "rows.jsonl")
    other = rows[1] | {"settings": rows[1]["settings"] | {"scope": "response"}}
    with pytest.raises(ValueError, match=r"line 2 of .*: prompt, answer or settings differ from"):
        Calibration.read(save(tmp_path / "rows.jsonl", [rows[0], other]))
    other["digest"] = digest_of(other)
    with pytest.raises(ValueError, match=r"rows 0 and 1 .*scope all there, response here"):
        Calibration.read(save(tmp_path / "rows.jsonl", [rows[0], other]))
