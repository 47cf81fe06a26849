"""From labelled answers to a calibration, whose decisions cover only answers like its own."""

import copy
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from sklearn.metrics import roc_auc_score

from lm_polygraph_asmi.analysis import (
    Labelled,
    debiased_calibration_error,
    held_out_probability,
    risk_threshold,
    wilson_interval,
)
from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.scoring import Calibration, Score, calibrate, calibrate_rows, calibrate_run
from lm_polygraph_asmi.scoring.calibrate import RISKS, context_clusters, is_wrong
from lm_polygraph_asmi.scoring.calibration import FORMAT
from lm_polygraph_asmi.scoring.decision import SIGNALS, Decision
from lm_polygraph_asmi.scoring.page import render, short_verdict
from lm_polygraph_asmi.scoring.rows import Row, line_of, score_rows
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests import tiny_lm
from tests.report import runs
from tests.scoring.conftest import PROMPT
from tests.scoring.test_page import Elements
from tests.scoring.test_result import printed

SETTINGS = {"num_masks": 4, "mask_rate": 0.3, "top_k": 8, "stop": "\n"}
WORDS = ("Brask", "1931", "kites", "blue", "Ondine", "True", "passage", "ferry")


def labelled(n=90):
    """Two answers to each prompt; the label has nothing to do with anything."""
    draw = np.random.default_rng(0)
    return [
        {
            "prompt": f"Question {i // 2}: {PROMPT}",
            "answer": f" {draw.choice(WORDS)} {draw.choice(WORDS)}",
            "correct": bool(draw.random() < 0.7),
            "cluster": i // 2,
            "id": f"q{i}",
        }
        for i in range(n)
    ]


@pytest.fixture(scope="module")
def scorer(model, tokenizer):
    return Scorer(model, tokenizer=tokenizer, **SETTINGS)


@pytest.fixture(scope="module")
def scored(scorer, tmp_path_factory):
    """A file of scored rows: scored once for all tests."""
    out = tmp_path_factory.mktemp("scored") / "scored.jsonl"
    rows = [Row(number, row) for number, row in enumerate(labelled(), start=1)]
    lines = [line_of(row, outcome) for row, outcome in score_rows(scorer, rows)]
    out.write_text("\n".join(lines) + "\n")
    return out


@pytest.fixture(scope="module")
def calibration(scorer):
    return calibrate_rows(labelled(), scorer, 0.4, 0.8, signal="perplexity", resamples=50)


@pytest.fixture(scope="module")
def scores(scored):
    return [Score.from_dict(json.loads(line)) for line in scored.read_text().splitlines()]


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
    assert calibration.scores == sorted(map(float, scores))
    assert (calibration.n, calibration.clusters, calibration.errors) == (90, 45, wrong.sum())
    values = [one.signals["perplexity"] for one in scores]
    expected = risk_threshold(values, wrong, clusters, 0.4, 0.8)
    assert calibration.decision == Decision("perplexity", expected)
    for kind in scores[0].signals:
        found = calibration.signals[SIGNALS[kind]]
        values = [one.signals[kind] for one in scores]
        assert found.auroc.value == pytest.approx(roc_auc_score(wrong, values))
        assert found.prr.low <= found.prr.value <= found.prr.high
        assert found.augrc.low <= found.augrc.value <= found.augrc.high
    assert "combination" in calibration.signals
    assert calibration.recommendation
    tried = [(one.signal, one.guarantee.risk) for one in calibration.other_thresholds]
    assert tried == [(kind, risk) for kind in scores[0].signals for risk in (*RISKS, 0.4)]
    assert len(calibration.threshold_table) == len(tried)
    assert calibration.settings.items() >= scorer.fingerprints().items()
    held_out, _ = held_out_probability([*map(float, scores)], Labelled(wrong, clusters))
    assert calibration.calibration_error == debiased_calibration_error(held_out, wrong)
    assert calibration.reliability["brier"] == pytest.approx(np.mean((held_out - wrong) ** 2))
    for row, step in zip(calibration.steps.itertuples(), calibration.calibration, strict=True):
        assert (row.start, row.n, row.errors) == step
        assert (row.rate, row.low, row.high) == wilson_interval(step.errors, step.n)
    assert calibration.reference_range["prompt_tokens"] == sorted(
        one.prompt_tokens for one in scores
    )


