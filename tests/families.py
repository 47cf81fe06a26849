"""One table of tiny random decoders, and the two ways to mask their heads: by the package's passes,
and by `brute_force`.

`CONFIGS` are the known families, with the traits that could break them; `KINDS` one representative
of each kind that no family stands for; `classes` all of transformers' registry of causal language
models. Their sizes are known by the names that configurations give them; what remains stands in
`OVERRIDES`, one line a class. Weights of norms are random too there, or a norm that is skipped or
applied twice would pass unseen. Paths of the projections are written out, not taken from the
package, so that what it finds cannot agree with itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core.maths import sample_head_masks
from lm_polygraph_asmi.core.model import (
    comparison,
    masked_model,
    plain_model,
    structure,
    structure_of,
    subnetworks,
)
from tests import brute_force

LAYERS, HEADS, WIDTH, VOCABULARY = 4, 4, 32, 61

OF_NAMES: dict[str, Any] = {
    name: size
    for size, names in (
        (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
        (WIDTH, """hidden_size n_embd d_model embedding_size word_embed_proj_dim
            input_embedding_size output_embedding_size emb_dim attention_hidden_size lru_width"""),
        (LAYERS, """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
            num_encoder_layers num_decoder_layers"""),
        (HEADS, """num_attention_heads n_head n_heads num_heads encoder_attention_heads
            decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
            swa_num_attention_heads attention_heads linear_num_value_heads linear_num_heads"""),
        (1, "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers"),
        (2, """num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups
            linear_num_key_heads o_groups num_experts_per_tok num_experts_per_token moe_topk moe_k
            top_k_experts n_mamba_heads mamba_expand mamba_n_groups mamba_ngroups n_groups"""),
        (4, """qk_rope_head_dim index_topk laurel_rank gated_norm_rank num_experts num_local_experts
            n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads mamba_dt_rank
            time_step_rank adapter_rank prompt_length"""),
        (5, "sliding_window window_size sliding_window_size attention_window_size"),
        (6, "local_attention attention_chunk_size"),
        (8, """head_dim v_head_dim attention_head_dim attention_head_size swa_head_dim dim_head
            d_head kv_channels linear_key_head_dim linear_value_head_dim linear_head_dim
            index_head_dim rotary_dim qk_nope_head_dim o_lora_rank hidden_size_per_layer_input
            mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size floor_scale
            query_pre_attn_scalar"""),
        (16, """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
            moe_shared_expert_intermediate_size shared_experts_intermediate_size q_lora_rank
            kv_lora_rank mamba_d_head mamba_head_dim mamba_headdim router_hidden_size"""),
        (48, """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dff dim_ff d_inner
            ffn_hidden_size intermediate_size_mlp feed_forward_size dense_intermediate_size
            shared_intermediate_size"""),
        (256, "max_position_embeddings n_positions max_seq_len n_ctx"),
    )
    for name in names.split()
} | {
    # So many that no key scores zero in all of them: ties are broken another way over a cache.
    "index_n_heads": 32, "topk_method": "greedy", "audio_config": None, "use_cache": True,
    "is_decoder": True, "is_encoder_decoder": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

SHARED_CHOICE = ["full", "full", "shared", "shared"]
"""Of keys: the upper layers attend to those that the second layer chose."""
OVERRIDES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "CohereCompassForCausalLM": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "DbrxForCausalLM": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "DoryForCausalLM": {"n_input_layers": 1, "n_output_layers": 1},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 2},
    "Gemma4ForCausalLM": {"num_kv_shared_layers": 2},
    "Gemma4ForConditionalGeneration": {"text_config": {"num_kv_shared_layers": 2}},
    "Gemma4UnifiedForCausalLM": {"num_kv_shared_layers": 2},
    "Gemma4UnifiedForConditionalGeneration": {"text_config": {"num_kv_shared_layers": 2}},
    "Gemma4UnifiedAssistantForCausalLM": {"text_config": {"num_kv_shared_layers": 0}},
    "GlmMoeDsaForCausalLM": {"indexer_types": SHARED_CHOICE},
    "MistralLarge4ForConditionalGeneration": {"text_config": {
        "kv_source_layers": [0, 1, 0, 1], "indexer_types": SHARED_CHOICE,
        "no_rope_layers": [1, 0, 1, 0],
    }},
    "Inkling2LoopForCausalLM": {
        "n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 3,
    },
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Mamba2ForCausalLM": {"num_heads": 8},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 32, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 4, "indexer_compress_ratio": 2, "ple_layer_ids": [1, 3], "ngram_size": 2,
        "ngram_vocab_size_base": 64, "split_ngram_parts": 1, "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 4,
    },
    "RecurrentGemmaForCausalLM": {"block_types": ["recurrent", "attention"]},
    "ZambaForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_head_dim": 16, "attention_hidden_size": 64,
    },
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_head_dim": 16,
        "attention_hidden_size": 64, "mamba_headdim": 32,
        "num_mem_blocks": 1, "num_key_value_heads": HEADS,
    },
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "Dots3NoteForCausalLM": {
        "num_key_value_heads": HEADS, "swa_num_attention_heads": HEADS,
        "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
        "swa_head_dim": 12, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8,
    },
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "MiniCPM3ForCausalLM": {"dim_model_base": 16},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "ReformerModelWithLMHead": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16)},
    "XmodForCausalLM": {"languages": ("en_XX",), "default_language": "en_XX"},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What a name does not tell."""


