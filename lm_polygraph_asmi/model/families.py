"""Where some model families keep the modules that ASMI touches.

All other models are looked at (`structure`); an entry here spares that, or says otherwise.
`tests/model/test_families.py` runs every check of the project on every entry and fails when a
transformers release moves a module.
"""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Family:
    """Dotted module paths of one family.

    Attributes:
        layers: from the model to its list of decoder layers.
        output_projection: from a decoder layer to the projection whose input is the concatenation
            of the H head outputs.
        final_norm: from the model to the norm between the last layer and the output projection.
    """

    layers: str
    output_projection: str
    final_norm: str


_LLAMA_LIKE = Family("model.layers", "self_attn.o_proj", "model.norm")

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA_LIKE,
    "MistralForCausalLM": _LLAMA_LIKE,
    "Qwen2ForCausalLM": _LLAMA_LIKE,
    "Qwen3ForCausalLM": _LLAMA_LIKE,
    "Gemma2ForCausalLM": _LLAMA_LIKE,
    "Gemma3ForCausalLM": _LLAMA_LIKE,
    "Phi3ForCausalLM": _LLAMA_LIKE,
    "Olmo2ForCausalLM": _LLAMA_LIKE,
    "GPTNeoXForCausalLM": Family("gpt_neox.layers", "attention.dense", "gpt_neox.final_layer_norm"),
    "GPT2LMHeadModel": Family("transformer.h", "attn.c_proj", "transformer.ln_f"),
}


def family_entry(model: nn.Module) -> Family | None:
    """The entry of a model's class or of the nearest class it is made from; None without one."""
    named = (FAMILIES.get(kind.__name__) for kind in type(model).__mro__)
    return next((entry for entry in named if entry is not None), None)
