"""An own answer is scored over what its generation knows, and the numbers stay the same."""

from functools import partial

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from lm_polygraph_asmi import stream
from lm_polygraph_asmi.model import PrefixCache, run_unmasked, scoring_session, states_seen
from lm_polygraph_asmi.scoring import engine as engine_module
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.decoders import sequence
from tests.families import tiny_model
from tests.scoring.conftest import PROMPT
from tests.tiny_lm import UNMASKABLE, tokenizer, unmaskable, whitebox

SETTINGS = {"scope": "response", "num_masks": 6, "mask_rate": 0.4}
# Rounding exchanges the last of K tokens where two are all but equally likely.
ALL_TOKENS = {"top_k": len(tokenizer())}
COLUMNS = ("mi", "agreement", "u", "entropy", "log_likelihood", "vote", "alternative_share")


def columns(tokens):
    return np.array([[getattr(token, name) for name in COLUMNS] for token in tokens])


def same(found, expected):
    assert [token.id for token in found] == [token.id for token in expected]
    assert [token.text for token in found] == [token.text for token in expected]
    np.testing.assert_allclose(columns(found), columns(expected), rtol=1e-5, atol=1e-5)
    assert columns(expected)[:, 0].max() > 1e-4  # masks change something


def assert_close(found, expected, most, names=("mi", "entropy", "log_likelihood")):
    """Statistics of tokens that differ by at most `most`."""
    for name in names:
        own, other = getattr(found, name), getattr(expected, name)
        np.testing.assert_allclose(own, other, rtol=0, atol=most, err_msg=name)


@pytest.fixture
def passes(monkeypatch):
    """The unmasked passes of the engine."""
    found, run = [], engine_module.run_unmasked

    def spy(*args):
        found.append(run(*args))
        return found[-1]

    monkeypatch.setattr(engine_module, "run_unmasked", spy)
    return found


def known_to(passes):
    return [(unmasked.start, unmasked.reused) for unmasked in passes]


def test_one_token_and_no_scope_all(passes):
    tiny = whitebox()
    for settings in ({"max_new_tokens": 1}, {"max_new_tokens": 1, "scope": "all"}):
        scorer = Scorer(tiny, **SETTINGS | ALL_TOKENS | settings)
        own = scorer.score(PROMPT)
        same(own.tokens, scorer.score(PROMPT, [token.id for token in own.tokens]).tokens)
    assert [kept for _, kept in known_to(passes)] == ["keys", *["nothing"] * 3]


def prefix_cache_of(model, ids, prompt, layers, before=0, guesses=0):
    """The prefix cache of a sequence as generation makes it: the prompt, then token by token.

    Args:
        before: positions that were known before; hidden states are those behind them.
        guesses: tokens behind the last that are run and taken back.
    """
    prefix_cache, cache = PrefixCache(), DynamicCache()
    with scoring_session(model):
        if before:
            model(ids[None, :before], past_key_values=cache)
        with states_seen(model, layers) as seen:
            model(ids[None, before:prompt], past_key_values=cache)
            for place in range(prompt, len(ids) - 1):
                model(ids[None, place : place + 1], past_key_values=cache)
            if guesses:
                model(ids[None, :guesses], past_key_values=cache)
                cache.crop(-guesses)
        prefix_cache.take(model, ids.tolist(), cache, seen(), before)
    return prefix_cache


def test_states_of_other_passes_or_layers_are_not_taken():
    """They serve where they are known of the whole answer, at every layer that is masked.

    In float64, but for norms and softmax, which transformers computes in float32.
    """
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=0)
    tiny, ids = tiny_model("llama").double(), sequence(14)
    other = torch.cat([ids[:-3], sequence(3, seed=8)])
    longer = torch.cat([ids, sequence(2, seed=8)])
    reused = {}
    for name, prefix_cache, asked, prompt, layers in (
        ("nobody has seen", prefix_cache_of(tiny, ids, 9, [1, 2]), ids, 9, [1, 2]),
        ("all of it", prefix_cache_of(tiny, ids, 9, [1, 2]), ids, 9, [1, 2]),
        ("a cut answer", prefix_cache_of(tiny, ids, 9, [1]), ids[:-3], 9, [1]),
        ("behind a known start", prefix_cache_of(tiny, ids, 9, [1], before=4), ids, 6, [1]),
        ("before they begin", prefix_cache_of(tiny, ids, 9, [1], before=6), ids, 6, [1]),
        ("guesses taken back", prefix_cache_of(tiny, ids, 9, [1], guesses=3), ids, 9, [1]),
        ("another layer", prefix_cache_of(tiny, ids, 9, [2]), ids, 9, [1]),
        ("no layer", prefix_cache_of(tiny, ids, 9, []), ids, 9, [1]),
        ("another end", prefix_cache_of(tiny, ids, 9, [1]), other, 9, [1]),
        ("a longer answer", prefix_cache_of(tiny, ids, 9, [1]), longer, 9, [1]),
        ("another prompt", prefix_cache_of(tiny, sequence(14, seed=3), 9, [1]), ids, 9, [1]),
        ("one token", prefix_cache_of(tiny, ids, 9, [1]), ids, 1, [1]),
    ):
        with scoring_session(tiny):
            found = run_unmasked(tiny, asked, prompt, layers, "response", prefix_cache)
            expected = run_unmasked(tiny, asked, prompt, layers, "response")
        reused[name] = found.reused
        close(found.final_hidden, expected.final_hidden)
        assert (found.by_length, found.devices) == (expected.by_length, expected.devices)
        for layer in layers:
            here = expected.predicting
            for part in ("hidden", "heads"):
                own, plain = (getattr(run.targets[layer], part) for run in (found, expected))
                close(own[:, found.run(here)], plain[:, here])
            close(found.after[layer], expected.after[layer])
        assert found.keys_values.keys() == expected.keys_values.keys()
        for layer, known in expected.keys_values.items():
            for own, plain in zip(found.keys_values[layer], known, strict=True):
                close(own, plain)
    assert reused == dict.fromkeys(reused, "keys") | {
        "all of it": "states", "a cut answer": "states", "behind a known start": "states",
        "another prompt": "nothing", "one token": "nothing",
    }  # fmt: skip


