"""Rows as real users send them, through every door: right, or refused by name."""

import json
from itertools import zip_longest

import pytest

from lm_polygraph_asmi import Scorer, score_file
from lm_polygraph_asmi.decisions.labels import is_wrong
from lm_polygraph_asmi.scoring import BatchScorer
from tests import border, hostile

pytestmark = pytest.mark.usefixtures("unseen")
STOPS = (None, "\n", "\n")


@pytest.fixture(scope="module")
def scorers():
    kept = {"tokenizer": border.tokenizer(), "num_masks": 2, "max_new_tokens": border.LIMIT}
    return {stop: Scorer(border.model(), stop=stop, **kept) for stop in STOPS}


def test_rows_are_right_or_refused(scorers, tmp_path, request):
    number = 5000 if request.config.getoption("--slow") else 200
    wrong, seen = [], []
    for place, (door, given) in enumerate(hostile.sources(0, number)):
        stop = STOPS[place % 3]
        rows = given.to_dict("records") if door == "batch" else given
        expected = border.verdicts(door, rows)
        found = outcomes(scorers[stop], door, given, tmp_path / f"{place}.{door}")
        seen += expected
        if isinstance(found, str):
            right = any(
                isinstance(verdict, border.Refused) and verdict.file and verdict.is_named_in(found)
                for verdict in expected
            )
        else:
            pairs = list(zip_longest(expected, found))
            right = all(is_right(verdict, outcome, stop) for verdict, outcome in pairs)
        if not right:
            wrong.append(
                f"{place} {door}, {stop!r}: {found}, expected {expected}\n    {rows!r:.600}"
            )
    assert not wrong, f"{len(wrong)} of {len(seen)}\n" + "\n".join(wrong)
    for label in {verdict.label for verdict in seen if isinstance(verdict, border.Right)} - {None}:
        assert read_label(*label) == border.is_wrong(*label), label
    taken = sum(isinstance(verdict, border.Right) for verdict in seen)
    assert 0.15 < taken / len(seen) < 0.75  # neither is rare


def test_a_wrong_role_comes_before_the_answer_that_it_hides(scorers):
    chat = [hostile.user("Who?"), hostile.says("Red.", "Assistant")]
    (found,) = scorers[None].score_many([{"messages": chat, "correct": True}])
    assert "role" in found.error


def outcomes(scorer, door, given, path):
    """Of each row its answer, MSP and label, or an error; of a file that is refused its error."""
    try:
        if door == "python":
            return [
                found.error or (found.result.answer, found.result.signals["msp"], label_of(row))
                for found, row in zip(scorer.score_many(given), given, strict=True)
            ]
        if door == "batch":
            rows = BatchScorer(lambda: scorer)(given).to_dict("records")
        else:
            path.write_bytes(given)
            score_file(scorer, path, out := path.with_suffix(".out.jsonl"))
            rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    except ValueError as error:
        return str(error)
    return [
        row["error"]
        if isinstance(row.get("error"), str)
        else (row["answer"], row["msp"], label_of(row))
        for row in rows
    ]


def label_of(row):
    fields = row if isinstance(row, dict) else {}
    return next(((n, fields[n]) for n in border.LABELS if not border.no(fields.get(n))), None)


def read_label(name, value):
    try:
        return is_wrong({name: value})
    except ValueError as error:
        return None if name in str(error) else error


def is_right(verdict, outcome, stop):
    """Whether a row has its number, or an error with one of the names that its refusal needs."""
    if isinstance(verdict, border.Refused):
        return isinstance(outcome, str) and (verdict.file or verdict.is_named_in(outcome))
    if isinstance(outcome, str):
        return bool(verdict.doubt)
    text, msp = border.number(verdict.prompt, verdict.answer, stop)
    return outcome == (text, pytest.approx(msp, abs=1e-3), verdict.label)
