"""What a calibration says of answers, saved and loaded; and when it says nothing."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions import Calibration, Decider
from lm_polygraph_asmi.decisions.calibration import FORMAT
from lm_polygraph_asmi.decisions.decision import EMPTY
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
    file, ranks = tmp_path / "c.json", calibration.signals["MSP"]
    unknown = ranks._replace(prr=ranks.prr._replace(low=math.nan, high=0.0))
    for one in (calibration, replace(calibration, signals={"MSP": unknown})):
        one.save(file)
        json.loads(file.read_text(), parse_constant=pytest.fail)  # NaN is not JSON
        assert repr(Calibration.load(file)) == repr(one)
        assert "nan" not in str(one)


HEAD = f'{{"format": {FORMAT}'
NO_CALIBRATION = ("{", "[]", "3", "null", "{}", HEAD + "}", HEAD + ', "signals": 3}')


def test_what_is_no_calibration_is_refused_before_a_model_is_loaded(calibration, tmp_path):
    path, run = tmp_path / "c.json", runs.save(tmp_path / "run")
    for text, words in (
        ('{"format": 4}', f"expected format {FORMAT}, got 4"),
        *((text, "c.json") for text in NO_CALIBRATION),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            Decider("no such model", path)
    for call, error, words in (
        (partial(Calibration.load, run), ValueError, "`polygraph_asmi calibrate ROWS"),
        (partial(Calibration.load, tmp_path / "none.json"), FileNotFoundError, "none.json"),
        (partial(replace, calibration, signal="magic"), ValueError, "magic"),
    ):
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("signal", ["asmi", "sem", "msp", "perplexity", "entropy"])
def test_accept(calibration, score, signal):
    """Up to the threshold; why, by the title of the signal and its number."""
    value, title = score.signals[signal], SIGNALS[signal].title
    for threshold, accept, words in (
        (value, True, f"Accept: {title} {value:.4g} nats is at most {value:.4g}. Risk guarantee: "),
        (np.nextafter(value, -1), False, f"Abstain: {title} {value:.4g} nats is above"),
        (None, None, f"No threshold by {title}"),
    ):
        one = limited(calibration, threshold, signal).decide(score)
        promised = calibration.guarantee.promise in one.reason
        found = one.accept, one.signal, one.value, one.threshold, promised
        assert found == (accept, signal, value, threshold, accept is True)
        assert one.reason.startswith(words)
    empty = limited(calibration, 1e9).decide(replace(score, answered=False))
    assert (empty.accept, empty.reason) == (None, EMPTY)


def test_prompts_that_are_unlike_all_that_were_labelled(calibration, score):
    """In an abstention there is nothing to doubt."""
    low, *_, high = calibration.prompt_tokens
    for tokens, threshold in product((low - 1, low, high, high + 1), (1e9, -1, None)):
        answer = replace(score, prompt_tokens=int(tokens))
        unlike = threshold == 1e9 and not low <= tokens <= high
        assert bool(limited(calibration, threshold).decide(answer).warnings) == unlike


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
    for name, value in OTHER.items():
        one = known.decide(replace(score, settings=score.settings | {name: value}))
        counts = SIGNALS[signal].masked or name not in (*MASKED, "layer", "aggregation")
        assert (one.accept, name in one.reason) == (None if counts else True, counts), name
    for name in (*(MASKED if signal == "sem" else ()), "prompt_format"):
        unknown = {key: value for key, value in known.settings.items() if key != name}
        one = replace(known, settings=unknown).decide(score)
        assert (one.accept, f"{name} not recorded there" in one.reason) == (None, True)


def test_another_model_and_unknown_weights(calibration, score):
    """Its name counts only where hashes are unknown, and of it the last part."""
    known = replace(limited(calibration, 1e9), model="some/model")
    unhashed, own = without_hashes(known), without_hashes(score)
    for one, answer, words in (
        (known, replace(score, model="renamed"), None),
        (unhashed, replace(own, model="elsewhere/model"), None),
        (unhashed, replace(own, model=""), None),
        (replace(unhashed, model=""), own, None),
        (unhashed, replace(own, model="another"), "model 'model' there, 'another' here"),
        (known, own, "weights not recorded here: use `decide`; tokenizer not recorded here"),
    ):
        found = one.decide(answer)
        assert (found.accept, (words or "") in found.reason) == (None if words else True, True)


def test_what_is_printed(calibration):
    """The promise with its largest cluster, what it is made of, and what was seen."""
    rule = replace(limited(calibration, 0.25).guarantee, clusters=49)
    decided = replace(limited(calibration, 0.25), left_out="2 empty", guarantee=rule)
    strict = replace(
        rule, threshold=None, risk=0.1, base_rate=0.28, clusters=50, tested=9, signals=2
    )  # fmt: skip
    for one, *expected in (
        (decided, "Guarantee: .*80% .* 40% of .* 2 new answers",
         rf"Labels: {N} .* 49 clusters, {calibration.errors} .* 2 e",
         "Accepts: 50% of such .* 0.25 nats.* 10% are wrong. Try no other risk",
         "Warning: fewer than 50"),
        (replace(decided, guarantee=strict), "Guarantee: none", "Labels: .* 50 clusters",
         "Accepts: nothing. Even .* at least 22 .*; 9 do.* at least 20%"),  # .9**22 < .1
    ):  # fmt: skip
        for line, words in zip(one.promise(), expected, strict=True):
            assert re.match(words, line), line
    for name, ranks in decided.signals.items():
        assert re.search(rf"^{name} +PRR -?{ranks.prr.value:.2f} \[.*AUROC", str(decided), re.M)


def test_a_file_that_was_changed_by_hand(calibration, tmp_path):
    """Any field of it, or what is inside of one."""
    path = tmp_path / "c.json"
    limited(calibration, 0.25, "learned").save(path)
    content = json.loads(path.read_text())
    for name, value in (
        *dict.fromkeys(content.keys() - {"format", "digest"}, 0.26).items(),
        *((name, content[name] | {"threshold": 0.26}) for name in ("guarantee", "settings")),
        ("learned", content["learned"] | {"weights": {"free": [0.1] * 10 + [0.26]}}),
        ("prompt_tokens", [*content["prompt_tokens"], 99.0]),
    ):
        path.write_text(json.dumps(content | {name: value}))
        with pytest.raises(ValueError, match="changed by hand"):
            Calibration.load(path)
    path.write_text(json.dumps(content, indent=4, sort_keys=True))
    assert Calibration.load(path).guarantee.threshold == 0.25  # only laid out anew


def test_every_setting_that_changes_a_score_is_compared(calibration):
    """A new setting is compared, or it is listed here as one that changes no score."""
    others = {"max_new_tokens", "attention", "memory_budget", "structure", "compile"}
    settings = calibration.settings | {"method": "adapt", "samples": "drawn"}
    known = replace(calibration, signal="adapt", settings=settings)
    assert set(known._key(known.config.to_dict())) >= set(ASMIConfig.names()) - others
    assert "samples 'drawn' there, 'passed' here" in known.differences(
        known.settings | {"samples": "passed"}
    )


@pytest.mark.parametrize(
    ("name", "value", "refused_by"),
    [
        ("num_masks", None, ()), ("mask_rate", None, ()), ("max_new_tokens", 5, ("adapt",)),
        ("scope", "response", ("sem", "adapt")), ("method", "asmi", ("sem", "adapt")),
        *((name, value, ("perplexity", "sem", "adapt"))
          for name, value in (("stop", None), ("stop", "x"), ("closing_token", False))),
    ],
)  # fmt: skip
def test_settings_left_out_are_the_calibrations(calibration, name, value, refused_by):
    """Those on which a signal depends are no others; those of the samples are of Adapt-ASMI's."""
    for signal in ("perplexity", "sem", "adapt"):
        known = replace(calibration, signal=signal)
        if signal in refused_by:
            with pytest.raises(ValueError, match=f"{name} .* there, .* here"):
                known.configured({name: value})
        else:
            expected = known.config if value is None else known.config.replace(**{name: value})
            assert known.configured({name: value}) == expected
    with pytest.raises(TypeError, match="depht"):
        calibration.configured({"depht": 0.5})
