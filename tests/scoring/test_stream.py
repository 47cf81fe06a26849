"""What is scored while it is written is what the finished answer scores."""

import threading

import numpy as np
import pytest
import torch

from lm_polygraph_asmi import stream
from lm_polygraph_asmi.model import (
    PrefixCache,
    attention_of,
    readout,
    scoring_session,
    steps_of,
    stepwise,
)
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.streaming import Streamer
from tests import brute_force
from tests.model.test_device_map import state
from tests.model.test_kinds import KINDS, masks, sequence
from tests.registry import tiny_class
from tests.rounding import allowed
from tests.scoring.conftest import PROMPT, ending_model
from tests.scoring.test_reuse import ALL_TOKENS, EITHER, assert_close, columns, same
from tests.scoring.test_reuse import SETTINGS as SMALL
from tests.tiny_lm import whitebox

SETTINGS = SMALL | ALL_TOKENS
PLAIN = {name: value for name, value in SETTINGS.items() if name != "scope"}
FINISHED = {**SETTINGS, "seeded_by": "prompt"}


def equal(model, prompt=PROMPT, **settings):
    """A stream, having been compared with the score of the same answer as given ids."""
    written = stream(model, prompt, **PLAIN | settings)
    found = list(written)
    ids = [token.id for token in found]
    own = Scorer(model, **FINISHED | settings)
    same(found, own.score(prompt, ids).tokens)
    assert own.score(prompt).tokens[-1].id == ids[-1]
    assert [token.id for token in own.score(prompt).tokens] == ids
    same(written.result.tokens, found)
    assert float(written.result) == pytest.approx(float(own.score(prompt)), abs=1e-6)
    assert [(t.start, t.end) for t in found] == [(t.start, t.end) for t in written.result.tokens]
    return written


@EITHER
def test_every_family(family, attention):
    equal(whitebox(family), attention=attention, max_new_tokens=7)


FEW = ("mixture", "sinks", "latent attention", "chunks", "gated hybrid")
OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind not in FEW]


