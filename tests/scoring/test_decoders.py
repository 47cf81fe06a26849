"""Every decoder of the table: reused equals fresh, and streamed equals whole."""

from contextlib import nullcontext

import pytest
import torch

from lm_polygraph_asmi.model import PrefixCache, scoring_session
from lm_polygraph_asmi.model.layer_call import KeyValueTap
from lm_polygraph_asmi.model.layers import decoder_layers
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.decoders import FAMILIES, KINDS, WRONG_IF_CHEAPEST, sequence, unchecked
from tests.rounding import allowed
from tests.scoring.conftest import PROMPT
from tests.scoring.test_reuse import (
    ALL_TOKENS,
    SETTINGS,
    assert_close,
    known_to,
    passes,  # noqa: F401
    prefix_cache_of,
    same,
)
from tests.scoring.test_stream import equal
from tests.tiny_lm import whitebox

SOFT_CAPPED = "gemma2-softcap"
"""Has no SDPA."""
TRIED = ("llama", "mistral-window", SOFT_CAPPED, "gemma3-mixed", "gpt2")
EITHER = [
    pytest.param(family, attention, marks=[] if family in tried else pytest.mark.slow)
    for attention, tried in (("sdpa", TRIED), ("eager", ("llama", SOFT_CAPPED)))
    for family in FAMILIES
    if (family, attention) != (SOFT_CAPPED, "sdpa")
]
"""Those that differ in their attention and cache; the others are of these kinds, too."""
# Layers that share keys, or keep them where nobody sees; that return tuples, or ask for the length
# of a cache; models that generate over a cache of their own kind alone; and that have none.
KEYS_ELSEWHERE = ("shared keys and values", "no cache")
KEYS_ALONE = ("ALiBi", "local layers", "parallel residual", "chunks")
NO_PLAIN_CACHE = ("indexed attention", "gated indexed attention, windows")
UNSTEPPED = ("no cache",)
STREAMED = ("sinks", "latent attention", "chunks", "gated hybrid")
"""What kinds and families differ in are the steps: model/ holds those of all to full passes."""
REUSED = (
    "ALiBi", "chunks", "gated hybrid", "Mamba hybrid", "shared keys and values", "no cache",
    "gated indexed attention, windows",
)  # fmt: skip
"""Each with a cache of its own. Before any kind reuses, a score is held to full passes."""


def returns_tuples(model) -> bool:
    """Whether layers return tuples, as some of older transformers do; their states are not kept."""
    outputs: list[object] = []
    handle = decoder_layers(model)[0].register_forward_hook(lambda *call: outputs.append(call[-1]))
    with scoring_session(model):
        model(sequence(6)[None])
    handle.remove()
    return not isinstance(outputs[0], torch.Tensor)


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize(("family", "attention"), EITHER)
def test_own_answers_and_streams_of_every_family(family, attention, passes, monkeypatch):  # noqa: F811
    """Once the first has passed the self-check, the prompt is run once, and so is the answer in
    layers that are not masked."""
    tiny, ran, update = whitebox(family), [], KeyValueTap.update
    monkeypatch.setattr(
        KeyValueTap, "update", lambda *args, **k: ran.append(args[3]) or update(*args, **k)
    )  # fmt: skip
    scorer = Scorer(tiny, **SETTINGS, **ALL_TOKENS, max_new_tokens=7, attention=attention)
    own = scorer.score(PROMPT)
    known = len(tiny.tokenizer(PROMPT)["input_ids"]) - 1
    ran.clear()
    assert scorer.score(PROMPT).score == pytest.approx(own.score, abs=1e-6)
    kept = "keys" if returns_tuples(tiny.model) else "states"
    assert min(ran) == (own.settings["layer"] if kept == "states" else 0)
    assert own.settings["layer"] > 0
    given = scorer.score(PROMPT, [token.id for token in own.tokens])
    assert known_to(passes) == [(known, "keys"), (known, kept), (0, "nothing")]
    same(own.tokens, given.tokens)
    if family in TRIED and attention == ("eager" if family == SOFT_CAPPED else "sdpa"):
        equal(tiny, attention=attention, max_new_tokens=7)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(kind, marks=[] if kind in (*REUSED, *STREAMED) else pytest.mark.slow)
        for kind in KINDS
    ],
)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    return KINDS[kind].make()


