"""Thresholds with a risk guarantee: against enumeration, plain loops, MAPIE, and simulations."""

import math
from functools import cache
from itertools import product

import numpy as np
import pytest
from simulate_guarantee import (
    COVERAGES,
    POPULATIONS,
    STARTS,
    Case,
    baselines,
    line,
    monitor_line,
    one_set,
    search_line,
)

from lm_polygraph_asmi.analysis import Labelled, clusters, risk_control
from lm_polygraph_asmi.analysis.risk_control import (
    BETS,
    choosing_rows,
    ordered_threshold,
    p_value,
    ranks_to_test,
    seed_of,
    thinned_rows,
)
from lm_polygraph_asmi.decisions import risk_threshold
from tests.analysis.simulation import capitals, keys, monte_carlo_error


def answers(seed, n, size):
    score, wrong = POPULATIONS["steep"](np.random.default_rng(seed), n, size)
    return score[:, 0], wrong, keys(n, size)


@cache
def binomial(n, errors, risk):
    """Probability of at most so many errors among n answers."""
    return sum(math.comb(n, k) * risk**k * (1 - risk) ** (n - k) for k in range(errors + 1))


@pytest.mark.parametrize("seed", range(2))
def test_p_values_are_those_of_plain_loops(seed):
    score, wrong, _ = answers(seed, 30, 3)
    keep, codes = score < np.random.default_rng(seed).normal(), np.repeat(np.arange(30), 3)
    expected = 1 / max(capitals(list(zip(codes, keep, wrong, strict=True)), 0.2, 5, BETS))
    assert p_value(keep, wrong, codes, 0.2, 5) == pytest.approx(expected)
    n, errors = int(keep.sum()), int((keep & wrong).sum())
    alone = p_value(keep, wrong, np.arange(90), 0.3, 1)
    assert alone == pytest.approx(binomial(n, errors, 0.3))
    # As soon as a cluster may have two answers the binomial does not hold.
    assert p_value(keep, wrong, np.arange(90), 0.3, 2) > alone
    assert p_value(np.zeros(90, bool), wrong, np.arange(90), 0.3, 1) == 1


@pytest.mark.parametrize(("n", "risk", "level"), [(40, 0.2, 0.05), (90, 0.1, 0.1), (30, 0.5, 0.01)])
def test_ranks_are_where_one_more_error_is_allowed(n, risk, level):
    def allowed(k):
        return max((e for e in range(k + 1) if binomial(k, e, risk) <= level), default=-1)

    expected = [k for k in range(1, n + 1) if allowed(k) > allowed(k - 1) and k >= 0.3 * n]
    assert ranks_to_test(n, risk, level, 0.3).tolist() == sorted({*expected, n})


