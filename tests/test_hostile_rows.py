"""Rows as real users send them, through every door: right, or refused by name."""

import json

import pandas as pd
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
    rows = 5000 if request.config.getoption("--slow") else 200
    wrong, seen = [], []
    for place, (door, given) in enumerate(hostile.sources(0, rows)):
        stop = STOPS[place % 3]
        rows = given.to_dict("records") if door == "batch" else given
        expected = border.verdicts(door, rows)
        found = outcomes(scorers[stop], door, given, tmp_path / f"{place}.{door}")
        seen += expected
        for problem in problems(expected, found, stop):
            wrong.append(f"{place} {door}, stop {stop!r}: {problem}\n    {str(rows)[:600]}")
    assert not wrong, f"{len(wrong)} of {len(seen)}\n" + "\n".join(wrong)
    for label in {verdict.label for verdict in seen if isinstance(verdict, border.Right)} - {None}:
        assert read_label(*label) == border.is_wrong(*label), label
    taken = sum(isinstance(verdict, border.Right) for verdict in seen)
    assert 0.15 < taken / len(seen) < 0.75  # neither is rare


def test_what_these_rows_found(scorers):
    chat = [hostile.user("Who?"), hostile.says("Red.", "Assistant")]
    (found,) = scorers[None].score_many([{"messages": chat, "correct": True}])
    assert "role" in found.error  # not that the row has no answer
    halves = [
        {"prompt": words, "answer": "x"} for words in ("\ud83d", [hostile.user("\ud83d")], "Who?")
    ]
    table = BatchScorer(lambda: scorers[None])(pd.DataFrame(halves, dtype=object))
    assert table["error"].isna().tolist() == [False, False, True]


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


def problems(expected, found, stop):
    refused = [verdict for verdict in expected if isinstance(verdict, border.Refused)]
    if isinstance(found, str):
        if not any(verdict.file and named(verdict, found) for verdict in refused):
            yield f"expected {expected}, the file was refused: {found}"
        return
    if len(found) != len(expected):
        yield f"expected {len(expected)} rows, found {found}"
        return
    for number, (verdict, outcome) in enumerate(zip(expected, found, strict=True), start=1):
        if isinstance(verdict, border.Refused):
            if not isinstance(outcome, str):
                yield f"row {number}: expected a refusal that names {verdict.names}, got {outcome}"
            elif not verdict.file and not named(verdict, outcome):
                yield f"row {number}: expected an error that names {verdict.names}: {outcome}"
        elif isinstance(outcome, str):
            if not verdict.doubt:
                yield f"row {number}: expected {verdict[1:]}, got the error {outcome}"
        else:
            right = (*border.number(verdict.prompt, verdict.answer, stop), verdict.label)
            if outcome != (right[0], pytest.approx(right[1], abs=1e-3), right[2]):
                yield f"row {number}: expected {right}, got {outcome}"


def named(verdict, error):
    return any(name in error for name in verdict.names)