def with_longrope(config: PretrainedConfig) -> bool:
    """Give a configuration angles that switch beyond 16 positions; whether it takes any."""
    parts = [getattr(config, name, None) for name in config.sub_configs or {}]
    takes = [with_longrope(part) for part in parts if isinstance(part, PretrainedConfig)]
    angles = getattr(config, "rope_parameters", None)
    if not isinstance(angles, dict) or not angles:
        return any(takes)
    long = {"rope_type": "longrope", "original_max_position_embeddings": 16, "factor": 4.0,
            "short_factor": [1.0], "long_factor": [4.0]}  # fmt: skip
    nested = all(isinstance(of_kind, dict) for of_kind in angles.values())
    config.rope_parameters = (
        {kind: of_kind | long for kind, of_kind in angles.items()} if nested else angles | long
    )
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = 16
    return True


ALSO = ("MistralLarge4ForConditionalGeneration",)
"""Decoders that transformers loads as models of images and text alone."""


def classes() -> Iterator[tuple[str, type[PretrainedConfig], type[PreTrainedModel]]]:
    """Name, configuration class and model class of every class in the registry, each once."""
    seen = set()
    for model in [getattr(transformers, name) for name in ALSO if hasattr(transformers, name)]:
        yield model.__name__, model.config_class, model
    for config in MODEL_FOR_CAUSAL_LM_MAPPING:
        found = MODEL_FOR_CAUSAL_LM_MAPPING[config]
        for model in found if isinstance(found, tuple) else (found,):
            if model.__name__ not in seen:
                seen.add(model.__name__)
                own = model.config_class  # of the text alone, where a class has several
                yield model.__name__, own if isinstance(own, type) else config, model


def shrunk(config: type[PretrainedConfig], own: Mapping[str, Any]) -> PretrainedConfig:
    """A tiny configuration of a class; its parts, such as the text's, are shrunk alike."""
    default = config()
    parts = {
        name: part
        for name in config.sub_configs or {}
        if isinstance(part := getattr(default, name, None), PretrainedConfig)
    }
    names = {
        name
        for name in default.to_dict().keys() | getattr(config, "__annotations__", {}).keys()
        if not isinstance(getattr(config, name, None), property)
    }
    values = {name: OF_NAMES[name] for name in names & OF_NAMES.keys()}
    if "qk_rope_head_dim" in names:  # latent attention: keys are made for every head
        values["num_key_value_heads"] = HEADS
        if "head_dim" in names:
            values["head_dim"] = OF_NAMES["qk_rope_head_dim"]
    for name in names & {"layer_types", "mlp_layer_types"}:
        if kinds := getattr(default, name, None):
            values[name] = spread(kinds)
    for name, part in parts.items():
        values[name] = shrunk(type(part), own.get(name, {}))
    return config(**values | {name: own[name] for name in own.keys() - parts.keys()})