@pytest.mark.parametrize("unlabelled", [False, True])
@pytest.mark.parametrize(
    ("n", "size", "largest"),
    [(150, 1, None), (600, 1, None), (100, 3, None), (200, 3, None), (260, 3, None), (300, 3, 6)],
)
def test_sequence_is_that_of_plain_loops(n, size, largest, unlabelled):
    """Later clusters may be larger than any here, which costs labels."""
    assert len({seed_of(answers(seed, n, size)[0]) for seed in range(3)}) == 3  # other draws each
    for seed in range(3):
        score, wrong, names = answers(seed, n, size)
        others = answers(seed + 50, 1000, 1)[0] if unlabelled else None
        found = risk_threshold(
            score, Labelled(wrong, names), 0.25, 0.9, unlabelled=others, largest=largest
        )
        codes, most = np.unique(names, return_inverse=True)[1], largest or size
        # So many remain, one a cluster.
        bets = size > 2 and n * size / most >= (150 if unlabelled else 250)
        share = 0.2 if bets and not unlabelled else 0.0
        order, seed = np.lexsort((score, codes)), seed_of(score)  # of a cluster, by score
        score, wrong, codes = score[order], wrong[order], codes[order]
        codes = np.random.default_rng(seed).permutation(n)[codes]
        choosing = choosing_rows(codes, (seed, 1), share) if share else np.zeros(n * size, bool)
        assert choosing.sum() == share * n * size
        rows = ~choosing if bets else thinned_rows(codes, most, seed)
        own, test = np.unique(codes[rows], return_inverse=True)[1], found.tested
        assert (found.largest, len(set(own))) == (most, test)
        assert (test == (1 - share) * n) == (bets or most == size)
        parts = [(1.0, 0.3)] if test <= risk_control.FEW else [(0.7, 0.3), (0.3, 3.5 / test**0.5)]
        limits = []
        for part, start in parts:
            level = part * 0.1
            tested = ranks_to_test(test, 0.25, level, start)
            grid = np.sort(score[rows])[tested - 1] if others is None and not share else [
                np.sort(others)[math.ceil(1000 * rank / test - 1e-9) - 1] for rank in tested
            ] if others is not None else risk_control._strongest_on(
                score[choosing], wrong[choosing], codes[choosing], 0.25, most
            )  # fmt: skip
            for limit in grid:
                keep = score[rows] <= limit
                if p_value(keep, wrong[rows], own, 0.25, most if bets else 1) > level:
                    break
                limits.append(min(limit, score.max()))
        assert found.threshold == (max(limits) if limits else None)
        if limits:
            assert found.coverage == np.mean(score <= found.threshold)
            assert found.error_rate == wrong[score <= found.threshold].mean()


def kept_and_tested(scores, labels, risk, level):
    """Labels in order by plain loops: how many are accepted, and the rows of the next test."""
    n = len(scores)
    order = sorted(range(n), key=lambda row: scores[row])
    accepted, following = 0, []
    parts = [(1.0, 0.3)] if n <= risk_control.FEW else [(0.7, 0.3), (0.3, 3.5 / n**0.5)]
    for part, start in parts:
        for rank in ranks_to_test(n, risk, part * level, start):
            most = scores[order[rank - 1]]
            rows = [row for row in order if scores[row] <= most]
            wrong, right = (sum(labels[row] == kind for row in rows) for kind in (1, 0))
            if binomial(len(rows), len(rows) - right, risk) > part * level:
                if binomial(len(rows), wrong, risk) <= part * level:
                    missing = [row for row in rows if labels[row] is None]
                    trials = (binomial(len(rows), wrong + n, risk) for n in range(len(missing)))
                    following.append((missing, sum(p <= part * level for p in trials) - 1))
                break
            accepted = max(accepted, len(rows))
    return accepted, *min(following, key=lambda each: len(each[0]), default=([], 0))


@pytest.mark.parametrize(("n", "digits"), [(60, 9), (60, 0), (320, 9), (320, 1)])
def test_labels_in_order_are_those_of_plain_loops(n, digits):
    """All are given, or some are missing anywhere; scores of few digits have ties."""
    cut = 0
    for seed in range(8):
        score, wrong, _ = answers(seed, n, 1)
        score, rng = np.round(score, digits), np.random.default_rng(seed)
        gone = (score > np.quantile(score, rng.random())) | (rng.random(n) < 0.02)
        gone &= seed > 0
        labels = [None if no else int(label) for no, label in zip(gone, wrong, strict=True)]
        rule, to_label, spare = ordered_threshold(score, labels, 0.4, 0.8)
        accepted, rows, may = kept_and_tested(score.tolist(), labels, 0.4, 0.2)
        assert (rule.coverage, rule.labels) == (accepted / n, n - labels.count(None))
        assert (rule.threshold is None, rule.base_rate) == (not accepted, None)
        assert (sorted(to_label), spare) == (sorted(rows), may)
        assert (np.diff(score[to_label]) >= 0).all()
        seen = [labels[i] for i in score.argsort(kind="stable")[:accepted] if labels[i] is not None]
        assert rule.error_rate == (np.mean(seen) if seen else None)
        cut += len(rows) > 0 < accepted
    assert cut


