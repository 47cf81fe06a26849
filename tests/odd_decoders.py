"""Small decoders that no library ships, each with one trait that could make a number wrong.

`heads_masked` is the ground truth: it takes a head's words away before anything reads them, one
full forward pass per mask, and asks nothing of the package.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from lm_polygraph_asmi.model import name_modules

VOCABULARY, WIDTH, HEADS, LAYERS = 61, 32, 4, 4


class OddConfig(PretrainedConfig):
    model_type = "odd"

    def __init__(self, **own: Any) -> None:
        self.vocab_size, self.hidden_size = VOCABULARY, WIDTH
        self.num_attention_heads, self.num_hidden_layers = HEADS, LAYERS
        super().__init__(**{"tie_word_embeddings": False} | own)


class Attention(nn.Module):
    """Plain heads, distant keys weighing less; traits change what is made of them."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.kept: Tensor | None = None  # the ground truth's, (tokens, heads)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def heads(self, x: Tensor, past: DynamicCache | None) -> Tensor:
        """(batch, tokens, heads, width)"""
        rows, tokens, _ = x.shape
        q, k, v = (f(x).view(rows, tokens, HEADS, -1).transpose(1, 2) for f in self.qkv)
        if past is not None:
            k, v = past.update(k, v, self.index)
        places = torch.arange(k.shape[2])
        away = places - places[-tokens:, None]
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + 0.1 * away
        said = (self.weights(scores.masked_fill(away > 0, float("-inf"))) @ v).transpose(1, 2)
        return said if self.kept is None else said * self.kept[..., None]

    @property
    def qkv(self) -> tuple[nn.Module, ...]:
        return self.q, self.k, self.v

    def project(self, heads: Tensor) -> Tensor:
        return self.o(heads.flatten(2))

    def forward(self, x: Tensor, past: DynamicCache | None = None) -> Tensor:
        return self.project(self.heads(x, past))


class Layer(nn.Module):
    attention: type[Attention] = Attention

    def __init__(self, index: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = self.attention(index)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def attend(self, x: Tensor, past: DynamicCache | None) -> Tensor:
        return self.attn(x, past)

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: DynamicCache | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        x = hidden_states + self.attend(self.norm(hidden_states), past_key_values)
        return x + self.mlp(self.mlp_norm(x))


class OddModel(PreTrainedModel):
    config_class, base_model_prefix = OddConfig, "model"

    def __init__(self, config: OddConfig, layer: type[Layer]) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer(index) for index in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: DynamicCache | None = None,
        use_cache: bool = False,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        past = past_key_values
        if use_cache and past is None:
            past = DynamicCache()
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x, past)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=past)


class OddForCausalLM(PreTrainedModel):
    config_class, base_model_prefix = OddConfig, "model"

    def __init__(self, config: OddConfig, layer: type[Layer] = Layer) -> None:
        super().__init__(config)
        self.model = OddModel(config, layer)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, **given: Any) -> CausalLMOutputWithPast:
        found = self.model(input_ids, **given)
        return CausalLMOutputWithPast(
            logits=self.lm_head(found.last_hidden_state), past_key_values=found.past_key_values
        )


def odd_decoder(trait: type[Layer] | type[Attention] = Layer) -> OddForCausalLM:
    """A random decoder whose layers, or their attention, are of a class of their own; its modules
    are named, as those of any class that the table does not have."""
    layer = trait if issubclass(trait, Layer) else type("Layer", (Layer,), {"attention": trait})
    torch.manual_seed(0)
    model = OddForCausalLM(OddConfig(), layer)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    name_modules(model, "layers=model.layers,projection=attn.o")
    return model.eval()


def heads_masked(
    model: OddForCausalLM, ids: Tensor, prompt: int, layer: int, masks: Tensor, scope: str = "all"
) -> Tensor:
    """Log-probabilities (S, T, V) of the response, heads of a layer masked in full passes."""
    found, first = [], prompt - 1 if scope == "response" else 0
    for mask in masks:
        masked = copy.deepcopy(model)
        for module in masked.model.layers[layer].modules():
            if isinstance(module, Attention):
                module.kept = torch.ones(len(ids) - 1, HEADS)
                module.kept[first:] = mask
        with torch.no_grad():
            logits = masked(ids[None, :-1]).logits[0, prompt - 1 :]
        found.append(logits.log_softmax(-1))
    return torch.stack(found)
