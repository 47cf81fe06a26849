"""What a calibration says of answers, saved and loaded; and when it says nothing."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions import Calibration, Decider
from lm_polygraph_asmi.decisions.calibration import FORMAT
from lm_polygraph_asmi.scoring.signals import SIGNALS
from tests.decisions.conftest import N, limited, without_hashes
from tests.report import runs
from tests.scoring.conftest import PROMPT


@pytest.fixture(scope="module")
def score(scorer):
    """A score that knows the weights, as `Decider` makes it."""
    found = scorer.score(PROMPT, " Brask")
    return replace(found, settings=found.settings | scorer.fingerprints())


def test_saved_and_loaded(calibration, tmp_path):
    """Also with an interval that is undefined, which JSON has no number for, or ends at 0."""
    prr, file = calibration.signals["MSP"].prr, tmp_path / "c.json"
    unknown = prr._replace(low=math.nan, high=0.0)
    ranks = {"MSP": calibration.signals["MSP"]._replace(prr=unknown)}
    for one in (replace(calibration, signals=ranks), calibration):
        one.save(file)
        text = file.read_text()
        json.loads(text, parse_constant=pytest.fail)  # NaN is not JSON
        found = Calibration.load(file)
        found.save(tmp_path / "again.json")
        assert (tmp_path / "again.json").read_text() == text
        assert math.isnan(found.signals["MSP"].prr.low) == (one is not calibration)
        assert found.signals["MSP"].prr.high == one.signals["MSP"].prr.high
    assert found == calibration


OTHER_FORMAT = rf"expected format {FORMAT}, got 4: make it again: `polygraph_asmi calibrate"
NONE, RUN = "is not a saved calibration", "expected a Calibration or a .json file, got"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        *(("c.json", text, NONE) for text in ("{", "[]", "3", "null", "{}")),
        *(("c.json", f'{{"format": {FORMAT}{more}}}', NONE) for more in ("", ', "signals": 3')),
        ("c.json", '{"format": 4}', OTHER_FORMAT),
        ("rows.jsonl", "", "`polygraph_asmi calibrate ROWS --risk"), ("rows.jsonl", "", RUN),
    ],
)  # fmt: skip
def test_what_is_no_calibration_is_refused_before_a_model_is_loaded(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        Decider("no such model", tmp_path / name)
    with pytest.raises(ValueError, match=RUN):
        Calibration.load(runs.save(tmp_path / "run"))
    with pytest.raises(FileNotFoundError, match="No such file"):
        Calibration.load(tmp_path / "none.json")


def test_accept(calibration, score):
    for signal, value in score.signals.items():
        one = limited(calibration, value, signal).decide(score)
        assert one.accept is True
        assert one.reason.startswith(f"Accept: {SIGNALS[signal].title} {value:.4g} nats is at most")
        assert calibration.guarantee.promise in one.reason
        assert (one.signal, one.value, one.threshold) == (signal, value, value)
        other = limited(calibration, np.nextafter(value, -1), signal).decide(score)
        assert other.accept is False
        assert other.reason.startswith(
            f"Abstain: {SIGNALS[signal].title} {value:.4g} nats is above"
        )
    nothing = limited(calibration, None).decide(score)
    assert nothing.accept is None
    assert nothing.reason.startswith("No threshold by perplexity could be shown to hold.")
    empty = limited(calibration, 1e9).decide(replace(score, answered=False))
    assert (empty.accept, empty.reason) == (None, "No decision: the answer is empty.")


MASKED = ("method", "depth", "num_masks", "mask_rate", "top_k", "scope", "mask_sampler", "seed",
          "seeded_by")  # fmt: skip
OTHER = {
    "method": "asmi", "depth": 0.9, "layer": 5, "num_masks": 9, "mask_rate": 0.2, "top_k": 9,
    "mask_sampler": "balanced", "scope": "response", "aggregation": "sum",
    "closing_token": False, "stop": ["?"], "prompt_format": "chat",
    "seed": 3, "seeded_by": "prompt", "attention_in_use": "flex", "weights": "0", "tokenizer": "0",
}  # fmt: skip


@pytest.mark.parametrize("signal", ["sem", "msp"])
def test_settings_that_the_signal_depends_on(calibration, score, signal):
    """Masks change no log-probability: of a decision by MSP, their settings do not count."""
    known = limited(calibration, 1e9, signal)
    hashed = {"weights": "weights or their precision differ", "tokenizer": "chat template or end"}
    for name, value in OTHER.items():
        one = known.decide(replace(score, settings=score.settings | {name: value}))
        if name in (*MASKED, "layer", "aggregation") and not SIGNALS[signal].masked:
            assert one.accept is True, name
        else:
            assert one.accept is None, name
            said = hashed.get(name, f"{name} {known.settings[name]!r} there, {value!r} here")
            assert said in one.reason
    for name in (*(MASKED if signal == "sem" else ()), "prompt_format"):
        unknown = {key: value for key, value in known.settings.items() if key != name}
        one = replace(known, settings=unknown).decide(score)
        assert one.accept is None
        assert f"{name} not recorded there: make it again" in one.reason


def test_another_model_and_unknown_weights(calibration, score):
    known = replace(limited(calibration, 1e9), model="some/model")
    assert known.decide(replace(score, model="renamed")).accept is True  # its hashes are equal
    unhashed, own = without_hashes(known), without_hashes(score)
    other = unhashed.decide(replace(own, model="another")).reason
    assert "model 'model' there, 'another' here" in other
    assert unhashed.decide(replace(own, model="elsewhere/model")).accept is True
    plain = known.decide(without_hashes(score))
    assert plain.accept is None
    assert "weights not recorded here: use `decide`; tokenizer not recorded here" in plain.reason


def test_what_is_printed(calibration):
    """The promise with its largest cluster, what it is made of, and what was seen."""
    decided = replace(limited(calibration, 0.25), left_out="2 empty")
    promise, labels, accepts, *few = decided.promise()
    for words in ("80% confidence", "at most 40% of", "if no cluster has more than 2 answers"):
        assert words in promise
    assert f"{N} answers from {N // 2} clusters, {calibration.errors} wrong" in labels
    assert labels.endswith("Rows left out: 2 empty.")
    for words in ("50% of such answers", "0.25 nats", "Of those with a label, 10% are wrong"):
        assert words in accepts
    for clusters, warned in ((49, 1), (50, 0)):
        rule = replace(decided.guarantee, clusters=clusters)
        few = list(replace(decided, guarantee=rule).promise())[3:]
        assert [line.startswith("Warning: fewer than 50 clusters") for line in few] == [
            True
        ] * warned
    for name, ranks in decided.signals.items():
        assert re.search(rf"^{name} +PRR -?{ranks.prr.value:.2f} \[.*AUROC", str(decided), re.M)
    strict = replace(decided.guarantee, threshold=None, risk=0.1, base_rate=0.28, clusters=30)
    promise, _, accepts, _ = replace(decided, guarantee=strict).promise()
    assert promise.startswith("Promise: none")
    assert accepts.startswith("Accepts: nothing")
    assert "any score must reject at least 20%" in accepts


def test_a_file_that_was_changed_by_hand(calibration, tmp_path):
    """Any value of it, drawn: numbers, texts, lists and those inside of others."""
    limited(calibration, 0.25, "learned").save(tmp_path / "c.json")
    text = (tmp_path / "c.json").read_text()

    def places(value, path=()):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for name, part in parts:
            inner = isinstance(part, dict | list) and part
            yield from places(part, (*path, name)) if inner else [(*path, name)]

    every = [path for path in places(json.loads(text)) if path[0] not in ("format", "digest")]
    drawn = np.random.default_rng(0).permutation(len(every))[:40]
    chosen = [every[at] for at in drawn]
    for path in [
        ("guarantee", "threshold"),
        ("guarantee", "risk"),
        ("guarantee", "largest"),
        *chosen,
    ]:
        content = json.loads(text)
        *outer, last = path
        place = content
        for name in outer:
            place = place[name]
        place[last] = 0.26 if place[last] != 0.26 else 0.27
        (tmp_path / "d.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match="changed by hand"):
            Calibration.load(tmp_path / "d.json")
    (tmp_path / "d.json").write_text(json.dumps(json.loads(text), indent=4, sort_keys=True))
    assert Calibration.load(tmp_path / "d.json").guarantee.threshold == 0.25  # only laid out anew


def test_every_setting_that_changes_a_score_is_compared(calibration):
    """A new setting is compared, or it is listed here as one that changes no score."""
    others = {"max_new_tokens", "attention", "memory_budget", "structure", "compile"}
    settings = calibration.settings | {"method": "adapt"}
    known = replace(calibration, signal="adapt", settings=settings)
    compared = set(known._key(known.config.to_dict()))
    assert compared >= set(ASMIConfig.names()) - others
    with pytest.raises(ValueError, match="max_new_tokens 3 there, 5 here"):  # of the samples
        known.configured({"max_new_tokens": 5})
    drawn = replace(known, settings=settings | {"samples": "drawn"})
    said = drawn.differences(drawn.settings | {"samples": "passed"})
    assert "samples 'drawn' there, 'passed' here" in said


def test_settings_left_out_are_the_calibrations(calibration):
    own = calibration.config
    assert calibration.configured({"num_masks": None, "mask_rate": None}) == own
    assert calibration.configured({"max_new_tokens": 5}).max_new_tokens == 5
    masked = replace(calibration, signal="sem")
    for setting, said in (({"scope": "response"}, "scope 'all' there, 'response' here"),
                          ({"method": "asmi"}, "method 'sem' there, 'asmi' here")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(said)):
            masked.configured(setting)
        assert calibration.configured(setting) == own.replace(**setting)
    for setting in ({"stop": None}, {"stop": "x"}, {"closing_token": False}):
        with pytest.raises(
            ValueError, match="parameters differ from the calibration labelled answ"
        ):
            calibration.configured(setting)
    with pytest.raises(TypeError, match=r"unknown setting depht \(did you mean depth"):
        calibration.configured({"depht": 0.5})