@pytest.mark.parametrize("attention", [None, pytest.param("eager", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", [*FEW, *OTHERS])
def test_every_kind(kind, attention):
    """The numbers of an answer as it is written are those of the finished one.

    What kinds differ in are the steps: those of all kinds are held to full forward passes below.
    """
    name, overrides, layer, _ = KINDS[kind]
    if name in UNSTEPPED:
        pytest.skip("unsupported, see below")
    settings = {**SMALL, "seeded_by": "prompt", "attention": attention}
    model, ids = tiny_class(name, **overrides), sequence(20)
    engine = Engine(
        **settings, depth=(layer + 1) / 4.5, top_k=model.get_output_embeddings().out_features
    )
    with scoring_session(model, attention):
        writing = engine.start_stream(model, ids[:11])
        for token in ids[11:].tolist():
            writing.step(token)
    found, expected = writing.statistics(), engine.score(model, ids[:11], ids[11:].tolist())
    names = ("mi", "agreement", "entropy", "log_likelihood")
    assert_close(found, expected, allowed(model, ids), names)
    assert max(expected.mi) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_every_kind(kind):
    """Against full forward passes with a hook, at each position."""
    name, overrides, layer, projection = KINDS[kind]
    if "shared_transf" in projection:
        pytest.skip("two layers share the projection")
    model, ids = tiny_class(name, **overrides), sequence(20)
    with scoring_session(model):
        if name in UNSTEPPED:
            with pytest.raises(RuntimeError, match="cannot be scored while it writes"):
                steps_of(model, ids[:11], layer, masks())
            return
        written = steps_of(model, ids[:11], layer, masks())
        parts = [ids[:11].tolist(), *([i] for i in ids[11:-1].tolist())]
        states = [written.steps(part)[written.rows] for part in parts]
        found = torch.cat([readout(model, rows) for rows in states], dim=1)
    index = written.index
    axis = 0 if type(model.get_submodule(projection.format(layer))).__name__ == "Conv1D" else 1
    slow = brute_force.subnetwork_log_probs(
        model, projection.format(layer), axis, ids, 11, masks(), "response"
    )
    assert (found[index].exp() - slow.exp()).abs().sum(-1).max() / 2 < 1e-4
    assert (slow - slow[:1]).abs().max() > 1e-3


UNSTEPPED = {"OpenAIGPTLMHeadModel"}
"""Without a cache."""


@pytest.mark.parametrize("stop", [None, ["e"], ["\n"]])
def test_end_tokens_and_stop_strings(stop):
    written = equal(ending_model(), max_new_tokens=12, stop=stop, closing_token=False)
    assert written.result.counted >= 1


def test_one_token_and_a_long_answer():
    tiny = whitebox()
    assert len(equal(tiny, max_new_tokens=1).result.tokens) == 1
    assert len(equal(tiny, max_new_tokens=40).result.tokens) == 40  # more than room is made for


@pytest.mark.parametrize("masks", [{"mask_rate": 1e-6}, {"num_masks": 40, "mask_rate": 0.3}])
def test_no_mask_and_many(masks):
    """Masks that keep every head are nobody's row; of many, some rows only make up the number."""
    settings = PLAIN | {"max_new_tokens": 3} | masks
    found = list(stream(whitebox(), PROMPT, **settings))
    again = Scorer(whitebox(), **FINISHED | settings).score(PROMPT, [token.id for token in found])
    np.testing.assert_allclose(columns(found), columns(again.tokens), rtol=1e-5, atol=1e-5)
    assert (max(token.mi for token in found) > 1e-4) == (len(masks) > 1)


def test_chat_prompts():
    tiny = whitebox()
    tiny.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    try:
        equal(tiny, [{"role": "user", "content": PROMPT}], max_new_tokens=4)
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with pytest.raises(ValueError, match="only the model's own answer can be streamed"):
            stream(tiny, chat)
    finally:
        tiny.tokenizer.chat_template = None


def test_cancelling_leaves_the_model_as_found():
    tiny = whitebox()
    model = tiny.model.train()
    before = state(model), attention_of(model), model.generation_config
    with stream(tiny, PROMPT, **PLAIN, attention="sdpa") as written:
        first = next(written)
        # Between two tokens it is as it was found, and free for another thread.
        assert model.training
        assert not torch.is_inference_mode_enabled()
        assert attention_of(model) == before[1]
        others = []
        thread = threading.Thread(target=lambda: others.append(Scorer(tiny, **SETTINGS).score("A")))
        thread.start()
        thread.join()
        assert others
        second = next(written)
    assert list(written) == []
    assert [token.id for token in written.result.tokens] == [first.id, second.id]
    assert (state(model), attention_of(model), model.generation_config) == before
    assert all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_streamer_scores_what_others_generate():
    tiny, shown = whitebox(), []
    scorer = Scorer(tiny, **FINISHED)
    streamer = Streamer(scorer, shown.append)
    ids = tiny.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    torch.manual_seed(3)
    made = tiny.model.generate(
        ids, do_sample=True, max_new_tokens=6, streamer=streamer, eos_token_id=None
    )
    answer = made[0, ids.shape[1] :].tolist()
    same(shown, scorer.score(PROMPT, answer).tokens)
    assert [token.id for token in streamer.stream.result.tokens] == answer


def test_what_is_wrong_with_settings():
    tiny = whitebox()
    for wrong in ({"scope": "all"}, {"seeded_by": "answer"}):
        with pytest.raises(ValueError, match="streaming needs "):
            stream(tiny, PROMPT, **wrong)
    with pytest.raises(ValueError, match="at least one generated token"):
        assert stream(tiny, PROMPT).result


def test_hooks_of_others_are_refused():
    """They may do another thing at each position: nothing but full forward passes is believed."""
    tiny = whitebox()
    handle = tiny.model.model.layers[0].register_forward_hook(lambda *_: None)
    try:
        with pytest.raises(RuntimeError, match="while it writes: it has hooks"):
            next(stream(tiny, PROMPT, **PLAIN))
        assert not PrefixCache.serves(tiny.model)
    finally:
        handle.remove()
    assert PrefixCache.serves(tiny.model)


def test_wrong_steps_are_refused(monkeypatch):
    """The steps are held against full forward passes before the first token is believed."""
    everything = stepwise.OneSequence._allowed
    monkeypatch.setattr(
        stepwise.OneSequence, "_allowed", lambda *given: torch.ones_like(everything(*given))
    )
    plain = stepwise.RowsOfBatch.__call__

    def shifted(self, tokens):
        return plain(self, tokens) + 1

    assert len(list(stream(whitebox(), PROMPT, **PLAIN, max_new_tokens=2))) == 2  # by rows
    monkeypatch.setattr(stepwise.RowsOfBatch, "__call__", shifted)
    with pytest.raises(RuntimeError, match="cannot be scored while it writes"):
        next(stream(whitebox(), PROMPT, **PLAIN))
