"""Check that a prompt and its answer fit the context window, before the model is loaded."""

import os
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lm_polygraph.utils.common import load_external_module
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from lm_polygraph_asmi.core.model.structure import context_window
from lm_polygraph_asmi.host.loading import load_tokenizer
from lm_polygraph_asmi.host.prompts import prompt_token_ids
from lm_polygraph_asmi.inputs import as_chat


@dataclass(frozen=True)
class Window:
    """The context window of a run's model.

    Attributes:
        model: the config's node `model`.
        tokens: size of the context window; None: unknown.
        instruct: whether prompts are put into the chat template.
        maps: size of the sliding window of some layers. LM-Polygraph cannot read attention maps of
            an answer that crosses it (greedy_probs.py: `torch.vstack`). None: there is no such
            window, or no attention maps are read.
    """

    model: Mapping[str, Any]
    tokens: int | None
    instruct: bool = False
    maps: int | None = None

    def too_long(self, prompt: str, max_new_tokens: int) -> str | None:
        """Why a prompt with an answer of `max_new_tokens` does not fit; None if it fits."""
        if self.tokens is None:
            return None
        # A text has at least as many bytes as tokens, and a tokenizer adds at most 8 special ones.
        # So for most prompts, the tokenizer, which is slow to load, is not needed.
        size = max(len(text.encode()) for text in (prompt, unicodedata.normalize("NFKD", prompt)))
        safe = min(self.tokens, self.maps or self.tokens)
        if not self.instruct and size + 8 + max_new_tokens <= safe:
            return None
        count = self.count(prompt)
        if self.maps and count < self.maps < count + max_new_tokens - 1:
            return (
                f"its answer may cross the sliding window of {self.maps} tokens, where "
                "LM-Polygraph cannot read attention maps: leave RAUQ out, or use shorter prompts"
            )
        if count + max_new_tokens <= self.tokens:
            return None
        return (
            f"its {count} tokens and {max_new_tokens} tokens of an answer exceed the context "
            f"window of {self.tokens}"
        )

    def count(self, prompt: str) -> int:
        """Number of the prompt's tokens in LM-Polygraph."""
        return len(prompt_token_ids(self.tokenizer, as_chat(prompt) if self.instruct else prompt))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that polygraph_eval loads."""
        arguments = {
            "model_path": self.model["path"],
            **(self.model.get("load_tokenizer_args") or {}),
        }
        # As in LM-Polygraph, a relative path is relative to the config.
        config = Path(os.environ.get("HYDRA_CONFIG", ""))
        script = config.parent / (self.model.get("path_to_load_script") or "")
        if script.is_file():
            return load_external_module(str(script)).load_tokenizer(**arguments)
        return load_tokenizer(**arguments)


def read_window(
    model: Mapping[str, Any], config: PretrainedConfig | None, instruct: bool, maps: bool = False
) -> Window:
    """The context window of the model that a config's node `model` describes.

    Args:
        model: the node.
        config: the result of `read_config` for the node.
        instruct: see `Window`.
        maps: whether attention maps are read.
    """
    if config is None:
        return Window(model, None)
    text = config.get_text_config()
    differ = maps and len({*(getattr(text, "layer_types", None) or ())}) > 1
    sliding = getattr(text, "sliding_window", None) if differ else None
    return Window(model, context_window(config), instruct, sliding)


def read_config(model: Mapping[str, Any]) -> PretrainedConfig | None:
    """The configuration of a node `model`; None for a model without local weights."""
    if not model.get("path") or model.get("type") in ("Blackbox", "vLLMCausalLM", "VisualLM"):
        return None
    arguments = model.get("load_model_args") or {}
    names = ("revision", "gguf_file", "trust_remote_code", "cache_dir", "token")
    chosen = {name: arguments[name] for name in names if arguments.get(name)}
    return AutoConfig.from_pretrained(model["path"], **chosen)