def test_saved_and_loaded(calibration, tmp_path):
    calibration.save(tmp_path / "calibration.json")
    text = (tmp_path / "calibration.json").read_text()
    json.loads(text, parse_constant=pytest.fail)
    found = Calibration.load(tmp_path / "calibration.json")
    found.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == text
    assert found == calibration
    content = json.loads(text)
    for other in (1, FORMAT + 1):
        (tmp_path / "old.json").write_text(json.dumps(content | {"format": other}))
        with pytest.raises(ValueError, match=r"of format 4: write a new one with .*calibrate"):
            Calibration.load(tmp_path / "old.json")


def deciding(calibration, score, threshold, signal="perplexity"):
    guarantee = calibration.decision.guarantee
    found = replace(guarantee, threshold=threshold, coverage=0.5, error_rate=0.1)
    return replace(score, calibration=replace(calibration, decision=Decision(signal, found)))


@pytest.fixture(scope="module")
def again(calibration, model, tokenizer):
    return Scorer(model, tokenizer=tokenizer, **SETTINGS, calibration=calibration).score(
        PROMPT, " Brask"
    )


def test_accept(calibration, again):
    for signal, value in again.signals.items():
        one = deciding(calibration, again, value, signal)
        assert one.accept is True
        assert one.accept_reason.startswith(
            f"Accept: {SIGNALS[signal]} {value:.4g} nats is at most"
        )
        assert (
            "with 80% confidence, the error rate of accepted answers is at most 40%"
            in one.accept_reason
        )
        assert one.accept_reason in one.verdict
        other = deciding(calibration, again, np.nextafter(value, -1), signal)
        assert other.accept is False
        assert other.accept_reason.startswith(
            f"Abstain: {SIGNALS[signal]} {value:.4g} nats is above"
        )
    nothing = deciding(calibration, again, None)
    assert nothing.accept is None
    assert nothing.accept_reason.startswith("No threshold by perplexity: not attainable with")
    for one, said in (
        (replace(again, calibration=None), "pass a calibration"),
        (replace(again, answered=False), "the answer is empty"),
        (
            replace(again, calibration=replace(calibration, decision=None)),
            "polygraph_asmi calibrate",
        ),
    ):
        assert one.accept is None
        assert one.accept_reason.startswith("No decision: ")
        assert said in one.accept_reason
    for limit, word in ((1e9, "accept"), (-1, "abstain")):
        one = deciding(calibration, again, limit)
        shown = Elements(render([one, one], "Answers")).text
        assert one.accept_reason in shown
        assert word in short_verdict(one)
        assert short_verdict(one) in shown
        assert one.accept_reason in " ".join(printed(one, width=300).split())
    content = json.loads(json.dumps(deciding(calibration, again, 1e9).to_dict(), allow_nan=False))
    assert content["accept"] is True
    assert content["accept_reason"].startswith("Accept")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"scope": "response"}, "scope 'all' there, 'response' here"),
        ({"mask_sampler": "balanced"}, "mask_sampler 'bernoulli' there, 'balanced' here"),
        ({"num_masks": 5}, "num_masks 4 there, 5 here"),
        ({"mask_rate": 0.2}, "mask_rate 0.3 there, 0.2 here"),
        ({"top_k": 9}, "top_k 8 there, 9 here"),
        ({"depth": 0.4}, "depth 0.6 there, 0.4 here"),
        ({"closing_token": False}, "closing_token True there, False here"),
        ({"stop": "?"}, r"stop ['\n'] there, ['?'] here"),
        ({"method": "asmi"}, "method 'sem' there, 'asmi' here"),
    ],
    ids=str,
)
def test_another_score_is_refused_by_name(calibration, model, tokenizer, other, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Scorer(model, tokenizer=tokenizer, **SETTINGS | other, calibration=calibration)


def test_what_is_not_said_is_the_reference_s(calibration, model, tokenizer, again):
    inherited = Scorer(model, tokenizer=tokenizer, calibration=calibration)
    assert inherited.config.score_key() == again.config.replace(stop=["\n"]).score_key()
    one = inherited.score(PROMPT, " Brask")
    assert (one.score, one.accept, one.verdict) == (again.score, again.accept, again.verdict)


def test_other_weights_tokenizer_and_model_are_refused_by_name(calibration, model, tokenizer):
    def reason(some_model, some_tokenizer):
        made = Scorer(some_model, tokenizer=some_tokenizer, **SETTINGS, calibration=calibration)
        one = made.score(PROMPT, " Brask")
        assert not one.accept_reason.startswith("No decision") or one.accept is None
        return one.accept_reason

    assert "No decision" not in reason(copy.deepcopy(model), tokenizer)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    assert "weights or their precision differ" in reason(other, tokenizer)
    assert "weights or their" in reason(copy.deepcopy(model).bfloat16(), tokenizer)
    turned = copy.deepcopy(tokenizer)
    turned.chat_template = "{{ messages[0]['content'] }}"
    assert "chat template or end tokens differ" in reason(model, turned)
    longer = copy.deepcopy(model)
    longer.generation_config.eos_token_id = [2, 7]
    assert "chat template or end tokens differ" in reason(longer, tokenizer)
    named = replace(calibration, model="some/model")
    made = Scorer(model, tokenizer=tokenizer, **SETTINGS, calibration=named).score(PROMPT, " Brask")
    one = replace(made, model="another")
    assert "model model there, another here" in one.accept_reason


@pytest.mark.parametrize(
    "missing",
    [
        "method",
        "depth",
        "num_masks",
        "mask_rate",
        "top_k",
        "scope",
        "mask_sampler",
        "prompt_format",
    ],
)
def test_a_reference_that_knows_not_what_it_is_of(calibration, again, missing):
    known = {name: value for name, value in calibration.settings.items() if name != missing}
    one = replace(again, calibration=replace(calibration, settings=known))
    assert one.accept is one.error_probability is None
    assert f"{missing} not recorded there: write a new one with" in one.accept_reason


def test_a_run_that_does_not_know_its_settings(tmp_path):
    saved = runs.content()
    for name in [name for name in saved["stats"] if name.startswith("asmi_settings")]:
        del saved["stats"][name]
    with pytest.raises(ValueError, match="has not saved asmi_settings"):
        Calibration.from_run(runs.save(tmp_path / "run", saved))
    with pytest.raises(
        ValueError, match="expected a manifest, which runs with the callback RunRecord write"
    ):
        Calibration.from_run(runs.save(tmp_path / "bare", about={}))


def test_read_back_sorted_and_formatted(scores, again, calibration):
    content = json.loads(json.dumps(again.to_dict()))
    assert Score.from_dict(content) == replace(again, calibration=None)
    assert Score.from_dict(content | {"row": 3, "mine": 1}, calibration) == again
    assert Score.from_dict(content, calibration).verdict == again.verdict
    assert [*map(float, sorted(scores))] == sorted(map(float, scores))
    assert f"{again:.4f}" == f"{again.score:.4f}"
    assert f"{again}" == repr(again)
    parts = again.with_spans([[1, 4]])
    assert Score.from_dict(json.loads(json.dumps(parts.to_dict()))).offsets == ((1, 4),)
    with pytest.raises(ValueError, match=r"expected what Score\.to_dict returns"):
        Score.from_dict({"score": 1.0})
    with pytest.raises(TypeError):
        again < "text"  # noqa: B015


def test_probability_of_error_has_its_interval(calibration, again):
    ranking = replace(calibration, prr=calibration.prr._replace(low=0.1))
    one = replace(again, calibration=ranking)
    found = one.error_probability_interval
    assert found.value == one.error_probability
    assert 0 <= found.low < found.high <= 1
    assert (
        replace(again, calibration=replace(ranking, prr=-ranking.prr)).error_probability_interval
        is None
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, 'expected "correct" .* got neither: no field'),
        ({"answer": " 7", "label": 1}, "got neither: the fields answer, label"),
        ({"correct": True, "quality": 1}, r"got \['correct', 'quality'\]"),
        ({"correct": "yes"}, "expected correct to be true or false, got 'yes'"),
        ({"quality": "good"}, "quality must be a number"),
        ({"quality": math.nan}, "quality must be a number"),
    ],
)
def test_labels_that_are_none(content, message):
    with pytest.raises(ValueError, match=message):
        is_wrong(content)