def test_states_of_a_batch_are_not_one_sequences():
    tiny = tiny_model("llama")
    with scoring_session(tiny), states_seen(tiny, [2]) as seen:
        tiny(torch.stack([sequence(6), sequence(6)]))
    assert seen() == {}


@pytest.mark.parametrize("wrong", ["keys", "states"])
def test_what_is_wrongly_known_is_not_believed(wrong, caplog):
    """What an earlier sequence left is held against full forward passes before it counts."""
    tiny, ids = whitebox().model, sequence(14)
    engine = Engine(**SETTINGS)
    given = (tiny, ids[:9], ids[9:].tolist())
    expected = engine.score(*given)
    prefix_cache = prefix_cache_of(tiny, ids, 9, [engine.layer(tiny)] if wrong == "states" else ())
    if wrong == "keys":
        prefix_cache.layers = [(key, value + 1) for key, value in prefix_cache.layers]
    else:
        prefix_cache.states = {
            layer: states.flip(-1) for layer, states in prefix_cache.states.items()
        }
    found = engine.score(*given, prefix_cache=prefix_cache)
    np.testing.assert_allclose(found.mi, expected.mi, atol=1e-6)
    assert "known keys are not reused" in caplog.text
    assert not engine.reuses_prefix(tiny)


def test_a_bug_of_this_package_turns_no_reuse_off():
    tiny, ids = whitebox().model, sequence(14)
    prefix_cache = prefix_cache_of(tiny, ids, 9, ())
    prefix_cache.layers = {}
    engine = Engine(**SETTINGS)
    with pytest.raises(KeyError):
        engine.score(tiny, ids[:9], ids[9:].tolist(), prefix_cache=prefix_cache)
    assert engine.reuses_prefix(tiny)


def test_another_model_knows_nothing():
    """Nor does the same one with other weights: what it kept is forgotten, not mended."""
    tiny, ids = tiny_model("llama"), sequence(14)
    engine, prefix_cache = Engine(**SETTINGS), PrefixCache()
    given = ids[:9], ids[9:].tolist()
    engine.score(tiny, *given, prefix_cache=prefix_cache)
    assert prefix_cache.common(tiny, ids[:8].tolist()) == 8
    assert prefix_cache.common(tiny_model("llama"), ids[:8].tolist()) == 0
    with torch.no_grad():
        tiny.get_input_embeddings().weight.mul_(1.5)
    assert prefix_cache.common(tiny, ids[:8].tolist()) == 0
    found, expected = (
        engine.score(tiny, *given, prefix_cache=prefix_cache),
        engine.score(tiny, *given),
    )
    np.testing.assert_allclose(found.mi, expected.mi, atol=1e-6)
    assert engine.reuses_prefix(tiny)


def test_a_model_that_generates_over_no_cache(monkeypatch, passes):
    """It is asked once; its answer is made without, and the prompt is run again."""
    tiny = whitebox()
    plain, asked = type(tiny.model).generate, []

    def refusing(self, *args, **kwargs):
        asked.append(not kwargs.keys().isdisjoint(("past_key_values", "cache")))
        if asked[-1]:
            raise AttributeError("this model keeps nothing")
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(type(tiny.model), "generate", refusing)
    scorer = Scorer(tiny, **SETTINGS, **ALL_TOKENS, max_new_tokens=3)
    own = [scorer.score(PROMPT) for _ in range(2)]
    assert asked == [True, False, False]
    assert set(known_to(passes)) == {(0, "nothing")}
    for score in own:
        same(score.tokens, scorer.score(PROMPT, [token.id for token in score.tokens]).tokens)


@pytest.mark.parametrize("lacks", [*UNMASKABLE, "a stack of layers"])
def test_what_cannot_be_masked_is_refused_before_it_answers(lacks, monkeypatch):
    tiny = unmaskable(lacks) if lacks in UNMASKABLE else whitebox()
    if lacks not in UNMASKABLE:
        tiny.model.model.layers.append(tiny.model.model.layers[0])
        tiny.model.config.num_hidden_layers += 1
    monkeypatch.setattr(type(tiny.model), "generate", lambda *_, **__: pytest.fail("it answered"))
    reason = UNMASKABLE.get(lacks, "do not run once each")
    for ask in (Scorer, lambda model, **settings: stream(model, PROMPT, **settings)):
        with pytest.raises(TypeError, match=f"{type(tiny.model).__name__}.* {reason}"):
            ask(tiny, **SETTINGS)
