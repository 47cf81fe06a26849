"""One table of decoders, each with a trait that could make a number wrong.

Paths of the layer that is masked, and of the projections in it, are written out, not taken from the
package, so that what it finds cannot agree with itself.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.core.maths import sample_head_masks
from lm_polygraph_asmi.core.model import subnetworks
from tests import brute_force
from tests.families import CONFIGS, tiny_model
from tests.registry import tiny_class

STACK, O_PROJ, H = "model.layers", "self_attn.o_proj", "transformer.h"


@dataclass(frozen=True)
class Decoder:
    """A tiny random model."""

    name: str  # of tests/families.py, or a class of the registry
    own: Mapping[str, Any] = field(default_factory=dict)  # what its configuration gets
    layer: int = 1  # to be masked
    stack: str = STACK  # path of the layers
    heads: str = O_PROJ  # path of the output projection in a layer

    def make(self, **how: Any) -> PreTrainedModel:
        make = tiny_model if self.name in CONFIGS else tiny_class
        return make(self.name, **self.own, **how)

    def projection(self, layer: int | None = None) -> str:
        return f"{self.stack}.{self.layer if layer is None else layer}.{self.heads}"


OTHERWISE = {"gpt-neox": ("gpt_neox.layers", "attention.dense"), "gpt2": (H, "attn.c_proj")}
FAMILIES = {name: Decoder(name, {}, 2, *OTHERWISE.get(name, (STACK, O_PROJ))) for name in CONFIGS}
"""The known families, with the traits that could break them."""

KINDS = {
    "mixture": Decoder("MixtralForCausalLM"),
    "sinks": Decoder("GptOssForCausalLM"),
    "latent attention": Decoder("DeepseekV3ForCausalLM", {"v_head_dim": 16}, 0),
    "indexed attention": Decoder("DeepseekV32ForCausalLM"),
    "gated indexed attention, windows": Decoder("Dots3NoteForCausalLM"),
    "gated indexed attention, hybrid": Decoder("Qwen4ExpForCausalLM"),
    "ALiBi": Decoder("MptForCausalLM", stack="transformer.blocks", heads="attn.out_proj"),
    "ALiBi, residual inside": Decoder("BloomForCausalLM", stack=H, heads="self_attention.dense"),
    "local layers": Decoder("GPTNeoForCausalLM", stack=H, heads="attn.attention.out_proj"),
    "chunks": Decoder("Llama4ForCausalLM"),
    "parallel residual": Decoder("GPTJForCausalLM", stack=H, heads="attn.out_proj"),
    "logit scale": Decoder("CohereForCausalLM", {"logit_scale": 0.5}),
    "gated hybrid": Decoder("Qwen3_5ForCausalLM"),
    "Mamba hybrid": Decoder("JambaForCausalLM"),
    "Mamba hybrid, shared layer": Decoder("ZambaForCausalLM", heads=f"shared_transf.{O_PROJ}"),
    "convolution hybrid": Decoder("Lfm2ForCausalLM", heads="self_attn.out_proj"),
    "widths by layer": Decoder("Gemma4ForCausalLM", {"num_kv_shared_layers": 0}),
    "shared keys and values": Decoder("Gemma4ForCausalLM", {"num_kv_shared_layers": 2}, 0),
    "multimodal wrapper": Decoder(
        "Gemma3ForConditionalGeneration", stack="model.language_model.layers"
    ),
    "norm behind the embedding": Decoder("NanoChatForCausalLM"),
    "norm inside the heads": Decoder("BitNetForCausalLM", {"hidden_size": 64}),
    "decoder of a translator": Decoder(
        "BartForCausalLM", stack="model.decoder.layers", heads="self_attn.out_proj"
    ),
    "no cache": Decoder("OpenAIGPTLMHeadModel", stack=H, heads="attn.c_proj"),
}
"""One representative of each kind that no family stands for."""

DECODERS = FAMILIES | KINDS


@cache
def masks(number: int = 4) -> Tensor:
    return sample_head_masks(number, 4, 0.4, torch.Generator().manual_seed(2))


def sequence(length: int, seed: int = 7) -> Tensor:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(seed))


def full_passes(
    decoder: Decoder, model: nn.Module, ids: Tensor, prompt: int, scope: str = "all",
    layer: int | None = None, drawn: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Log-probabilities (S, T, V) by the brute force, of `masks()` if no others are given."""
    drawn, index = (masks() if drawn is None else drawn).unique(dim=0, return_inverse=True)
    projection = decoder.projection(layer)
    axis = 0 if type(model.get_submodule(projection)).__name__ == "Conv1D" else 1
    found = brute_force.subnetwork_log_probs(model, projection, axis, ids, prompt, drawn, scope)
    return found[index]


@contextmanager
def unchecked() -> Iterator[None]:
    """The first pass of a class goes unseen, where a test itself compares what comes of it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("self_check", "check_unmasked"):
            patch.setattr(subnetworks, name, lambda *_: None)
        yield


def apart(p: Tensor, q: Tensor) -> float:
    """Total variation between log-probabilities, at the worst position."""
    return (p.exp() - q.exp()).abs().sum(-1).max().item() / 2
