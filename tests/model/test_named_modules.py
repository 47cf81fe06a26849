"""Decoders whose modules detection cannot know: named right, they equal brute force."""

import pytest
import torch
from torch import Tensor, nn

from lm_polygraph_asmi import ASMIConfig
from lm_polygraph_asmi.config import module_paths
from lm_polygraph_asmi.maths import sample_head_masks
from lm_polygraph_asmi.model import name_modules, structure_of, subnetwork_log_probs
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from tests.odd_decoders import HEADS, WIDTH, Attention, OddForCausalLM, heads_masked, odd_decoder
from tests.tiny_lm import whitebox

PROMPT, TARGET = 15, 1
NAMES = "layers=model.layers,projection=attn.o,final_norm=model.norm,lm_head=lm_head"


class Mixer(nn.Module):
    """A projection with three axes, one for heads: no `in_features`, no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(HEADS, WIDTH // HEADS, WIDTH))

    def forward(self, heads: Tensor) -> Tensor:
        by_head = heads.unflatten(-1, (HEADS, -1))
        return torch.einsum("bthw,hwd->btd", by_head, self.kernel)


class Unseen(Attention):
    """Probabilities without a softmax that torch sees, and a projection that is no matrix."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.o = Mixer()

    def weights(self, scores: Tensor) -> Tensor:
        odds = (scores - scores.amax(-1, keepdim=True)).exp()
        return odds / odds.sum(-1, keepdim=True)


class Headless(OddForCausalLM):
    def get_output_embeddings(self) -> None:
        return None


def unknown() -> OddForCausalLM:
    """No part is where detection looks: layers in a `Sequential`, no known unembedding."""
    model = odd_decoder(Unseen)
    model.model.layers = nn.Sequential(*model.model.layers)
    model.__class__ = Headless
    return model


def masks() -> Tensor:
    return sample_head_masks(9, HEADS, 0.4, torch.Generator().manual_seed(0))


def text(length: int = 24) -> Tensor:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(1))


def full_passes(model: OddForCausalLM, ids: Tensor, scope: str) -> Tensor:
    """Log-probabilities (S, T, V): one pass a mask, a hook takes heads from the projection."""
    first = PROMPT - 1 if scope == "response" else 0
    found = []
    for mask in masks():

        def hook(_, args, mask=mask):
            heads = args[0].unflatten(-1, (HEADS, -1)).clone()
            heads[:, first:] *= mask[:, None]
            return (heads.flatten(-2),)

        handle = model.model.layers[TARGET].attn.o.register_forward_pre_hook(hook)
        with torch.no_grad():
            logits = model(ids[None, :-1]).logits[0, PROMPT - 1 :]
        handle.remove()
        found.append(logits.log_softmax(-1))
    return torch.stack(found)


def apart(a: Tensor, b: Tensor) -> float:
    return (a.exp() - b.exp()).abs().sum(-1).max().item() / 2


@pytest.mark.parametrize("scope", ["all", "response"])
def test_named_modules_equal_full_passes_with_a_hook(scope):
    model, ids = unknown(), text()
    expected = full_passes(model, ids, scope)
    assert apart(expected, expected[:1].expand_as(expected)) > 1e-3  # masks change something
    name_modules(model, NAMES)
    found = subnetwork_log_probs(model, ids, PROMPT, TARGET, masks(), scope=scope)
    assert apart(found, expected) < 1e-5  # float32 sums of 32 terms
    if scope == "all":
        assert apart(found, heads_masked(model, ids, PROMPT, TARGET, masks())) < 1e-5


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        ("layers", "expected one stack of layers"),
        ("projection", "no softmax over keys"),
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
        ({"layers": "model"}, "do not run once each in order"),
        ({"projection": "attn.out"}, "projection=attn.out, which is no module of the layers"),
        ({"projection": "attn.v"}, "projection of the head outputs.*the first is 'attn.o'"),
        ({"projection": "up"}, "projection of the head outputs.*the first is 'attn.o'"),
        ({"projection": "down"}, "projection of the head outputs.*the first is 'attn.o'"),
        ({"projection": "attn"}, "projection of the head outputs"),
        ({"final_norm": "model.embedding"}, "final_norm=model.embedding, expected the module that"),
        ({"lm_head": "model.norm"}, r"lm_head=model.norm, expected .* 61 numbers a token, got 1"),
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
    first = named.score(model, ids[:PROMPT], ids[PROMPT:].tolist())
    with pytest.raises(TypeError, match="name the modules"):
        unnamed.score(model, ids[:PROMPT], ids[PROMPT:].tolist())
    again = named.score(model, ids[:PROMPT], ids[PROMPT:].tolist())
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
    with pytest.raises(TypeError, match="layer 0"):
        wrong(stats, ["Who built it?"], model)
