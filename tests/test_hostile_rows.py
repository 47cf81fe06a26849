"""Rows as real users send them, in a list or a data frame: right, or refused by name."""

import pytest

from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.scoring import BatchScorer
from tests import border, hostile

pytestmark = pytest.mark.usefixtures("unseen")
STOPS = (None, "\n", "\n")


@pytest.fixture(scope="module")
def scorers():
    kept = {"tokenizer": border.tokenizer(), "num_masks": 2, "max_new_tokens": border.LIMIT}
    return {stop: Scorer(border.model(), stop=stop, **kept) for stop in STOPS}


def test_rows_are_right_or_refused(scorers, request):
    rounds = 30 if request.config.getoption("--slow") else 1
    wrong, seen = [], []
    for place, (door, given) in enumerate(hostile.sources(0, rounds)):
        stop = STOPS[place % 3]
        rows = given.to_dict("records") if door == "batch" else given
        expected = border.verdicts(door, rows)
        found = outcomes(scorers[stop], door, given)
        seen += expected
        if not all(is_right(*pair, stop) for pair in zip(expected, found, strict=True)):
            wrong.append(f"{place} {door}, {stop!r}: {found}, not {expected}\n    {rows!r:.600}")
    assert not wrong, f"{len(wrong)} of {len(seen)}\n" + "\n".join(wrong)
    taken = sum(isinstance(verdict, border.Right) for verdict in seen)
    assert 0.15 < taken / len(seen) < 0.75  # neither is rare


def outcomes(scorer, door, given):
    """Of each row its answer, MSP and label, or an error; or the error of a whole data frame."""
    if door == "python":
        return [
            found.error or (found.result.answer, found.result.signals["msp"], label_of(row))
            for found, row in zip(scorer.score_many(given), given, strict=True)
        ]
    try:
        rows = BatchScorer(lambda: scorer)(given).to_dict("records")
    except ValueError as error:
        return [str(error)]
    return [
        row["error"]
        if isinstance(row.get("error"), str)
        else (row["answer"], row["msp"], label_of(row))
        for row in rows
    ]


def label_of(row):
    fields = row if isinstance(row, dict) else {}
    return next(((n, fields[n]) for n in border.LABELS if not border.no(fields.get(n))), None)


def is_right(verdict, outcome, stop):
    """Whether a row has its number, or an error with one of the names that its refusal needs."""
    if isinstance(verdict, border.Refused):
        return isinstance(outcome, str) and verdict.is_named_in(outcome)
    if isinstance(outcome, str):
        return bool(verdict.doubt)
    text, msp = border.number(verdict.prompt, verdict.answer, stop)
    return outcome == (text, pytest.approx(msp, abs=1e-3), verdict.label)
