"""The monitor: against plain loops and exact probabilities of all looks; saved decisions."""

import json
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.analysis.risk_control import BETS
from lm_polygraph_asmi.analysis.risk_monitor import LEVEL, SMALL_BETS
from lm_polygraph_asmi.decisions import Decision, RiskThreshold, risk_monitor
from lm_polygraph_asmi.decisions.decision import EMPTY
from lm_polygraph_asmi.decisions.monitor import monitor
from tests.analysis.simulation import capitals, keys
from tests.decisions.conftest import labelled, limited, numbered, refused, run, write


def guaranteed(risk=0.1, confidence=0.9, largest=1):
    return RiskThreshold(0.3, 0.8, 0.04, risk, confidence, 0.2, 500 * largest, 500, largest)


def purse(rows, risk, largest, above):
    """1 / the capital in the end."""
    return min(1.0, 1 / capitals(rows, risk, largest, SMALL_BETS if above else BETS, above)[-1])


@pytest.mark.parametrize("largest", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_monitor_is_that_of_plain_loops(seed, largest):
    rng = np.random.default_rng(seed)
    names = [str(key) for key in rng.integers(0, 40, size=90)]  # up to six answers in a cluster
    accepted, wrong = rng.random(90) < 0.7, rng.random(90) < (0.02, 0.2, 0.5)[seed]
    rows = list(zip(names, accepted, wrong, strict=True))
    monitor = risk_monitor(guaranteed(risk=0.2, largest=largest), accepted, Labelled(wrong, names))
    expected = [purse(rows, 0.2, largest, above) for above in (False, True)]
    assert [monitor.p_holds, monitor.p_violated] == pytest.approx(expected)
    assert monitor.answers == sum(min(names.count(key), largest) for key in set(names))
    assert monitor.left_out == 90 - monitor.answers > 0
    expected = "violated" if monitor.p_violated <= 0.05 else "inconclusive"
    assert monitor.outcome == ("holds" if monitor.p_holds <= 0.1 else expected)
    assert monitor.low - 1e-3 < monitor.errors / monitor.accepted < monitor.high + 1e-3
    for end, level, above in ((monitor.high, 0.1, False), (monitor.low, 0.05, True)):
        if end > 1e-3:
            inner, outer = end - 1e-3 + 2e-3 * above, end + 1e-3 - 2e-3 * above
            assert purse(rows, outer, largest, above) < level < purse(rows, inner, largest, above)


@cache
def outcome_of(errors, n):
    """By its p-values, as plain loops have them."""
    found = risk_monitor(
        guaranteed(0.3, 0.8), np.ones(n), Labelled(np.arange(n) < errors, range(n))
    )
    expected = "holds" if found.p_holds <= 0.2 else "inconclusive"
    assert found.outcome == ("violated" if found.p_violated <= LEVEL else expected)
    unclear = found.outcome == "inconclusive" and n < found.least_holds
    assert ("are needed for holds" in str(found)) == unclear
    return found.outcome


@pytest.mark.parametrize(("outcome", "allowed"), [("violated", LEVEL), ("holds", 0.2)])
def test_exact_probability_that_any_look_errs(outcome, allowed):
    """Single answers at exactly the risk, with a look after each of 12: by all paths of errors."""
    alive, erred = {0: 1.0}, 0.0
    for n in range(1, 13):
        after = Counter()
        for errors, chance in alive.items():
            after.update({errors: 0.7 * chance, errors + 1: 0.3 * chance})
        erred += sum(after[errors] for errors in after if outcome_of(errors, n) == outcome)
        alive = {e: chance for e, chance in after.items() if outcome_of(e, n) != outcome}
    assert allowed / 10 < erred <= allowed  # far below it, the test would have no power


@pytest.mark.parametrize("largest", [1, 4])
@pytest.mark.parametrize(("risk", "confidence"), [(0.05, 0.95), (0.3, 0.8)])
def test_least_number_of_accepted_answers(risk, confidence, largest):
    guarantee = guaranteed(risk, confidence, largest=largest)

    def outcome(n):
        return risk_monitor(guarantee, [1] * n + [0, 0], Labelled([0] * (n + 2), keys(n + 2, 1)))

    least = outcome(1).least_holds
    for n, words in (
        (least, "holds: "), (least - 1, f"At least {least} accepted"), (0, "none of 2 answers"),
    ):  # fmt: skip
        assert words in str(outcome(n))


@pytest.fixture
def limit(calibration):
    return limited(calibration, 1.0)


def changed(line, **change):
    return line | change | {"digest": Decision.digest(line | change)}


def decided(calibration, n, wrong=0):
    """Lines of `decide --out` with labels, the first of them wrong."""
    shared = calibration.made_with | {
        "answer": " x", "accept": True, "reason": "", "value": 0.5, "settings": {}, "model": "tiny"
    }  # fmt: skip
    new = [{"id": i, "cluster": i, "prompt": f"New question {i}"} for i in range(n)]
    return [changed(line | shared) | {"correct": i >= wrong} for i, line in enumerate(new)]


@pytest.mark.parametrize(
    ("n", "wrong", "outcome", "status"),
    [(60, 0, "holds", 0), (60, 60, "violated", 3), (4, 1, "inconclusive", 4)],
)
def test_outcomes_and_exit_status(limit, tmp_path, n, wrong, outcome, status):
    """Rows of several files are numbered on; the last two have no decision, and no answer."""
    *lines, unclear, blank = decided(limit, n + 2, wrong)
    for line, reason in ((unclear, "It answered nothing."), (blank, EMPTY)):
        lines.append(changed(line, accept=None, reason=reason, correct=None))
    files = [tmp_path / name for name in ("calibration.json", "a.jsonl", "b.jsonl")]
    limit.save(files[0])
    write(files[1], lines[:2]).write_text("\n" + files[1].read_text())  # an empty line counts
    write(files[2], lines[2:])
    code, said = run("monitor", *files, "--json")
    expected = {"outcome": outcome, "answers": n + 1, "accepted": n, "errors": wrong}
    assert (code, json.loads(said).items() >= expected.items()) == (status, True)
    _, said = run("gate", *files)  # its name in release 0.3
    words = ("`monitor` now", f"{outcome}: {wrong} of {n} ", "abstained: 1. Left out 1 empty")
    assert [part for part in words if part not in said] == []
    write(files[2], [lines[0]])
    code, said = run("monitor", *files)
    assert (code, 'row 4: "answer": row 2' in said) == (1, True)


SEEN = {name: labelled()[3][name] for name in ("prompt", "answer")}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accept": None}, '"digest": the row was changed'), ({"answer": " y"}, '"digest"'),
        ({"reason": EMPTY}, '"digest"'), ({"threshold": 2.0}, '"threshold" is 2.0, .* 1.0'),
        ({"calibration": "other"}, '"calibration"'), ({"correct": "maybe"}, '"correct"'),
        ({"id": 0}, '"id": row 1'), ({"value": ...}, '"value"'),
        (SEEN, "a question of the calibration"),
        (SEEN | {"answer": " another"}, "a question of the calibration"),
        (SEEN | {"prompt": f" {SEEN['prompt']}\n"}, "a question of the calibration"),
    ],
)  # fmt: skip
def test_rows_that_do_not_fit(limit, change, words):
    first, second = decided(limit, 2)
    second = changed(second, **change) if "prompt" in change else second | change
    second = {name: value for name, value in second.items() if value is not ...}
    with pytest.raises(ValueError, match=rf"row 2: .*{words}"):
        monitor(limit, numbered(first, second))


