"""Traits that no class of a library has: scored right, slower, or unsupported by name.

`heads_masked` is the ground truth: it takes a head's words away before anything reads them, one
full forward pass per mask, and asks nothing of the package.
"""

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from lm_polygraph_asmi import ASMIConfig
from lm_polygraph_asmi.config import SCOPES, module_paths
from lm_polygraph_asmi.model import name_modules, structure_of
from lm_polygraph_asmi.model.check import passes_in_use
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from tests.decoders import apart, masks, sequence
from tests.subnetworks import subnetwork_log_probs
from tests.tiny_lm import whitebox

VOCABULARY, WIDTH, HEADS, LAYERS = 61, 32, 4, 4
PROMPT, TARGET = 15, 1
NAMES = "layers=model.layers,projection=attn.o,lm_head=lm_head"
both_scopes = pytest.mark.parametrize("scope", SCOPES)


class Attention(nn.Module):
    """Plain heads, distant keys weighing less; traits change what is made of them."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.kept: Tensor | None = None  # the ground truth's, (tokens, heads)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def project(self, heads: Tensor) -> Tensor:
        """From (batch, tokens, heads, width)."""
        return self.o(heads.flatten(2))

    def forward(self, x: Tensor, past: DynamicCache | None) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        if past is not None:
            k, v = past.update(k, v, self.index)
        places = torch.arange(k.shape[2])
        away = places - places[-x.shape[1] :, None]
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + 0.1 * away
        said = (self.weights(scores.masked_fill(away > 0, float("-inf"))) @ v).transpose(1, 2)
        return self.project(said if self.kept is None else said * self.kept[..., None])


class Layer(nn.Module):
    attention: type[Attention] = Attention

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = self.attention(index)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: DynamicCache | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        x = hidden_states + self.attn(self.norm(hidden_states), past_key_values)
        return x + self.mlp(self.mlp_norm(x))


class OddModel(PreTrainedModel):
    base_model_prefix = "model"

    def __init__(self, config: PretrainedConfig, layer: type[Layer]) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer(index) for index in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = False,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        past = DynamicCache() if use_cache and past_key_values is None else past_key_values
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, past)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past)


class OddForCausalLM(PreTrainedModel):
    base_model_prefix = "model"

    def __init__(self, config: PretrainedConfig, layer: type[Layer]) -> None:
        super().__init__(config)
        self.model = OddModel(config, layer)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **given: Any) -> CausalLMOutputWithPast:
        found = self.model(input_ids, **given)
        return CausalLMOutputWithPast(
            logits=self.lm_head(found.last_hidden_state), past_key_values=found.past_key_values
        )


def odd_decoder(trait: type[Layer] | type[Attention] = Layer) -> OddForCausalLM:
    """A random decoder whose layers, or their attention, are of a class of their own; its modules
    are named, as those of any class that the table does not have."""
    layer = trait if issubclass(trait, Layer) else type("Layer", (Layer,), {"attention": trait})
    config = PretrainedConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_attention_heads=HEADS,
        num_hidden_layers=LAYERS, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = OddForCausalLM(config, layer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    name_modules(model, "layers=model.layers,projection=attn.o")
    return model.eval()


def heads_masked(model: OddForCausalLM, ids: Tensor, scope: str) -> Tensor:
    """Log-probabilities (S, T, V) of the response, heads of a layer masked in full passes."""
    found, first = [], PROMPT - 1 if scope == "response" else 0
    for mask in masks():
        masked = copy.deepcopy(model)
        attention = masked.model.layers[TARGET].attn
        attention.kept = torch.ones(len(ids) - 1, HEADS)
        attention.kept[first:] = mask
        with torch.no_grad():
            logits = masked(ids[None, :-1]).logits[0, PROMPT - 1 :]
        found.append(logits.log_softmax(-1))
    return torch.stack(found)


def error(model: nn.Module, ids: Tensor, scope: str) -> float:
    """Total variation between the package and the ground truth, at the worst position."""
    found = subnetwork_log_probs(model, ids, PROMPT, TARGET, masks(), scope=scope)
    expected = heads_masked(model, ids, scope)
    assert apart(expected, expected[:1].expand_as(expected)) > 1e-3  # masks change something
    return apart(found, expected)


class Capacity(Layer):
    """Experts that take so many tokens of a whole batch and no more."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.router = nn.Linear(WIDTH, 4, bias=False)

    def mlp(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chance, expert = self.router(tokens).softmax(-1).max(-1)
        place = F.one_hot(expert, 4).cumsum(0).gather(1, expert[:, None])[:, 0]
        taken = chance * (place <= int(len(tokens) / 4 + 1))
        return super().mlp(x) * taken.view(*x.shape[:2], 1)


class Calibrated(Attention):
    """Takes a scale from the first text it sees, and keeps it."""

    scale: Tensor | None = None

    def project(self, heads: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = heads.std().detach()
        return super().project(heads / self.scale)


class ByLength(Attention):
    """Scores that get sharper with the number of keys there are."""

    def weights(self, scores: Tensor) -> Tensor:
        return super().weights(scores * (1 + scores.shape[-1] / 20))


FULL, ROWS = "full passes", "rows after the prompt"


@both_scopes
@pytest.mark.parametrize(
    ("trait", "ways"),
    [
        (Layer, ("suffix", ROWS)),  # its layers ignore a mask, so nothing can be packed
        (Capacity, (FULL, FULL)),
        (Calibrated, ("suffix", ROWS)),
        (ByLength, ("suffix", FULL)),
    ],
)
def test_what_a_faster_pass_gets_wrong_is_told_once_and_run_slower(trait, ways, scope, caplog):
    caplog.set_level(logging.WARNING, "lm_polygraph")
    model = odd_decoder(trait)
    model(sequence(20, seed=9)[None])  # the first text it sees is not that of the package
    for length, seed in ((24, 0), (24, 1), (20, 2), (60, 3), (30, 4)):
        assert error(model, sequence(length, seed), scope) < 1e-5, (length, seed)
    assert passes_in_use(model, scope) == [ways[SCOPES.index(scope)]]
    told = [message for message in caplog.messages if "failed the self-check" in message]
    assert len(told) == len({message.split("(")[0] for message in told})
    assert all(f"(scope {scope})" in message for message in told)


class Counting(Attention):
    """Writes a running mean into a buffer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("mean", torch.zeros(HEADS, 8), persistent=False)

    def project(self, heads: Tensor) -> Tensor:
        self.mean.mul_(0.99).add_(0.01 * heads.mean((0, 1)))
        return super().project(heads - self.mean)


class Late(Layer):
    """Noise that sets in with the length of a text."""

    def mlp(self, x: Tensor) -> Tensor:
        return super().mlp(x) * (1 + torch.rand(()) * (x.shape[1] > 13))


def test_a_model_that_does_not_repeat_itself_is_refused():
    with pytest.raises(TypeError, match="is not deterministic"):
        structure_of(odd_decoder(Counting))
    with pytest.raises(RuntimeError, match="final states do not give the model's distributions"):
        error(odd_decoder(Late), sequence(24), "all")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value):
    """NaN is unequal to itself, but the model is deterministic."""
    model = odd_decoder()
    with torch.no_grad():
        next(model.parameters())[:] = value
    with pytest.raises(FloatingPointError, match=r"no distribution: NaN.* check its weights"):
        structure_of(model)


class Mixer(nn.Module):
    """A projection with three axes, one for heads: no `in_features`, no matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(HEADS, WIDTH // HEADS, WIDTH))

    def forward(self, heads: Tensor) -> Tensor:
        return torch.einsum("bthw,hwd->btd", heads.unflatten(-1, (HEADS, -1)), self.kernel)


class Unseen(Attention):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.o = Mixer()


class Headless(OddForCausalLM):
    def get_output_embeddings(self) -> None:
        return None


@pytest.fixture
def unknown() -> OddForCausalLM:
    """No part is where names are looked for: layers in a `Sequential`, no known unembedding."""
    model = odd_decoder(Unseen)
    model.model.layers = nn.Sequential(*model.model.layers)
    model.__class__ = Headless
    return model


@both_scopes
def test_named_modules_equal_full_passes_with_a_hook(unknown, scope):
    name_modules(unknown, NAMES)
    assert error(unknown, sequence(24), scope) < 1e-5  # float32 sums of 32 terms


ANOTHER = "projection of the head outputs.*the first is 'attn.o'"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": None}, "no list of 4 decoder layers.*name the modules: structure='layers="),
        ({"projection": None}, "not among the classes that were tested.*name the modules"),
        ({"lm_head": None}, "has no unembedding.*name the modules"),
        ({"layers": "model.blocks"}, "layers=model.blocks, which is no module of the model: take"),
        ({"layers": "model"}, "no layer at 'model' has a module attn.o"),
        ({"projection": "attn.v"}, ANOTHER),
        ({"projection": "down"}, ANOTHER),
        ({"lm_head": "model.norm"}, "lm_head=model.norm, expected .* 61 logits.*got .32"),
    ],
)
def test_a_name_that_is_wrong_or_left_out_is_refused(unknown, change, message):
    names = {k: v for k, v in (module_paths(NAMES) | change).items() if v is not None}
    name_modules(unknown, ASMIConfig(structure=names).structure)
    with pytest.raises(TypeError, match=message):
        structure_of(unknown)


def test_a_class_that_only_shares_its_name_is_not_in_the_table():
    model = odd_decoder()
    name_modules(model, None)
    model.__class__ = type("LlamaForCausalLM", (type(model),), {})
    with pytest.raises(TypeError, match="LlamaForCausalLM is not among the classes that were test"):
        structure_of(model)


def test_names_are_a_setting_that_is_compared():
    paths = module_paths(NAMES)
    config = ASMIConfig(structure=dict(reversed(paths.items())))
    assert config == ASMIConfig(structure=NAMES) == ASMIConfig.from_dict(config.to_dict())
    assert "named modules" in str(config)
    assert config.score_key() != ASMIConfig().score_key()
    for bad in ("heads=attn", "layers=", "attn.o", {"layers": 3}):
        with pytest.raises(ValueError, match="structure names modules among layers, projection"):
            ASMIConfig(structure=bad)


def test_engines_of_other_names_share_a_model(unknown):
    """Names belong to a score, not to the model that it was computed with."""
    answer = sequence(24)[:PROMPT], sequence(24)[PROMPT:].tolist()
    named, unnamed = Engine(structure=NAMES), Engine()
    (first,) = named.score(unknown, *answer)
    with pytest.raises(TypeError, match="name the modules"):
        unnamed.score(unknown, *answer)
    (again,) = named.score(unknown, *answer)
    assert (first.mi == again.mi).all()
    assert first.settings.to_dict()["structure"] == NAMES


def test_names_reach_a_benchmark():
    model, stats = whitebox("llama"), {"greedy_tokens": [[40, 77, 131]]}
    right, wrong = (
        MaskedHeadsCalculator(structure={"projection": path})
        for path in ("self_attn.o_proj", "self_attn.q_proj")
    )
    found, plain = (
        calculator(stats, ["Who built it?"], model)["asmi"][0][0.6]["mi"].tolist()
        for calculator in (right, MaskedHeadsCalculator())
    )
    assert found == plain
    with pytest.raises(TypeError, match=r"layer 0 whose .*the first is 'self_attn.o_proj'"):
        wrong(stats, ["Who built it?"], model)
