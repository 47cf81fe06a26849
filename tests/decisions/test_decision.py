"""A decision is JSON, reads in words, and is a card on a page."""

import json
from dataclasses import replace

from tests.decisions.conftest import limited
from tests.scoring.conftest import PROMPT
from tests.scoring.test_result import printed


def test_a_decision_is_json_and_reads_in_words(calibration, scorer):
    score = replace(scorer.score(PROMPT, " Brask"), prompt_tokens=900)
    plain = {n: v for n, v in calibration.settings.items() if n not in ("weights", "tokenizer")}
    calibration = replace(calibration, settings=plain)
    one = limited(calibration, 1e9).decide(score)
    content = json.loads(json.dumps(one.to_dict(), allow_nan=False))
    assert (content["accept"], content["unit"]) == (True, "nats")
    assert content["score"] == json.loads(json.dumps(score.to_dict()))
    assert str(one).splitlines() == [" Brask" + score.ending.replace("\n", "⏎"), *one.sentences]
    assert printed(one, width=500).splitlines() == str(one).splitlines()
    assert repr(one) == f"Decision(accept, perplexity {one.value:.4g} nats, answer=' Brask')"
    said = "The prompt has 900 tokens, the calibration's 1"  # unlike all that were labelled
    assert one.sentences[1].startswith(said)
    for threshold in (-1, None):  # nothing to doubt in an abstention
        assert said not in str(limited(calibration, threshold).decide(score))
    heading = f"Accept: perplexity {one.value:.4g} nats"
    assert (one.card.heading, one.card.short, one.card.rank) == (heading, "accept", -one.value)
    for page in (one.to_html("Decided"), one._repr_html_()):
        assert heading in page
