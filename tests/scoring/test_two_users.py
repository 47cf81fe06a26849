"""One thread scores while another calls the same model: each gets what it gets alone.

The other thread's call is started from inside the scored forward passes, and waited for: no test
depends on how fast a machine is.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import current_thread

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.scoring.conftest import PROMPT
from tests.tiny_lm import whitebox

OPTIONS = {"max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
OTHERS = {
    "forward": lambda model, ids: model(ids).logits,
    "generate": lambda model, ids: model.generate(ids, **OPTIONS),
    "hidden states": lambda model, ids: model(ids, output_hidden_states=True).hidden_states[-1],
    "own settings": lambda model, ids: model.generate(ids, pad_token_id=0),
    "attention": lambda model, ids: model(ids, output_attentions=True).attentions[-1],
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_another_threads_call_is_right_at_every_moment(monkeypatch, tokenizer, other):
    model, ids = whitebox().model, tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    model.generation_config.max_new_tokens = 2
    scorer = Scorer(model, tokenizer=tokenizer, num_masks=2, max_new_tokens=3)
    own, scoring, found = LlamaMLP.forward, current_thread(), []
    with torch.no_grad(), ThreadPoolExecutor(1) as pool:
        alone = other(model, ids)

        def forward(self, states):
            if current_thread() is scoring:
                call = pool.submit(torch.no_grad()(other), model, ids)
                found.append(torch.equal(call.result(60), alone))
            return own(self, states)

        monkeypatch.setattr(LlamaMLP, "forward", forward)
        scorer.score(PROMPT)
    assert len(found) > 10
    assert all(found)
