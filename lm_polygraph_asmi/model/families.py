"""Where some model families keep the modules that ASMI touches.

All other models are looked at (`structure`); an entry here spares that for the class of that name
in transformers. One that is added spares the search and not the checks, also for classes made from
its own.
`tests/model/test_families.py` runs every check of the project on every entry and fails when a
transformers release moves a module.
"""

from dataclasses import dataclass

import transformers
from torch import nn


@dataclass(frozen=True)
class Family:
    """Dotted module paths of one family.

    Attributes:
        layers: from the model to its list of decoder layers.
        output_projection: from a decoder layer to the projection whose input is the concatenation
            of the H head outputs.
        final_norm: from the model to the norm between the last layer and the output projection.

    Example:
        >>> FAMILIES["MyForCausalLM"] = Family(
        ...     layers="model.layers", output_projection="self_attn.o_proj", final_norm="model.norm"
        ... )
        >>> FAMILIES["MyForCausalLM"] == FAMILIES["LlamaForCausalLM"]
        True
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


_SHIPPED = dict(FAMILIES)


def family_entry(model: nn.Module) -> Family | None:
    """The entry of a model's class or of the nearest class it is made from; None without one.

    What stands above was seen of transformers' own classes, and says nothing of others that are
    made from them or have their names.
    """
    for kind in type(model).__mro__:
        entry = FAMILIES.get(kind.__name__)
        if entry is None:
            continue
        if entry is not _SHIPPED.get(kind.__name__):
            return entry
        return entry if type(model) is getattr(transformers, kind.__name__, None) else None
    return None


def is_shipped(entry: Family) -> bool:
    """Whether an entry stands above, and was not added."""
    return any(entry is shipped for shipped in _SHIPPED.values())
