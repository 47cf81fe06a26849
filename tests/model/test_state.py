"""What is known of a model is forgotten when it changes, and only then."""

import copy
from unittest.mock import Mock

import pytest
import torch
from accelerate import cpu_offload
from torch import Tensor, nn

from lm_polygraph_asmi.core import algorithm, identity
from lm_polygraph_asmi.core.engine import Engine
from lm_polygraph_asmi.core.identity import model_key
from lm_polygraph_asmi.core.model import model_state, state, structure_of
from lm_polygraph_asmi.results.cache import ResultCache
from tests.families import tiny_model
from tests.model.test_session import IDS, score


def exchanged(model: nn.Module) -> None:
    weight = model.model.layers[3].mlp.up_proj.weight
    with torch.no_grad():
        weight[:4] = weight[[2, 3, 0, 1]]


@pytest.mark.parametrize(
    ("change", "foreign", "effect"),
    [
        # Which this class does not know.
        (lambda m: setattr(m.config, "final_logit_softcapping", 0.2), False, 0),
        (lambda m: nn.init.zeros_(m.model.layers[3].mlp.up_proj.weight[0]), False, 1e-3),
        (lambda m: setattr(m.model.layers[1].mlp, "act_fn", nn.Tanh()), False, 1e-2),
        (lambda m: setattr(m.model.layers, "1", copy.deepcopy(m.model.layers[0])), False, 1e-2),
        (lambda m: m.model.layers[0].mlp.register_forward_hook(lambda *call: call[-1] * 1.2),
         True, 1e-2),
        (lambda m: m.model.layers[3].register_forward_pre_hook(lambda _, given: (given[0] + 0.5,)),
         True, 1e-2),
        (lambda m: setattr(m.lm_head, "forward", lambda x, own=m.lm_head.forward: own(x) * 2),
         True, 1e-2),
        (exchanged, False, 1e-2),
    ],
)  # fmt: skip
def test_a_changed_model_is_another_one(change, foreign, effect, monkeypatch):
    """State, structure, check and key are found anew, and the second score is right, too. What code
    of others computes has no key."""
    monkeypatch.setattr(identity, "_CHUNK", 64)  # two rows
    model, other = tiny_model("llama"), tiny_model("llama")
    before, key = score(model), model_key(model)["revision"]
    known = model_state(model), state.findings(model), structure_of(model)
    change(model)
    change(other)
    assert model_state(model) != known[0]
    after = score(model)
    assert torch.equal(after, score(other))
    assert (after - before).abs().max() >= effect
    assert state.findings(model) is not known[1]
    assert structure_of(model) is not known[2]
    now, own = (model_key(each)["revision"] for each in (model, tiny_model("llama")))
    assert now != key == own
    assert (now is None) == foreign


class Packed(Tensor):
    """As quantised weights are."""


@pytest.mark.parametrize("kind", [Tensor, Packed])
def test_hooks_and_weights_exchanged_are_others(kind):
    """The second one may get the `id` and the memory of the first."""
    model, seen = tiny_model("llama"), set()
    model.register_module("left_out", None)
    layer = model.model.layers[3].mlp.down_proj
    for turn in range(8):
        handle = model.model.register_forward_hook(lambda *call: call[-1])
        seen.add(model_state(model))
        handle.remove()
        seen.add(model_state(model))
        layer.weight = nn.Parameter((layer.weight.detach() * 1.1).as_subclass(kind))
        seen.add(model_state(model))
        assert len(seen) == 3 * turn + 3


def test_weights_loaded_in_inference_mode_count_as_written_to(tmp_path):
    """They have no version counter that would tell."""
    engine, found = Engine(num_masks=4, mask_rate=0.4, store=ResultCache(tmp_path)), []
    with torch.inference_mode():
        model = tiny_model("gpt2")
    for factor in (1, 1, 0.5):
        with torch.inference_mode():
            model.transformer.ln_f.weight.mul_(factor)
        found += engine.score(model, IDS[:9], [5, 6])
    first, again, other = (statistics.log_likelihood.tolist() for statistics in found)
    assert first == again != other


def test_what_a_model_computed_that_was_changed_meanwhile_is_not_stored(monkeypatch):
    engine = Engine(num_masks=6, mask_rate=0.4, store=Mock(get=lambda _: None))
    model = tiny_model("llama")
    changing = Mock(side_effect=lambda *_: {"mi": model.lm_head.weight.mul_(2)})
    monkeypatch.setattr(algorithm, "token_statistics", changing)
    with pytest.raises(ValueError, match="was changed while it was scored"):
        engine.score(model, IDS[:9], [5, 6])
    assert not engine.store.put.called


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("own", [{}, {"rope_parameters": DYNAMIC, "max_position_embeddings": 8}])
def test_passes_change_no_state(offloaded, own):
    model = tiny_model("llama", **own)
    if offloaded:
        cpu_offload(model, torch.device("cpu"))
    found = []
    for _ in range(3):  # at the first, transformers leaves hooks that record
        model.eval()(input_ids=IDS[None], output_hidden_states=True, output_attentions=True)
        found.append((model_state(model), model_key(model)))
    assert found[0] == found[1] == found[2]
    assert found[0][1]["revision"] is not None
