"""Labelled parts of answers: what gives the numbers of `spans` a meaning."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from lm_polygraph_asmi import score
from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.comparison import prr_intervals
from lm_polygraph_asmi.maths.information import NO_INFORMATION
from lm_polygraph_asmi.scoring import Reference
from lm_polygraph_asmi.scoring.call import Scorer
from lm_polygraph_asmi.scoring.reference import calibrate, of_answers_and_parts, probability_at
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
        labels = [None, *wrong[1:]] if number == 7 else wrong
        about = {"row": number, "prompt": f"Question {number // 2}", "spans": spans}
        made.append(own | about | {"wrong": labels})
    return made


def save(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def reference(rows, tmp_path_factory):
    return Reference.read(save(tmp_path_factory.mktemp("labelled") / "rows.jsonl", rows))


def test_what_labels_give(found, rows, reference):
    scores, wrong, clusters, likelihoods = [], [], [], []
    for row in rows:
        for span, label in zip(row["spans"], row["wrong"], strict=True):
            if label is not None:
                scores.append(span["u"])
                wrong.append(label)
                clusters.append(row["prompt"])
                likelihoods.append(span["tokens"] * math.log(span["perplexity"]))
    assert (reference.n, reference.clusters, reference.errors) == (79, 20, sum(wrong))
    assert reference.scores == sorted(scores)
    assert reference.calibration == calibrate(np.array(scores), np.array(wrong))
    quality = 1 - np.array(wrong, dtype=float)
    expected, _ = prr_intervals({"u": scores}, quality, clusters)
    assert reference.prr == expected["u"]
    assert reference.ranks
    assert reference.msp_median == pytest.approx(np.median(likelihoods))
    assert (reference.unit, reference.model) == ("parts", found.model)
    assert reference.ground.startswith(f"rows.jsonl: 79 parts, {sum(wrong)} wrong by their labels")


def test_parts_get_a_probability_of_error(model, tokenizer, found, reference):
    judged = Scorer(model, tokenizer=tokenizer, num_masks=4, reference=reference).score(
        PROMPT, found.answer
    )
    expected = [span.u for span in found.spans]
    assert [span.u for span in judged.spans] == pytest.approx(expected, abs=NO_INFORMATION)
    for span in judged.spans:
        assert span.validated is True
        assert span.error_probability == probability_at(reference.calibration, span.u)
    # Of the whole answer nothing is known by this.
    assert judged.reference is judged.error_probability is None
    assert judged.verdict == found.verdict
    content = json.loads(json.dumps(judged.to_dict(), allow_nan=False))
    assert content["span_reference"] == "rows.jsonl"
    page = Elements(judged.to_html()).text
    terminal = " ".join(printed(judged, width=200).split())
    for span, part in zip(judged.spans, content["spans"], strict=True):
        assert (part["validated"], part["error_probability"]) == (True, span.error_probability)
        for shown in (page, terminal):
            assert f"{span.error_probability:.2f}" in shown
    for shown in (page, terminal):
        assert "ot validated" not in shown
        assert "P(error)" in shown
        assert reference.ground in shown
        assert reference.worth.strip() in shown


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"prr": Interval(0.3, -0.1, 0.6)}, "the score is not known to rank errors"),
        ({"settings": {"num_masks": 9}}, "the reference used other settings (num_masks 9 there, 4"),
        ({"model": "some/other"}, "other settings (model other there"),
    ],
)
def test_labels_that_show_nothing(found, reference, changed, said):
    own = replace(found, model="this", span_reference=replace(reference, **changed))
    assert own.about_spans.startswith("Not validated: ")
    assert said in own.about_spans
    for span in own.spans:
        assert (span.validated, span.error_probability) == (False, None)
    for shown in (Elements(own.to_html()).text, " ".join(printed(own, width=300).split())):
        assert own.about_spans in shown
        assert "P(error)" not in shown


def test_one_of_answers_and_one_of_parts(found, reference, tmp_path):
    answers = reference_for(found)
    answers.save(tmp_path / "answers.json")
    reference.save(tmp_path / "parts.json")
    assert Reference.load(tmp_path / "parts.json") == reference
    given = [tmp_path / "parts.json", tmp_path / "answers.json"]
    assert of_answers_and_parts(given, {}) == (answers, reference)
    with pytest.raises(ValueError, match=r"two references of parts, rows\.jsonl and rows\.jsonl"):
        of_answers_and_parts([reference, tmp_path / "parts.json"], {})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"wrong": [True]},
            r"`wrong` must be a list of true, false or null, one for each of its 2",
        ),
        ({"wrong": [True, "no"]}, "must be a list of true, false or null"),
        ({"wrong": True}, "line 1 of .* is no scored row with labels"),
        ({"wrong": [None, None]}, "no part of an answer in .* has a label"),
        ({"wrong": [True, True]}, r"all 2 parts of .* are wrong: nothing can be learnt"),
        ({"wrong": [False, False]}, r"all 2 parts of .* are right: nothing can be learnt"),
        ({"spans": None}, "line 1 of .* is no scored row with labels"),
    ],
)
def test_rows_that_teach_nothing(rows, tmp_path, changed, message):
    with pytest.raises(ValueError, match=message):
        Reference.from_spans(save(tmp_path / "rows.jsonl", [rows[0] | changed]))


def test_files_that_hold_no_labels(rows, tmp_path):
    unlabelled = {name: value for name, value in rows[0].items() if name != "wrong"}
    with pytest.raises(ValueError, match=r"is no scored row with labels \(KeyError\('wrong'\)\)"):
        Reference.read(save(tmp_path / "rows.jsonl", [unlabelled]))
    (tmp_path / "rows.jsonl").write_text("\n{no\n")
    with pytest.raises(ValueError, match="line 2 of"):
        Reference.read(tmp_path / "rows.jsonl")
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="holds no row"):
        Reference.read(tmp_path / "rows.jsonl")
    other = rows[1] | {"settings": rows[1]["settings"] | {"scope": "response"}}
    with pytest.raises(ValueError, match=r"rows 0 and 1 .*scope all there, response here"):
        Reference.read(save(tmp_path / "rows.jsonl", [rows[0], other]))
