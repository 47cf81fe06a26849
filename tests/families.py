"""A tiny random model of every family ASMI knows, with the traits that could break it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY = 61
STRUCTURES: dict[str, object] = {}
"""By recipe."""

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MIXED_LAYERS = ["sliding_attention", "full_attention"] * 2
WINDOW = SIZES | {"sliding_window": 5}

CONFIGS = {
    "llama": ("LlamaConfig", SIZES),
    "llama-tied": ("LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "mistral-window": ("MistralConfig", WINDOW),
    "qwen2-window": ("Qwen2Config", WINDOW | {"use_sliding_window": True, "max_window_layers": 2}),
    "qwen3-qk-norm": ("Qwen3Config", SIZES | {"head_dim": 16}),
    "gemma2-softcap": ("Gemma2Config", WINDOW | {
        "head_dim": 8, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5,
    }),
    "gemma3-mixed": ("Gemma3TextConfig", WINDOW | {
        "head_dim": 16, "query_pre_attn_scalar": 8, "layer_types": MIXED_LAYERS,
    }),
    "phi3": ("Phi3Config", SIZES),
    "olmo2": ("Olmo2Config", SIZES),
    "gpt-neox": ("GPTNeoXConfig", {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "gpt2": ("GPT2Config", {
        "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128,
        "bos_token_id": 1, "eos_token_id": 2,
    }),
}  # fmt: skip


def tiny_model(name: str, attention: str = "eager", **overrides: object) -> "PreTrainedModel":
    """A random model in float32, evaluation mode, with weights large enough to disagree."""
    import torch
    import transformers

    config_class, sizes = CONFIGS[name]
    config = getattr(transformers, config_class)(**sizes | overrides)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    return model.eval()


def share_structure(model: "PreTrainedModel", recipe: str) -> None:
    """What is found in the first model of a recipe is known of the others until one is changed."""
    from lm_polygraph_asmi.core.model.structure import remember_structure, structure_of

    if recipe not in STRUCTURES:
        STRUCTURES[recipe] = structure_of(model)
    remember_structure(model, STRUCTURES[recipe])