def test_scored_lines_may_be_labelled_as_they_are(scored, scorer, calibration, monkeypatch):
    lines = [json.loads(line) for line in scored.read_text().splitlines()][:12]
    missing = []

    def counted(scorer, rows):
        missing.extend(rows)
        return score_rows(scorer, rows)

    monkeypatch.setattr(calibrate, "score_rows", counted)

    def calibrated(rows):
        """The calibration, and how many rows were scored anew."""
        missing.clear()
        found = calibrate_rows(rows, scorer, 0.4, 0.8, resamples=20)
        assert found.n == 12
        return found, len(missing)

    whole, anew = calibrated(lines)
    assert (set(whole.scores) <= set(calibration.scores), anew) == (True, 0)
    plain = {"prompt", "answer", "correct", "cluster", "id"}
    for name, change, expected in (
        ("moved", lambda _, line: line | {"score": 1.1 * line["score"]}, 12),
        ("edited", lambda i, line: line | {"answer": " kites"} if i in (1, 7) else line, 2),
        ("others", lambda i, line: line | {"settings": line["settings"] | {"num_masks": 5 - i % 2}},
         6),
        ("told", lambda i, line: line | {"tokens": None} if i else line, 11),
        ("some", lambda i, line: {k: line[k] for k in plain} if i > 8 else line, 3),
        ("model", lambda _, line: line | {"model": "other"}, 12),
    ):  # fmt: skip
        found, anew = calibrated([change(i, line) for i, line in enumerate(lines)])
        assert anew == expected, name
        if name != "edited":
            assert found.scores == pytest.approx(whole.scores, abs=1e-7), name


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
        (1, {"answer": ""}, "row 2: the answer is empty; empty answers are never accepted"),
        (2, {"cluster": None}, "in all rows or in none"),
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


