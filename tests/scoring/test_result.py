"""What a score says, what it does not, and how its numbers follow from its tokens.

`tests/test_algorithm.py` compares the numbers of the tokens with the formulas.
"""

import io
import json
import math
import re
from dataclasses import asdict, replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from rich.console import Console

from lm_polygraph_asmi.config import AGGREGATIONS, METHODS
from lm_polygraph_asmi.scoring import Score, Scorer, UnmaskedAnswer
from lm_polygraph_asmi.scoring.result import tokens_of
from lm_polygraph_asmi.scoring.signals import SIGNALS
from tests.scoring.conftest import PROMPT

MASKS, TOP_K = 9, 6
ANSWER = " in Brask\n 1931"
SAMPLES = [" in Brask", " the ferry", " 1931"]
METHOD_AND_AGGREGATION = [(method, how) for method in METHODS for how in AGGREGATIONS]


@pytest.fixture(scope="module")
def scored(model, tokenizer):
    settings = {"num_masks": MASKS, "mask_rate": 0.4, "top_k": TOP_K, "tokenizer": tokenizer}
    return {
        (method, how): Scorer(model, method=method, aggregation=how, **settings).score(
            PROMPT, ANSWER, SAMPLES if method == "adapt" else None
        )
        for method, how in METHOD_AND_AGGREGATION
    }


@pytest.fixture(scope="module")
def found(scored):
    return scored["sem", "mean"]


@pytest.mark.parametrize(("method", "how"), METHOD_AND_AGGREGATION)
def test_what_is_said_of_a_score(scored, method, how):
    """Its name, its number between its bounds, all free signals, and what it cannot say."""
    one, tokens = scored[method, how], len(scored[method, how].tokens)
    assert one.label == METHODS[method] + (f" (aggregation={how})" if how != "mean" else "")
    assert one.highest == pytest.approx(math.log(MASKS) * (tokens if how == "sum" else 1))
    assert replace(one, counted=1).highest == math.log(MASKS)
    assert one.explanation[0].startswith(
        f"{one.label}: {one.score:.4f} nats (0 to {one.highest:.2f}"
    )
    of = {"mean": "mean", "sum": "sum", "max": "maximum"}[how]
    assert one.explanation[0].endswith(f"the {of} over {tokens} tokens.")
    assert replace(one, counted=1).explanation[0].endswith(f"the {of} over 1 token.")
    free = [f"{SIGNALS[n].title} {one.signals[n]:.4g}" for n in ("msp", "perplexity", "entropy")]
    assert [text in one.explanation[1] for text in free] == [True] * 3
    assert "no common scale" in one.explanation[-2]
    assert (f"{one}".splitlines(), f"{one:.3f}") == (one.explanation, f"{one.score:.3f}")
    assert f"{one.label} {one.score:.4f} nats, answer={ANSWER!r}" in repr(one)


@pytest.mark.parametrize(("method", "how"), METHOD_AND_AGGREGATION)
def test_a_score_comes_back_from_json(scored, method, how):
    one = scored[method, how]
    content = json.loads(json.dumps(one.to_dict(), allow_nan=False))
    assert Score.from_dict(content) == one
    assert one.to_df().to_dict("records") == content["tokens"] == list(map(asdict, one.tokens))
    assert (content["explanation"], content["highest"]) == (one.explanation, one.highest)
    assert (one.config.method, one.config.aggregation) == (method, how)
    for damaged in ({}, content | {"tokens": [{}]}, content | {"tokens": [7]}):
        with pytest.raises(ValueError, match=r"Score\.to_dict"):
            Score.from_dict(damaged)


@pytest.mark.parametrize(("method", "how"), METHOD_AND_AGGREGATION)
def test_numbers_follow_from_the_tokens(scored, method, how):
    """Those of a score, and the signals of all methods, over the counted tokens."""
    one = scored[method, how]
    for counted in (2, one.counted):
        tokens = one.to_df()[:counted]
        expected = {
            "asmi": tokens.mi.agg(how),
            "sem": (tokens.mi * (1 - tokens.agreement)).agg(how),
            "msp": -tokens.log_likelihood.sum(),
            "perplexity": -tokens.log_likelihood.mean(),
            "entropy": tokens.entropy.mean(),
        } | {method: one.score}
        assert replace(one, counted=counted).signals == pytest.approx(expected)
    alpha = {"asmi": 0, "sem": 1, "adapt": one.gate}[method]
    assert tokens.u.tolist() == pytest.approx(tokens.mi * (1 - alpha * tokens.agreement))
    assert one.score == pytest.approx(tokens.u.agg(how))
    assert (one.gate is None) == (method != "adapt")


SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}
TEMPLATE = {"tools": [{"name": "find"}], "documents": [{"text": "Brask"}]}
COMPARED = [
    ({"prompt": [SYSTEM, USER | {"content": "Who?"}], "answer": "x", "ids": (5,)}, True),
    ({"prompt": [SYSTEM | {"content": "Be long."}, USER]}, False),
    ({"prompt": PROMPT}, False),
    ({"model": "other"}, False),
    ({"settings": {"template": TEMPLATE | {"documents": [{"text": "Orla"}]}}}, True),
    ({"settings": {"template": TEMPLATE | {"documents": []}}}, False),
    ({"settings": {"template": {"documents": []}}}, False),
    ({"settings": {"depth": 0.9}}, False),
    ({"content_end": 0}, True),
    ({"content_end": 999}, False),  # cut off
    ({"content_end": 999, "settings": {"closing_token": False}}, False),
]


@pytest.mark.parametrize(("change", "same"), COMPARED)
def test_what_answers_share_that_are_compared(found, change, same):
    """Each has its question and documents; tools, system messages and the kind of end are not."""
    one = replace(found, prompt=[SYSTEM, USER], settings=found.settings | {"template": TEMPLATE})
    other = replace(one, **change | {"settings": one.settings | change.get("settings", {})})
    assert (other.compared_settings == one.compared_settings) == same


CHANGED = {
    "prompt": "Who?", "answer": " Brask", "settings": {}, "model": "other", "score": 1e-6,
    "msp": 0.0, "signals": {}, "ids": [5], "counted": 1, "scored_text": "x", "content_end": 1,
    "answered": False, "prompt_tokens": 2, "digest": "",
}  # fmt: skip


def test_a_row_that_was_changed_is_no_answer(found):
    """Numbers may lose what is beyond seven decimals in other programs."""
    row = replace(found, score=3e-9).to_dict()
    assert UnmaskedAnswer.of_row(row | {"score": 4e-9}).signals == row["signals"]
    signals = [("signals", row["signals"] | {name: 0.001}) for name in row["signals"]]
    for name, value in (*CHANGED.items(), *signals):
        assert UnmaskedAnswer.of_row(row | {name: value}) is None, name


def test_an_alternative_may_be_the_vocabularys_first_token(tokenizer):
    columns = dict.fromkeys(("mi", "agreement", "entropy", "log_likelihood"), torch.ones(1))
    stats = Mock(**columns, tokens=torch.tensor([5]), top_token=np.zeros((4, 1), int))
    (token,) = tokens_of(stats, "a", [(0, 1)], 0, tokenizer)
    assert (token.alternative, token.alternative_share) == (tokenizer.decode([0]), 1)


def printed(one, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(one)
    return console.file.getvalue()


def test_in_a_terminal(found):
    """The most fragile tokens, by u and not by MI; nothing of an answer is markup."""
    odd = {"text": "[red]x[/red]", "alternative": "[/bold]"}
    tokens = [replace(found.tokens[0], **odd, u=float(u), mi=1 / (u + 1)) for u in range(9)]
    plain = printed(replace(found, tokens=tuple(tokens), warnings=("[/odd] warning",)))
    shown = {"Brask⏎ 1931", "no common scale", "[/odd] warning", *odd.values()}
    assert {text for text in shown if text not in plain} == set()
    assert re.findall(r"(\d\.0000)", plain) == [f"{u}.0000" for u in (8, 7, 6, 5, 4)]


@pytest.mark.parametrize(
    ("u", "shade", "bar"),
    [(-1e-9, 0, " "), (0.0, 0, " "), (0.001, 0.1, "▁"), (0.01, math.sqrt(0.1), "▃"),
     (0.05, math.sqrt(0.5), "▆"), (0.1, 1, "█"), (2.0, 1, "█")],
)  # fmt: skip
def test_bars_follow_the_shade(found, u, shade, bar):
    token = replace(found.tokens[0], u=u)
    assert (token.shade, token.bar) == (pytest.approx(shade), bar)
