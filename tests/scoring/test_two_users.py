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

OPTIONS = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
OTHERS = {
    "forward": lambda model, ids: model(ids).logits,
    "generate": lambda model, ids: model.generate(ids, **OPTIONS),
    "hidden states": lambda model, ids: model(ids, output_hidden_states=True).hidden_states[-1],
    "own settings": lambda model, ids: model.generate(ids, pad_token_id=0),
    "attention": lambda model, ids: model(ids, output_attentions=True).attentions[-1],
}


def both(model, ids, other, monkeypatch):
    """Results of the other thread from inside the scored passes; those alone."""
    scorer = Scorer(model, tokenizer=whitebox().tokenizer, num_masks=2, max_new_tokens=3)
    with torch.no_grad():
        alone, found, scoring = other(model, ids), [], current_thread()
    own = LlamaMLP.forward
    with ThreadPoolExecutor(1) as pool:

        def forward(self, states):
            if current_thread() is scoring:
                call = pool.submit(torch.no_grad()(other), model, ids)
                found.append(call.exception(60) or call.result())
            return own(self, states)

        monkeypatch.setattr(LlamaMLP, "forward", forward)
        scorer.score(PROMPT)
    return found, alone


@pytest.mark.parametrize("name", OTHERS)
def test_another_threads_call_is_right_at_every_moment(monkeypatch, name):
    model = whitebox().model
    ids = whitebox().tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    found, alone = both(model, ids, OTHERS[name], monkeypatch)
    assert found
    assert not [error for error in found if isinstance(error, Exception)]
    assert all(torch.equal(one, alone) for one in found)