def test_answers_of_nothing_are_left_out_as_they_are_never_accepted(scorer):
    rows = labelled(12)
    blank = {"prompt": PROMPT, "answer": "\n", "correct": True, "cluster": "blank"}
    seen = []
    found, expected = (
        calibrate_rows(some, scorer, 0.4, 0.8, resamples=20, progress=lambda *at: seen.append(at))
        for some in ([*rows, blank], rows)
    )
    assert found == expected
    assert seen[:13] == [(done, 13) for done in range(1, 14)]
    with pytest.raises(ValueError, match="only empty or blank ones"):
        calibrate_rows([blank], scorer, 0.1)


def as_a_run(place, scores, rows, metrics):
    """What a benchmark would have saved of scored rows."""
    columns = {
        "asmi_mi_d60": "mi", "asmi_agreement_d60": "agreement", "asmi_entropy": "entropy",
        "asmi_log_likelihood": "log_likelihood", "greedy_tokens": "id",
    }  # fmt: skip
    stats = {
        name: [np.array([getattr(token, own) for token in one.tokens]) for one in scores]
        for name, own in columns.items()
    }
    stats |= {
        "input_texts": [row["prompt"] for row in rows],
        "greedy_texts": [one.scored_text for one in scores],
        "asmi_settings_d60": [one.settings for one in scores],
        "asmi_prompt_length": [one.prompt_tokens for one in scores],
    }
    about = runs.manifest(len(rows)) | {
        "rows": {"ids": [row["id"] for row in rows],
                 "clusters": [str(row["cluster"]) for row in rows]},
        "model": {"path": scores[0].model},
    }  # fmt: skip
    config = ASMIConfig(top_k=8, stop=["\n"])
    content = {
        "estimations": {("sequence", str(config)): [float(one) for one in scores]},
        runs.METHODS: runs.described(config),
        "gen_metrics": {("sequence", name): values for name, values in metrics.items()},
        "stats": stats,
        "metrics": {},
        "state": "Initialized",
    }
    return runs.save(place, content, about)