@pytest.mark.parametrize("gone", [(), (2,), (0, 5)])
def test_the_probability_of_a_violation_in_order_by_enumeration(gone):
    """7 answers by rank, some skipped: a look after every label, stopped when it suits.

    The risk up to each rank is .3 to the fifth, and above it from the sixth on: who accepts more
    than five at any look has broken the guarantee."""
    n, risk, level = 7, 0.3, 0.4
    chances = np.array([0.3] * 5 + [0.31] * 2)
    total = violated = given = 0.0
    for labels in product((0, 1), repeat=n):
        chance = float(np.prod(np.where(labels, chances, 1 - chances)))
        looks = [
            tuple(None if i in gone or i >= upto else labels[i] for i in range(n))
            for upto in range(n + 1)
        ]
        accepted = [in_order(look, risk, level) for look in looks]
        assert accepted == sorted(accepted)  # a later look never takes back
        total, given = total + chance, given + chance * (accepted[-1] > 0)
        violated += chance * (max(accepted) > 5)
    assert total == pytest.approx(1)
    assert violated <= level
    assert given > violated > 0 or gone


@cache
def in_order(labels, risk, level):
    rule, *_ = ordered_threshold(range(len(labels)), labels, risk, 1 - level)
    return round(rule.coverage * len(labels))


@pytest.mark.parametrize("largest", [None, 5])
def test_every_answer_has_the_same_chance_to_be_kept(largest):
    codes = np.array([1, 1, 0, 1, 2, 2, 3, 3, 3])
    draws, counts, together = 1000, np.zeros(9), 0
    for seed in range(draws):
        rows = thinned_rows(codes, largest, seed)
        assert (len(set(codes[rows])), rows.tolist()) == (len(rows), sorted(rows))
        counts[rows] += 1
        together += {0, 2} <= set(codes[rows])
    chance = 1 / (largest or 3)
    assert np.abs(counts / draws - chance).max() < 5 * monte_carlo_error(chance, draws)
    pair = chance * 2 * chance  # clusters are kept independently
    assert abs(together / draws - pair) < 5 * monte_carlo_error(pair, draws)


@pytest.mark.parametrize("size", [2, 8])
def test_no_order_of_rows_decides_who_tests(size):
    """Also where scores have ties, and where bets are placed one after the other."""
    score, wrong, names = answers(0, 280, size)
    score, codes, found = np.round(2 * score) / 2, np.unique(names, return_inverse=True)[1], []
    for rows in (np.arange(280 * size), np.random.default_rng(0).permutation(280 * size)):
        of_rows, no_row = (score[rows], wrong[rows], codes[rows]), np.zeros(280 * size, bool)
        tests = risk_control.tests_of(of_rows, no_row, 0.4, 0.8, None, size)
        rule = risk_threshold(score[rows], Labelled(wrong[rows], codes[rows]), 0.4, 0.8)
        found.append((rule, sorted(zip(*tests.rows, strict=True))))
    assert found[0] == found[1]
    assert found[0][0].threshold is not None


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("seed", range(2))
def test_the_baseline_is_mapies(seed):
    from mapie.risk_control import BinaryClassificationController
    from mapie.risk_control.fwer_control import FWERFixedSequenceTesting, control_fwer

    score, wrong, _ = answers(seed, 1000, 1)
    order, ranks = np.argsort(score), np.ceil(COVERAGES * 1000).astype(int)
    theirs = BinaryClassificationController(
        lambda x: np.column_stack([x, -x]), risk="precision", target_level=0.8,
        confidence_level=0.9, list_predict_params=-score[order][ranks - 1],
        fwer_method="bonferroni_holm",
    )  # fmt: skip
    theirs.calibrate(score, ~wrong)
    ours = baselines(Case("steep", 1000, 1, 0.2, 0.9), score[order], wrong[order])
    assert ours["MAPIE"] == max(np.sum(-score >= limit) for limit in theirs.valid_predict_params)
    tests = [binomial(rank, int(wrong[order][:rank].sum()), 0.2) for rank in ranks.tolist()]
    started = control_fwer(np.array(tests), 0.1, FWERFixedSequenceTesting(STARTS))
    assert ours["multi-start"] == max(ranks[started])


