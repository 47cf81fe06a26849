"""A model's own generation config. Runs and scores use only its special tokens."""

from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

from lm_polygraph_asmi.host.loading import quiet

SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
HARMLESS = {
    *SPECIAL_TOKENS, "transformers_version", "max_length", "max_new_tokens", "use_cache",
    "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "num_return_sequences", "early_stopping", "length_penalty",
    "disable_compile", "compile_config", "is_assistant", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "trust_remote_code",
}  # fmt: skip
"""Settings that do not change answers or samples, or that every call sets anyway."""


def plain_generation(config: GenerationConfig) -> GenerationConfig:
    """A generation config with the given one's special tokens, and defaults for all else."""
    return GenerationConfig(**{name: getattr(config, name) for name in SPECIAL_TOKENS})


def shipped_settings(config: GenerationConfig) -> dict[str, Any]:
    """Settings of a generation config that can change answers or probabilities, by name.

    They are the settings that differ from transformers' defaults, without those of `HARMLESS` and
    those that are off (False, None or empty), so that settings of later releases are included.
    """
    defaults = {
        **GenerationConfig().to_dict(),
        # Newer releases fill these in during generation.
        **getattr(GenerationConfig, "_get_default_generation_params", dict)(),
        # No effect: newer releases ignore the first (of older Gemma); 1.0 means no guidance.
        "cache_implementation": "hybrid",
        "guidance_scale": 1.0,
    }
    return {
        name: value
        for name, value in config.to_dict().items()
        if not name.startswith("_") and name not in HARMLESS
        and value is not False and value not in (None, [], defaults.get(name))
    }  # fmt: skip


def read_shipped(model: Mapping[str, Any]) -> dict[str, Any]:
    """`shipped_settings` of a node `model`, read without weights; OSError if files are missing."""
    chosen = model.get("load_model_args") or {}
    if model.get("type", "CausalLM") != "CausalLM" or chosen.get("gguf_file"):
        return {}  # a model behind an API, or a GGUF file, which has no such settings
    where = {n: chosen[n] for n in ("revision", "cache_dir", "token") if chosen.get(n)}
    with quiet():
        try:
            shipped = GenerationConfig.from_pretrained(model["path"], **where)
        except OSError:  # like transformers, since older models have them in config.json
            shipped = GenerationConfig.from_pretrained(
                model["path"], config_file_name="config.json", _from_model_config=True, **where
            )
    return shipped_settings(shipped)
