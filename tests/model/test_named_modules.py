"""Decoders whose modules no name tells: named right, they equal brute force."""

import pytest
import torch
from torch import Tensor, nn

from lm_polygraph_asmi import ASMIConfig
from lm_polygraph_asmi.config import module_paths
from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import name_modules, structure_of
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from tests.decoders import apart
from tests.odd_decoders import HEADS, WIDTH, Attention, OddForCausalLM, heads_masked, odd_decoder
from tests.subnetworks import subnetwork_log_probs
from tests.tiny_lm import whitebox

PROMPT, TARGET = 15, 1
NAMES = "layers=model.layers,projection=attn.o,lm_head=lm_head"


class Mixer(nn.Module):
    """A projection with three axes, one for heads: no `in_features`, no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(HEADS, WIDTH // HEADS, WIDTH))

    def forward(self, heads: Tensor) -> Tensor:
        by_head = heads.unflatten(-1, (HEADS, -1))
        return torch.einsum("bthw,hwd->btd", by_head, self.kernel)


class Unseen(Attention):
    """A projection that is no matrix."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.o = Mixer()


class Headless(OddForCausalLM):
    def get_output_embeddings(self) -> None:
        return None


def unknown() -> OddForCausalLM:
    """No part is where names are looked for: layers in a `Sequential`, no known unembedding."""
    model = odd_decoder(Unseen)
    model.model.layers = nn.Sequential(*model.model.layers)
    model.__class__ = Headless
    return model


def masks() -> Tensor:
    return sample_head_masks(9, HEADS, 0.4, torch.Generator().manual_seed(0))


def text(length: int = 24) -> Tensor:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("scope", ["all", "response"])
def test_named_modules_equal_full_passes_with_a_hook(scope):
    model, ids = unknown(), text()
    expected = heads_masked(model, ids, PROMPT, TARGET, masks(), scope)
    assert apart(expected, expected[:1].expand_as(expected)) > 1e-3  # masks change something
    name_modules(model, NAMES)
    found = subnetwork_log_probs(model, ids, PROMPT, TARGET, masks(), scope=scope)
    assert apart(found, expected) < 1e-5  # float32 sums of 32 terms


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("layers", "no list of 4 decoder layers"),
        ("projection", "not among the classes that were tested"),
        ("lm_head", "has no unembedding"),
    ],
)
def test_a_name_that_is_left_out_is_asked_for(left_out, message):
    model = unknown()
    names = module_paths(NAMES)
    del names[left_out]
    name_modules(model, ASMIConfig(structure=names).structure)
    with pytest.raises(TypeError, match=rf"{message}.*name the modules: structure='layers="):
        structure_of(model)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": "model.blocks"}, "layers=model.blocks, which is no module of the model: take"),
        ({"layers": "model"}, "no layer at 'model' has a module attn.o"),
        ({"projection": "attn.out"}, "no layer at 'model.layers' has a module attn.out"),
        ({"projection": "attn.v"}, "projection of the head outputs.*the first is 'attn.o'"),
        ({"projection": "up"}, "projection of the head outputs.*the first is 'attn.o'"),
        ({"projection": "down"}, "projection of the head outputs.*the first is 'attn.o'"),
        ({"projection": "attn"}, "projection of the head outputs"),
        (
            {"lm_head": "model.norm"},
            "lm_head=model.norm, expected .* 61 logits.*got .32",
        ),
    ],
)
def test_a_wrong_name_is_refused(wrong, message):
    model = unknown()
    name_modules(model, ASMIConfig(structure=module_paths(NAMES) | wrong).structure)
    with pytest.raises(TypeError, match=message):
        structure_of(model)


def test_names_are_a_setting_that_is_compared():
    paths = module_paths(NAMES)
    turned = dict(reversed(paths.items()))
    config = ASMIConfig(structure=turned)
    assert config == ASMIConfig(structure=NAMES) == ASMIConfig.from_dict(config.to_dict())
    assert "named modules" in str(config)
    assert config.score_key() != ASMIConfig().score_key()
    for bad in ("heads=attn", "layers=", "attn.o", {"layers": 3}):
        with pytest.raises(ValueError, match="structure names modules among layers, projection"):
            ASMIConfig(structure=bad)


def test_engines_of_other_names_share_a_model():
    """Names belong to a score, not to the model that it was computed with."""
    model, ids = unknown(), text()
    named, unnamed = Engine(structure=NAMES), Engine()
    (first,) = named.score(model, ids[:PROMPT], ids[PROMPT:].tolist())
    with pytest.raises(TypeError, match="name the modules"):
        unnamed.score(model, ids[:PROMPT], ids[PROMPT:].tolist())
    (again,) = named.score(model, ids[:PROMPT], ids[PROMPT:].tolist())
    assert (first.mi == again.mi).all()
    assert first.settings.to_dict()["structure"] == NAMES


def test_names_reach_a_benchmark():
    model = whitebox("llama")
    stats = {"greedy_tokens": [[40, 77, 131]]}
    right, wrong = (
        MaskedHeadsCalculator(structure={"projection": path})
        for path in ("self_attn.o_proj", "self_attn.q_proj")
    )
    plain = MaskedHeadsCalculator()(stats, ["Who built it?"], model)
    assert (
        right(stats, ["Who built it?"], model)["asmi"][0][0.6]["mi"].tolist()
        == plain["asmi"][0][0.6]["mi"].tolist()
    )
    with pytest.raises(TypeError, match=r"layer 0 whose .*the first is 'self_attn.o_proj'"):
        wrong(stats, ["Who built it?"], model)
