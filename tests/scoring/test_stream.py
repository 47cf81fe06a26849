"""What is scored while it is written is what the finished answer scores."""

import threading

import numpy as np
import pytest
import torch

from lm_polygraph_asmi import stream
from lm_polygraph_asmi.model import (
    PrefixCache,
    attention_of,
    stepwise,
)
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.streaming import Streamer
from tests.model.test_device_map import state
from tests.scoring.conftest import PROMPT, ending_model
from tests.scoring.test_reuse import ALL_TOKENS, columns, same
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
    generated = own.score(prompt)
    assert [token.id for token in generated.tokens] == ids
    same(written.result.tokens, found)
    assert float(written.result) == pytest.approx(float(generated), abs=1e-6)
    assert [(t.start, t.end) for t in found] == [(t.start, t.end) for t in written.result.tokens]
    return written


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("stop", [None, ["e"]])
def test_end_tokens_and_stop_strings(stop):
    written = equal(ending_model(), max_new_tokens=12, stop=stop, closing_token=False)
    assert written.result.counted >= 1


@pytest.mark.usefixtures("unseen")
def test_one_token_and_a_long_answer():
    tiny = whitebox()
    assert len(equal(tiny, max_new_tokens=1).result.tokens) == 1
    assert len(equal(tiny, max_new_tokens=40).result.tokens) == 40  # more than room is made for


@pytest.mark.usefixtures("unseen")
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