@pytest.fixture(scope="module")
def most(model):
    """By how much statistics of no longer sequences may differ."""
    return allowed(model, sequence(20))


@pytest.fixture
def few_checks(kind):
    with nullcontext() if kind in WRONG_IF_CHEAPEST else unchecked():
        yield


def engine_of(kind, **settings) -> Engine:
    return Engine(**SETTINGS, depth=(KINDS[kind].layer + 1) / 4.5, **settings)


@pytest.mark.usefixtures("few_checks")
def test_sequences_of_every_kind(kind, model, most):
    """A longer one, one that parts from it early, and one that repeats it; or none is reused."""
    engine = engine_of(kind)
    prefix_cache, first = PrefixCache(), sequence(14)
    other = torch.cat([first[:4], sequence(9, seed=8)])
    for ids, prompt in ((first, 9), (sequence(20), 17), (other, 7), (other, 12)):
        known = (
            prefix_cache.common(model, ids[: prompt - 1].tolist())
            if engine.reuses_prefix(model)
            else 0
        )
        given = (model, ids[:prompt], ids[prompt:].tolist())
        found = engine.score(*given, prefix_cache=prefix_cache)
        if ids is not first:  # before which nothing is known
            assert_close(found, engine.score(*given), most)
        assert (prefix_cache.input_ids == ids[:-1].tolist()) is engine.reuses_prefix(model)
    assert known == (11 if engine.reuses_prefix(model) else 0)


@pytest.mark.usefixtures("few_checks")
def test_own_answers_of_every_kind(kind, model, most, passes):  # noqa: F811
    """Over their generation's states, or its keys alone, or neither, as the kind allows."""
    engine = engine_of(kind)
    reuses = engine.reuses_prefix(model) and kind not in NO_PLAIN_CACHE
    for ids, prompt in ((sequence(14), 9), (sequence(20, seed=1), 12)):
        given = (model, ids[:prompt], ids[prompt:].tolist())
        expected = engine.score(*given)
        if not reuses:
            continue
        prefix_cache = prefix_cache_of(model, ids, prompt, [engine.layer(model)])
        own = engine.score(*given, prefix_cache=prefix_cache)
        assert_close(own, expected, most)
    used = [kept for _, kept in known_to(passes) if kept != "nothing"]
    if not reuses or kind in KEYS_ELSEWHERE:
        assert "states" not in used
    else:
        kept = ["states"] if kind not in KEYS_ALONE else ["keys", "states"]  # the latter: 5.24
        kept = ["keys"] if returns_tuples(model) else kept
        assert used in [[what] * 2 for what in kept]
        assert engine.reuses_prefix(model)


@pytest.mark.parametrize("attention", [None, pytest.param("eager", marks=pytest.mark.slow)])
def test_streams_of_every_kind(kind, model, most, attention, request):
    """The numbers of an answer as it is written are those of the finished one."""
    if kind in UNSTEPPED:
        pytest.skip("unsupported: it has no steps")
    if not (kind in STREAMED or request.config.getoption("--slow")):
        pytest.skip("needs --slow")
    ids, all_tokens = sequence(20), model.get_output_embeddings().out_features
    engine = engine_of(kind, seeded_by="prompt", attention=attention, top_k=all_tokens)
    with scoring_session(model, attention):
        writing = engine.start_stream(model, ids[:11])
        for token in ids[11:].tolist():
            writing.step(token)
    found, expected = writing.statistics(), engine.score(model, ids[:11], ids[11:].tolist())
    names = ("mi", "agreement", "entropy", "log_likelihood")
    assert_close(found, expected, most, names)
    assert max(expected.mi) > 1e-4