def test_a_run_gives_the_reference_of_its_rows(scores, scorer, calibration, tmp_path):
    rows = labelled()
    silent = scorer.score(PROMPT, "\n")
    rows.append({"prompt": PROMPT, "id": "silent", "cluster": "own", "correct": True})
    right = [float(row["correct"]) for row in rows]
    metrics = {"Rouge_rougeL": [1.0 - one for one in right], "ReferenceInAnswer": right}
    place = as_a_run(tmp_path / "run", [*scores, silent], rows, metrics)
    found = calibrate_run(
        place, scorer, 0.4, 0.8, signal="perplexity", metric="ReferenceInAnswer", resamples=50
    )
    assert found.decision == calibration.decision
    assert found.other_thresholds == calibration.other_thresholds
    assert found.signals == calibration.signals
    assert found.recommendation == calibration.recommendation
    assert found.settings.items() >= scorer.fingerprints().items()
    known = scores[0].compared_settings | scorer.fingerprints()
    assert not found.other_settings(known)
    assert found.other_settings(known | {"prompt_format": "chat"}) == [
        "prompt_format text there, chat here"
    ]
    assert found.settings["answer_ends"] == ["complete"]
    other = calibrate_run(place, scorer, 0.4, 0.8, signal="perplexity", resamples=50)
    assert (other.quality, found.quality) == ("Rouge_rougeL", "ReferenceInAnswer")
    assert other.decision != found.decision
    with pytest.raises(ValueError, match="has no quality metric 'AlignScore', but"):
        calibrate_run(place, scorer, 0.4, metric="AlignScore")
    # The same answers under other masks.
    moved = [replace(one, score=1.1 * float(one)) for one in scores]
    moved_run = as_a_run(tmp_path / "moved", moved, rows[:-1], {"right": right[:-1]})
    with pytest.raises(ValueError, match=r"Cannot reproduce row .*Weights or chat template differ"):
        calibrate_run(moved_run, scorer, 0.4)


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
    assert [key == context_clusters(prompts)[0] for key in context_clusters(prompts)] == (
        [True] * 3 + [False] * 3
    )
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    assert len(set(context_clusters(chats))) == 2
    apart = [f"Question: who was the {word}?" for word in WORDS]
    assert len(set(context_clusters(apart))) == len(WORDS)
    assert len(set(context_clusters(["same"] * 3))) == 1


def test_drift_is_told_without_labels(calibration, scores):
    assert calibration.drifts(scores) == []
    moved = [replace(one, msp=one.msp + 100, prompt_tokens=500) for one in scores]
    found = {drift.name: str(drift) for drift in calibration.drifts(moved)}
    assert set(found) == {"msp", "prompt_tokens"}
    assert found["msp"].startswith("msp differs from the calibration: median")
    assert calibration.drifts(moved[:10]) == []


def test_an_answer_unlike_all_of_the_reference(calibration, again):
    for name, said in (("prompt_tokens", "The number of prompt tokens (900) is outside"),
                       ("msp", "The answer's MSP (900) is outside")):  # fmt: skip
        one = deciding(calibration, replace(again, **{name: 900}), 1e9)
        assert one.accept is True
        assert said in one.accept_reason
        assert one.accept_reason in one.verdict
    reference_range = {
        name: values[3] for name, values in calibration.reference_range.items() if name != "score"
    }
    low = reference_range | {"msp": 0}
    for values, signal, threshold, outside in (
        (reference_range, "perplexity", 1e9, False),
        (low, "msp", 1e9, False),  # more certain than all of them
        (low, "perplexity", 1e9, True),  # perhaps only shorter
        ({"msp": 900}, "perplexity", -1, False),  # nothing to doubt in an abstention
    ):
        known = deciding(calibration, replace(again, **values), threshold, signal)
        assert known.accept is (threshold > 0)
        assert ("is outside" in known.accept_reason) is outside


def test_a_calibration_in_words(calibration, again, monkeypatch):
    decided = deciding(calibration, again, 0.25).calibration
    shown = str(decided)
    assert "accept an answer if its perplexity is at most 0.25 nats.\n" in shown
    assert "with 80% confidence, at most 40% of accepted answers are wrong.\n" in shown
    answers = decided.decision.guarantee.answers
    assert f"Of these {answers} answers, 50% are accepted; 10.0% of the accepted" in shown
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(decided) == shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("command")
    tiny_lm.save(place / "model")
    rows = "".join(json.dumps(row) + "\n" for row in labelled())
    (place / "rows.jsonl").write_text(rows)
    return place


def run(*arguments):
    found = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return found.exit_code, " ".join(found.output.split())