RUNS_FROM = {
    "GPTJForCausalLM": "5.2",  # before, it makes its own mask of a packed one: passes by rows
    "Lfm2ForCausalLM": "5.8",
    # Before, layers share keys and values in another way.
    **dict.fromkeys(("Gemma3nForCausalLM", "Gemma4ForCausalLM", "HYV4ForCausalLM"), "5.23"),
    **dict.fromkeys(("DbrxForCausalLM", "JambaForCausalLM", "ZambaForCausalLM"), "5.18"),
}
"""Releases of transformers in which tiny classes run here, and as listed, where not in all."""


def spread(kinds: list[str]) -> list[str]:
    """LAYERS kinds of layer in which each of a model's kinds comes, the last one first."""
    distinct = list(dict.fromkeys(reversed(kinds)))
    return [distinct[(i + 1) % len(distinct)] for i in range(LAYERS)]


def tiny_class(name: str, attention: str = "eager", **overrides: Any) -> PreTrainedModel:
    """The tiny random model of one class."""
    # Through `classes` all others would be imported as well.
    model = getattr(transformers, name, None)
    if model is None or Version(transformers.__version__) < Version(RUNS_FROM.get(name, "0")):
        pytest.skip(f"transformers {transformers.__version__} has no {name} that runs here")
    return tiny(model.config_class, model, attention, overrides)


def tiny(
    config: type[PretrainedConfig], model: type[PreTrainedModel], attention: str = "eager",
    overrides: Mapping[str, Any] | None = None,
    amend: Callable[[PretrainedConfig], object] = lambda _: None,
) -> PreTrainedModel:  # fmt: skip
    """A random model in float32 and evaluation mode, with weights large enough to disagree; `amend`
    changes its configuration in place before."""
    torch.manual_seed(0)
    made = shrunk(config, OVERRIDES.get(model.__name__, {}) | dict(overrides or {}))
    amend(made)
    found = model._from_config(made, attn_implementation=attention).float()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if parameter.is_floating_point() and parameter.ndim > 1:
                parameter.normal_(std=0.25)
            elif "norm" in name.lower() or "ln_" in name.lower():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return found.eval()


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


STRUCTURES: dict[str, object] = {}  # by recipe


def tiny_model(name: str, attention: str = "eager", **overrides: object) -> PreTrainedModel:
    """A random model in float32, evaluation mode, with weights large enough to disagree."""
    config_class, sizes = CONFIGS[name]
    config = getattr(transformers, config_class)(**sizes | overrides)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.25)
    return model.eval()


def share_structure(model: PreTrainedModel, recipe: str) -> None:
    """What is found in the first model of a recipe is known of the others until one is changed."""
    if recipe not in STRUCTURES:
        STRUCTURES[recipe] = structure_of(model)
    structure.remember_structure(model, STRUCTURES[recipe])


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
    # The layers of the keys and values that are shared lie above the masked one, or below.
    "shared keys and values": Decoder("Gemma4ForCausalLM", layer=0),
    "shared keys and values from below": Decoder("Gemma4ForCausalLM", layer=2),
    "streams, shared keys and values": Decoder("Gemma3nForCausalLM", layer=3),
    "streams, shared choice of keys": Decoder("HYV4ForCausalLM", layer=2),
    "latent attention, shared keys and values": Decoder(
        "MistralLarge4ForConditionalGeneration", layer=3, stack="model.language_model.layers"
    ),
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


both_scopes = pytest.mark.parametrize("scope", SCOPES)


@cache
def masks(number: int = 4) -> Tensor:
    return sample_head_masks(number, 4, 0.4, torch.Generator().manual_seed(2))


def sequence(length: int, seed: int = 7) -> Tensor:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(seed))


IDS, PROMPT = sequence(17), 11


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


def subnetwork_log_probs(
    model, input_ids, prompt_length, layer, masks, *,
    scope="all", memory_budget=None, **session,
):  # fmt: skip
    """Row t of (S, T, V) predicts input_ids[prompt_length + t]."""
    with masked_model(plain_model(model), **session) as f:
        return comparison.masked_log_probs(
            f, input_ids, prompt_length, layer, masks, scope, memory_budget
        )


def of_model(function, model, *arguments, **session):
    """What a function of the core finds in a session of its own."""
    with masked_model(plain_model(model), **session) as f:
        return function(f, *arguments)
