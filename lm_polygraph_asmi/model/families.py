"""Where each model family keeps the modules that ASMI touches. The only place that knows.

A new family is one line here. `tests/model/test_families.py` runs every check of the project on
every entry and fails when a transformers release moves a module.
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


def family_of(model: nn.Module) -> Family:
    """The family of a transformers causal language model.

    Raises:
        TypeError: a class that is not in `FAMILIES`; the message says what to add.
    """
    name = type(model).__name__
    if name not in FAMILIES:
        raise TypeError(
            f"ASMI does not know the model class {name}. Known: {', '.join(sorted(FAMILIES))}. "
            "If it is a decoder-only transformers model whose attention heads are concatenated "
            "before one output projection, add an entry, in the model's load script say: "
            f"lm_polygraph_asmi.model.FAMILIES[{name!r}] = Family(layers='model.layers', "
            "output_projection='self_attn.o_proj', final_norm='model.norm'); encoder-decoder "
            "models and models served by vLLM expose no such layers and cannot be scored"
        )
    return FAMILIES[name]