SIMULATED = [
    Case("normal", 30, 5, 0.3, 0.9), Case("ties of five values", 100, 1, 0.2, 0.9),
    Case("not monotone", 100, 1, 0.2, 0.9), Case("uneven", 60, 1, 0.15, 0.9),
]  # fmt: skip


@pytest.mark.parametrize("case", SIMULATED)
def test_the_guarantee_holds_in_a_small_simulation(case, monkeypatch):
    monkeypatch.setattr(clusters, "identity", cache(clusters.identity))  # half of the time
    sets, allowed = 60, 1 - case.confidence
    results = [one_set(case, seed) for seed in range(sets)]
    for way in {"named", "unlabelled", "ordered", "thinned", "bets"} & results[0].keys():
        violated = np.mean([result[way][0] for result in results])
        assert violated <= allowed + 3 * monte_carlo_error(allowed, sets), way


def test_the_simulation_knows_a_broken_guarantee():
    """Accepting at half of the risk's confidence, as a line of the table has it."""
    violated, accepted = line(Case("useless", 60, 1, 0.29, 0.3), 40)["named"].split(" / ")
    assert float(violated.split()[0]) > max(30, float(accepted)) > 0


@pytest.mark.parametrize(("n", "size"), [(300, 1), (300, 3), (1200, 3)])
def test_answers_that_are_all_right_or_wrong_or_alike(n, size):
    """Of the last, bets are made, which test to accept everything: the threshold is a score."""
    names = keys(n // size, size)
    score, half = np.random.default_rng(3).normal(size=n), np.arange(n) % 2 == 0
    right, wrong = (
        risk_threshold(score, Labelled(np.full(n, kind), names), 0.1, 0.95) for kind in (0, 1)
    )
    assert right.threshold in score
    assert right.coverage == np.mean(score <= right.threshold) > 0.9
    assert (right.error_rate, right.unavoidable, right.limits) == (0, 0, "")
    assert (wrong.threshold, wrong.error_rate, wrong.coverage) == (None, None, 0)
    for risk, threshold in ((0.1, None), (0.7, 0.5)):
        alike = risk_threshold(np.full(n, 0.5), Labelled(half, names), risk, 0.95)
        assert alike.threshold == threshold


@pytest.mark.parametrize(
    ("size", "risk", "confidence"), [(1, 0.01, 0.95), (1, 0.2, 0.9), (3, 0.2, 0.9), (1, 0.5, 0.5)]
)
def test_the_least_number_of_labels(size, risk, confidence):
    """All right and all of one score: so many clusters do, and one less does not."""
    least = risk_control.least_labels(risk, confidence)
    for total, attainable in ((least, True), (least - 1, False)):
        if total > 1:
            zeros, names = np.zeros(total * size), keys(total, size)
            found = risk_threshold(zeros, Labelled(zeros, names), risk, confidence)
            assert (found.threshold is not None) == attainable
            assert (f"Even without an error, at least {least} " in found.limits) != attainable


def test_the_tables_of_the_page():
    """The monitor's power, and a search, on few numbers."""
    for rate, outcome, streams in ((0.5, "violated", 3), (0.05, "holds", 0)):
        found = monitor_line(rate, streams=streams)
        assert (found["outcome"], found["MAPIE's monitor"] == "-") == (outcome, not streams)
        assert 10 < found["one exact test"] < found["monitor"] < 200
    worst = search_line(0, random=4, moves=2, sets=500, again=2000)
    assert 0 <= float(worst["violated, % (5 allowed)"]) < 7
