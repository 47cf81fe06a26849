"""What a calibration says of answers, saved and loaded; and when it says nothing."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from lm_polygraph_asmi.analysis.calibration import Step
from lm_polygraph_asmi.analysis.clusters import wilson_interval
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions import Calibration, Decider
from lm_polygraph_asmi.decisions.calibration import FORMAT, opened
from lm_polygraph_asmi.scoring.signals import SIGNALS, TITLES
from lm_polygraph_asmi.scoring.unmasked import fingerprints
from tests.decisions.conftest import N, limited, ranking
from tests.report import runs
from tests.scoring.conftest import PROMPT
from tests.scoring.test_result import printed


@pytest.fixture(scope="module")
def score(scorer):
    """A score that knows the weights, as `Decider` makes it."""
    found = scorer.score(PROMPT, " Brask")
    return replace(found, settings=found.settings | fingerprints(scorer))


def test_saved_and_loaded(calibration, tmp_path):
    undefined = ranking(calibration, math.nan)
    for one in (calibration, replace(undefined, name="NaNo")):
        one.save(tmp_path / "calibration.json")
        text = (tmp_path / "calibration.json").read_text()
        json.loads(text, parse_constant=pytest.fail)  # NaN is not JSON
        found = Calibration.load(tmp_path / "calibration.json")
        found.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_text() == text
        assert math.isnan(found.prr.low) == math.isnan(one.prr.low)
        assert isinstance(found.error_steps[0], Step)
    calibration.save(tmp_path / "calibration.json")
    assert opened(str(tmp_path / "calibration.json")) == calibration == opened(calibration)
    content = json.loads((tmp_path / "calibration.json").read_text())
    for other in (4, FORMAT + 1):
        (tmp_path / "old.json").write_text(json.dumps(content | {"format": other}))
        with pytest.raises(
            ValueError, match=rf"expected format {FORMAT}, got {other}: make it again: `polygr"
        ):
            Calibration.load(tmp_path / "old.json")


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", "null", "{}", f'{{"format": {FORMAT}}}',
             f'{{"format": {FORMAT}, "signals": {{"a": [1]}}}}'],
)  # fmt: skip
def test_other_json_files(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other.json is not a saved calibration"):
        Calibration.load(tmp_path / "other.json")


def test_what_is_no_calibration_is_refused_with_the_command_that_makes_one(tmp_path):
    run = runs.save(tmp_path / "run")
    (tmp_path / "rows.jsonl").touch()
    wanted = "expected a Calibration or a .json file, got"
    for given, error, message in (
        (run, ValueError, wanted),
        (tmp_path / "rows.jsonl", ValueError, "`polygraph_asmi calibrate ROWS --ri"),
        (tmp_path / "none.json", FileNotFoundError, "No such file"),
        *((given, ValueError, f"{wanted} {str(given)!r}") for given in ("", [run.name], 3)),
    ):
        with pytest.raises(error, match=re.escape(message)):
            opened(given)
        with pytest.raises(error, match=re.escape(message)):  # before a model is loaded
            Decider("no such model", given)


def test_accept(calibration, score):
    for signal, value in score.signals.items():
        one = limited(calibration, value, signal).decide(score)
        assert one.accept is True
        assert one.reason == (
            f"Accept: {TITLES[signal]} {value:.4g} nats is at most {value:.4g}. Risk guarantee: "
            "with 80% confidence, at most 40% of accepted answers are wrong."
        )
        assert (one.signal, one.value, one.threshold) == (signal, value, value)
        other = limited(calibration, np.nextafter(value, -1), signal).decide(score)
        assert other.accept is False
        assert other.reason.startswith(f"Abstain: {TITLES[signal]} {value:.4g} nats is above")
    nothing = limited(calibration, None).decide(score)
    assert nothing.accept is None
    assert nothing.reason.startswith("No threshold by perplexity could be shown to hold.")
    empty = limited(calibration, 1e9).decide(replace(score, answered=False))
    assert (empty.accept, empty.error_probability) == (None, None)
    assert empty.reason == "No decision: the answer is empty."


def test_a_decision_is_json_and_reads_in_words(calibration, score):
    one = ranking(limited(calibration, 1e9)).decide(score)
    content = json.loads(json.dumps(one.to_dict(), allow_nan=False))
    assert (content["accept"], content["unit"]) == (True, "nats")
    for sentence in one.sentences:
        assert sentence in " ".join(printed(one, width=500).split())
    assert repr(one) == f"Decision(accept, perplexity {one.value:.4g} nats, answer=' Brask')"


def test_the_probability_is_of_the_deciding_signal(calibration, score):
    for signal in score.signals:
        known = limited(calibration, 1e9, signal)
        one = ranking(known).decide(score)
        value = score.signals[signal]
        step = next((s for s in reversed(known.error_steps) if s.start <= value),
                    known.error_steps[0])  # fmt: skip
        overall = known.errors / known.n
        assert one.error_probability == pytest.approx((step.errors + overall) / (step.n + 1))
        assert one.error_interval == wilson_interval(step.errors, step.n)[1:]
    for errors, shown in ((0, "0.000"), (30, "1.000")):
        steps = [Step(0.0, 9000, 300 * errors), Step(1e6, 30, errors)]
        certain = ranking(replace(limited(calibration, 1e9), error_steps=steps))
        assert (
            f"Probability of error, by perplexity: {shown} [" in certain.decide(score).sentences[1]
        )


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.9), (-0.9, -0.1), (math.nan, math.nan)])
def test_a_signal_that_does_not_rank_gives_no_probability(calibration, score, low, high):
    """Its threshold is valid all the same."""
    own = calibration.signals["perplexity"]
    signals = {"perplexity": own._replace(prr=own.prr._replace(low=low, high=high))}
    one = replace(limited(calibration, 1e9), signals=signals).decide(score)
    assert (one.accept, one.error_probability, one.error_interval) == (True, None, None)
    assert len(one.sentences) == 1 + len(one.warnings)


MASKED = ["method", "depth", "num_masks", "mask_rate", "top_k", "scope", "mask_sampler", "seed",
          "seeded_by"]  # fmt: skip
OTHER = {
    "method": "asmi", "depth": 0.9, "layer": 5, "num_masks": 9, "mask_rate": 0.2, "top_k": 9,
    "mask_sampler": "balanced", "scope": "response", "aggregation": "sum",
    "closing_token": False, "stop": ["?"], "prompt_format": "chat",
    "seed": 3, "seeded_by": "prompt", "attention_in_use": "flex", "weights": "0", "tokenizer": "0",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("signal", ["sem", "msp"])
def test_settings_that_the_signal_depends_on(calibration, score, name, signal):
    """Masks change no log-probability: of a decision by MSP, their settings do not count."""
    known = limited(calibration, 1e9, signal)
    one = known.decide(replace(score, settings=score.settings | {name: OTHER[name]}))
    masks = name in (*MASKED, "layer", "aggregation")
    if masks and not SIGNALS[signal].masked:
        assert one.accept is True
        return
    assert (one.accept, one.error_probability) == (None, None)
    hashed = {"weights": "weights or their precision differ", "tokenizer": "chat template or end"}
    assert hashed.get(name, f"{name} {known.settings[name]!r} there, ") in one.reason


@pytest.mark.parametrize("missing", [*MASKED, "prompt_format"])
def test_a_calibration_that_knows_not_what_it_is_of(calibration, score, missing):
    known = {name: value for name, value in calibration.settings.items() if name != missing}
    one = replace(limited(calibration, 1e9, "sem"), settings=known).decide(score)
    assert (one.accept, one.error_probability) == (None, None)
    assert f"{missing} not recorded there: make it again" in one.reason


def test_another_model_and_unknown_weights(calibration, score, scorer):
    known = replace(limited(calibration, 1e9), model="some/model")
    other = known.decide(replace(score, model="another")).reason
    assert "model 'model' there, 'another' here" in other
    assert known.decide(replace(score, model="elsewhere/model")).accept is True
    plain = limited(calibration, 1e9).decide(scorer.score(PROMPT, " Brask"))
    assert plain.accept is None
    assert "weights not recorded here: use `decide`; tokenizer not recorded here" in plain.reason


def test_an_answer_unlike_all_of_the_calibration(calibration, score):
    longer = replace(score, prompt_tokens=900)
    said = "The prompt has 900 tokens, the calibration's 1"
    assert any(said in w for w in limited(calibration, 1e9).decide(longer).warnings)
    for threshold in (-1, None):  # nothing to doubt in an abstention
        assert not any(said in w for w in limited(calibration, threshold).decide(longer).warnings)


def test_three_lines_say_what_counts(calibration, monkeypatch):
    wrong, decided = f"{calibration.errors} wrong", limited(calibration, 0.25)
    promise, labels, accepts = decided.promise()
    assert promise == "Promise: with 80% confidence, at most 40% of accepted answers are wrong."
    assert labels.startswith(f"Labels: {N} answers from {N // 2} clusters, {wrong} by their labels")
    assert labels.endswith("; 20% of the clusters made choices, the others test.")
    start = "Accepts: 50% of such answers, those whose perplexity is at most 0.25 nats."
    assert accepts == start
    shown = str(decided)
    assert " ".join(shown.split()).startswith(f"{promise} {labels} {accepts} signal")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(decided) == shown
    strict = replace(decided.guarantee, threshold=None, risk=0.1, base_rate=0.28, clusters=30)
    promise, _, accepts = replace(decided, guarantee=strict).promise()
    assert promise.startswith(
        "Promise: none. No threshold by perplexity could be shown to hold: with"
    )
    assert accepts.startswith("Accepts: nothing. Even without an error, at least ")
    assert accepts.endswith("28% of all answers are wrong, so any score must reject at least 20%.")


def test_every_setting_that_changes_a_score_is_compared(calibration):
    """A new setting is compared, or it is listed here as one that changes no score."""
    of_answers_and_machines = {
        "max_new_tokens",
        "attention",
        "memory_budget",
        "structure",
        "compile",
    }
    of_controls = {"perturbation", "perturbation_scale"}
    known = replace(
        calibration, signal="adapt", settings=calibration.settings | {"method": "adapt"}
    )
    compared = set(known._key(known.config.to_dict()))
    assert compared >= set(ASMIConfig.names()) - of_answers_and_machines - of_controls
    with pytest.raises(ValueError, match="max_new_tokens 64 there, 5 here"):  # of the samples
        known.configured({"max_new_tokens": 5})


def test_settings_left_out_are_the_calibrations(calibration):
    own = calibration.config
    assert calibration.configured({"num_masks": None, "mask_rate": None}) == own
    assert calibration.configured({"max_new_tokens": 5}).max_new_tokens == 5
    masked = replace(calibration, signal="sem")
    for setting, said in (({"scope": "response"}, "scope 'all' there, 'response' here"),
                          ({"num_masks": 5}, "num_masks 4 there, 5 here"),
                          ({"seed": 3}, "seed 0 there, 3 here"),
                          ({"seeded_by": "prompt"}, "seeded_by 'answer' there, 'prompt' here"),
                          ({"method": "asmi"}, "method 'sem' there, 'asmi' here")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(said)):
            masked.configured(setting)
        assert calibration.configured(setting) == own.replace(**setting)
    for setting in ({"stop": None}, {"stop": "x"}, {"closing_token": False}):
        with pytest.raises(ValueError, match="settings differ from the calibration labelled answ"):
            calibration.configured(setting)
    with pytest.raises(TypeError, match="unknown setting depht; did you mean depth"):
        calibration.configured({"depht": 0.5})