OPTIONS = ("--num-masks", 4, "--mask-rate", 0.3, "--top-k", 8, "--stop", "\\n")


def test_from_rows_to_decisions_by_command(folder):
    model = folder / "model"
    code, said = run("calibrate", folder / "rows.jsonl", "--model", model, "--risk", 0.4,
                     "--confidence", 0.8, "--out", folder / "calibration.json", *OPTIONS,
                     "--figure", folder / "other_thresholds.svg",
                     "--reliability", folder / "reliability.svg")  # fmt: skip
    assert code == 0, said
    found = Calibration.load(folder / "calibration.json")
    assert found.decision.guarantee.threshold is None
    assert f"No threshold {found.decision}." in said
    assert found.recommendation in said
    assert "empty answers" not in said
    assert (folder / "other_thresholds.svg").stat().st_size > 1000
    assert (folder / "reliability.svg").stat().st_size > 1000
    files = ("--calibration", folder / "calibration.json", "--out", folder / "out.jsonl")
    given = ("--model", model, folder / "rows.jsonl")
    code, said = run("score", *given, *OPTIONS, *files)
    assert code == 0, said
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    accepted = [line["accept"] for line in lines]
    again = ("calibrate", folder / "out.jsonl", "--model", model, "--risk", 0.4,
             "--out", folder / "again.json", *OPTIONS)  # fmt: skip
    for options, warned, limit in (
        ((), False, 64),  # of the rows
        (("--max-new-tokens", 7), False, 7),  # of later answers
        (("--seed", 1), True, 64),
    ):
        code, text = run(*again, *options)
        assert (code, "Scored 90 of 90 rows again" in text) == (0, warned), text
        assert Calibration.load(folder / "again.json").config.max_new_tokens == limit
        (folder / "again.json").unlink()
    code, text = run("score", *given, *OPTIONS, "--depth", 0.9, *files[:3], folder / "other.jsonl")
    assert "settings differ" in text
    for answer, name in ((True, "accepted"), (False, "abstained"), (None, "without a decision")):
        number = accepted.count(answer)
        assert (f"{number} {name}" in said) == bool(number)
    limit = found.decision.guarantee.threshold
    if limit is not None:
        values = [line["signals"][found.decision.signal] for line in lines]
        assert accepted == [value <= limit for value in values]
    code, said = run("calibrate", folder / "rows.jsonl", "--model", model, "--risk", 1.4,
                     "--out", folder / "calibration.json")  # fmt: skip
    assert code != 0
    assert "expected risk between 0 and 1 (exclusive), got 1.4" in said
    given = ("--model", model, "--risk", 0.4, "--out", folder / "calibration.json")
    code, said = run("calibrate", folder / "rows.jsonl", *given, *OPTIONS)
    assert code == 1
    assert "calibration.json exists: name another file, or remove it" in said
    (folder / "calibration.json").unlink()
    blank = {"prompt": PROMPT, "answer": "\n", "correct": True, "cluster": "blank"}
    few = "".join(json.dumps(row) + "\n" for row in [*labelled(12), blank])
    (folder / "few.jsonl").write_text(few)
    code, said = run("calibrate", folder / "few.jsonl", *given, *OPTIONS)
    assert code == 0, said
    assert "Left out 1 empty answers: `score` never accepts one." in said
    for own, message in (
        ((folder / "rows.jsonl", "--metric", "TokenF1"), "--metric needs --run"),
        (("--run", folder, "--right-from", 0.3), "--result-cache and --right-from need ROWS"),
    ):
        code, said = run("calibrate", *own, *given)
        assert code == 2
        assert message in said


def test_answers_that_are_all_right_give_a_threshold(scorer, tmp_path):
    rows = [
        {"prompt": f"{PROMPT} {i}", "answer": " Edda Holm", "correct": True, "cluster": str(i)}
        for i in range(40)
    ]
    run = calibrate_rows(rows, scorer, 0.2, resamples=50)
    guarantee = run.decision.guarantee  # 32 tested: .8 to the power of 32 is below .05
    assert (guarantee.coverage, guarantee.error_rate) == (1, 0)
    assert guarantee.threshold == max(run.scores)
    assert "nan" not in str(run)
    run.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json").decision == run.decision