KINDS = {
    "right": {}, "wrong": {"correct": False}, "unlabelled": {"correct": None},
    "noted": {"error": "a field of the user's own"},
    "abstained": {"accept": False, "correct": None}, "unclear": {"accept": None, "correct": None},
    "blank": {"accept": None, "answer": "\n", "reason": EMPTY, "correct": None}, "failed": {},
}  # fmt: skip
"""What a row may be, and its fields. Only accepted answers need a label."""


def of_kinds(calibration, kinds):
    """Rows of these kinds, two different answers to each question."""
    lines = [
        changed(line, **{"prompt": f"New question {i // 2}", "answer": f" {i}"} | KINDS[kind])
        for i, (line, kind) in enumerate(zip(decided(calibration, len(kinds)), kinds, strict=True))
    ]
    failed = {"row": 9, "prompt": None, "error": "no prompt"}
    return numbered(*(failed if k == "failed" else v for v, k in zip(lines, kinds, strict=True)))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_counted_of_rows_is_that_of_plain_counts(limit, seed):
    kinds = ["right", *np.random.default_rng(seed).choice([*KINDS], 15).tolist()]
    found, number = monitor(limit, of_kinds(limit, kinds)), Counter(kinds)
    accepted = number["right"] + number["wrong"] + number["noted"]
    answers = accepted + number["abstained"] + number["unclear"]
    of_question = Counter(i // 2 for i, kind in enumerate(kinds) if kind not in ("blank", "failed"))
    expected = {
        "answers": answers, "accepted": accepted, "errors": number["wrong"],
        "without_decision": number["unclear"], "most": max(of_question.values()),
        "share": (accepted + number["unlabelled"]) / (answers + number["unlabelled"]),
        **{kind: number[kind] for kind in ("unlabelled", "blank", "failed")},
    }  # fmt: skip
    assert {name: getattr(found, name) for name in expected} == pytest.approx(expected)


def test_what_cannot_be_monitored(limit):
    """Also a quality of another scale, unless it is named from where an answer is right."""
    lines = [line | {"correct": None, "quality": 90} for line in decided(limit, 20)]
    percent = numbered(*(line | {"quality": 10} for line in lines[:5]), *lines[5:])
    some, none = of_kinds(limit, ["unlabelled", "unclear", "abstained"]), limited(limit, None)
    refused(
        (partial(monitor, limit, of_kinds(limit, ["blank"])), "accepted answer with a label"),
        (partial(monitor, limit, some), "none among 1"),
        (partial(monitor, none, numbered(*decided(none, 1))), "threshold, got none"),
        (partial(monitor, limit, percent), "row 1: .*between 0 and 1"),
    )
    named = monitor(replace(limit, right_from=50), percent)
    assert monitor(limit, percent, right_from=50).errors == named.errors == 5
    signed = numbered(*(line | {"quality": -1} for line in lines[:5]),
                      *(line | {"quality": 1} for line in lines[5:]))  # fmt: skip
    assert monitor(replace(limit, right_from=2), signed, right_from=0).errors == 5


@pytest.mark.parametrize("signal", ["perplexity", "column:unsure"])
def test_what_the_digest_of_a_decision_covers(limit, signal):
    """Of a column, the question may be known by the id alone."""
    (line,) = decided(replace(limit, signal=signal), 1)
    covered = {n for n in line if Decision.digest(line | {n: "other"}) != line["digest"]}
    known = {"prompt", "answer", "settings", "model", "accept", "reason", "value"}
    assert covered == {*known, *limit.made_with} | ({"id"} if signal != "perplexity" else set())
