"""What a score says, what it does not, and how its number follows from its tokens."""

import io
import json
import math
from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from lm_polygraph_asmi import score
from lm_polygraph_asmi.config import AGGREGATIONS, METHODS
from lm_polygraph_asmi.core.maths.masks import example_seed, sample_head_masks
from lm_polygraph_asmi.scoring import Score
from lm_polygraph_asmi.scoring.result import tokens_of
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.signals import SIGNALS
from tests import brute_force
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


@pytest.fixture(scope="module")
def slow(model, tokenizer, found):
    """MI_t and A_t of the answer: a full pass per mask, then loops."""
    used, prompt = found.settings, tokenizer(PROMPT)["input_ids"]
    every = [*prompt, *found.ids]
    seed = example_seed(used["seed"], [used["layer"], *every])
    drawn = (used[name] for name in ("num_masks", "num_heads", "mask_rate"))
    masks = sample_head_masks(*drawn, torch.Generator().manual_seed(seed), used["mask_sampler"])
    log_probs = brute_force.subnetwork_log_probs(
        model, f"model.layers.{used['layer']}.self_attn.o_proj", 1, torch.tensor(every),
        len(prompt), masks,
    )  # fmt: skip
    information = brute_force.mutual_information(log_probs, TOP_K)
    return information, brute_force.semantic_agreement(log_probs, model.lm_head.weight, TOP_K)


@pytest.mark.parametrize("method", METHODS)
def test_brute_force(scored, slow, method):
    """Full forward passes with weights taken out, loops over masks and tokens."""
    gate = {"asmi": 0.0, "sem": 1.0, "adapt": scored["adapt", "mean"].gate}[method]
    u = [information * (1 - gate * agreement) for information, agreement in zip(*slow, strict=True)]
    expected = {"mean": sum(u) / len(u), "sum": sum(u), "max": max(u)}
    found = {how: float(scored[method, how]) for how in AGGREGATIONS}
    assert found == pytest.approx(expected, abs=1e-5)
    assert found["mean"] < found["max"] < found["sum"]  # the three are told apart


@pytest.mark.parametrize(("method", "how"), METHOD_AND_AGGREGATION)
def test_words_and_json(scored, method, how):
    one, tokens = scored[method, how], len(scored[method, how].tokens)
    assert one.label == METHODS[method] + (f" (aggregation={how})" if how != "mean" else "")
    assert one.highest == pytest.approx(math.log(MASKS) * (tokens if how == "sum" else 1))
    first, second, *others = one.explanation
    named = {"max": "maximum"}.get(how, how)
    assert first.startswith(f"{one.label}: {one.score:.4f} nats (0 to {one.highest:.2f};")
    assert first.endswith(f"the {named} over {tokens} tokens.")
    for name in ("msp", "perplexity", "entropy"):
        assert f"{SIGNALS[name].title} {one.signals[name]:.4g}" in second
    assert "no common scale" in " ".join(others)
    fewer = replace(one, counted=1)
    assert fewer.explanation[0].endswith("over 1 token.")
    assert fewer.highest == math.log(MASKS)
    assert (f"{one}".splitlines(), f"{one:.3f}") == (one.explanation, f"{one.score:.3f}")
    assert repr(one) == f"Score({one.label} {one.score:.4f} nats, answer={ANSWER!r})"
    content = json.loads(json.dumps(one.to_dict(), allow_nan=False))
    assert Score.from_dict(content) == one
    assert one.to_df().to_dict("records") == content["tokens"]
    assert content["tokens"] == [asdict(token) for token in one.tokens]
    assert (content["explanation"], content["highest"]) == (one.explanation, one.highest)
    assert (one.config.method, one.config.aggregation) == (method, how)
    for damaged in ({}, content | {"tokens": [{}]}, content | {"tokens": [7]}):
        with pytest.raises(ValueError, match=r"Score\.to_dict"):
            Score.from_dict(damaged)


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_signals_are_those_of_the_other_methods(scored, how):
    """The unmasked ones, means and sums over the counted tokens."""
    one = scored["sem", how]
    entropy = [token.entropy for token in one.tokens]
    likelihood = [token.log_likelihood for token in one.tokens]
    assert one.signals == pytest.approx({
        "asmi": float(scored["asmi", how]), "sem": float(one), "msp": one.msp,
        "perplexity": -np.mean(likelihood), "entropy": np.mean(entropy),
    })  # fmt: skip
    assert scored["adapt", how].signals["adapt"] == float(scored["adapt", how])
    assert replace(one, counted=2).signals["entropy"] == np.mean(entropy[:2])


def test_an_answer_comes_back_as_it_was_given(model, tokenizer):
    for answer in (" Brask", " Brask</s>", [7, 8], np.array([7, 8])):
        found = score(model, PROMPT, answer, tokenizer=tokenizer)
        assert found.to_dict()["answer"] == found.answer
        assert ("stop" in found.settings) == isinstance(answer, str)  # token ids are not cut
        assert found.answer == (answer if isinstance(answer, str) else [7, 8])


def test_an_alternative_may_be_the_vocabularys_first_token(tokenizer):
    one = torch.ones(1)
    columns = dict.fromkeys(("mi", "agreement", "entropy", "log_likelihood"), one)
    stats = SimpleNamespace(**columns, tokens=torch.tensor([5]), top_token=np.zeros((4, 1), int))
    (token,) = tokens_of(stats, "a", [(0, 1)], 0, tokenizer)
    assert (token.alternative, token.alternative_share) == (tokenizer.decode([0]), 1)


def printed(one, width=100):
    console = Console(file=io.StringIO(), width=width)
    console.print(one)
    return console.file.getvalue()


def test_in_a_terminal(found):
    plain = " ".join(printed(found).split())
    assert "in Brask⏎ 1931" in plain
    assert "no common scale" in plain
    for token in sorted(found.tokens, key=lambda token: token.u)[-5:]:
        assert f"{token.u:.4f} {token.bar} " in plain
    tokens = tuple(replace(found.tokens[0], u=float(u), mi=1 / (u + 1)) for u in range(9))
    assert "8.0000" in printed(replace(found, tokens=tokens))  # by u, not by MI
    tokens = (replace(found.tokens[0], text="[red]x[/red]", alternative="[/bold]"),)
    marked = printed(replace(found, tokens=tokens, warnings=("[/odd] warning",)))
    assert all(part in marked for part in ("[red]x[/red]", "[/bold]", "[/odd] warning"))


def test_bars_follow_the_shade(found):
    levels = [replace(found.tokens[0], u=u) for u in (-1e-9, 0.0, 0.001, 0.01, 0.05, 0.1, 2.0)]
    shades, bars = [token.shade for token in levels], [token.bar for token in levels]
    assert shades == pytest.approx([0, 0, 0.1, math.sqrt(0.1), math.sqrt(0.5), 1, 1])
    assert bars == [" ", " ", "▁", "▃", "▆", "█", "█"]
