"""Whether a prompt and its answer fit the model's context window, before the model is loaded."""

import json
import os
import unicodedata
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from lm_polygraph_asmi.core.model.structure import context_window
from lm_polygraph_asmi.host.loading import load_tokenizer

_CONFIG_ARGUMENTS = ("revision", "gguf_file", "trust_remote_code", "cache_dir", "token")
_SPECIAL_TOKENS = 8
"""More than tokenizers add to a text."""


class Window(NamedTuple):
    """The context window of a run's model; None tokens: unknown.

    `model` is the config's node as JSON, `instruct` whether prompts are put into the chat template.
    """

    tokens: int | None
    model: str
    instruct: bool

    def too_long(self, prompt: str, max_new_tokens: int) -> str | None:
        """Why a prompt does not fit with an answer of `max_new_tokens`; None if it does."""
        if self.tokens is None:
            return None
        # No tokenizer has more tokens than bytes, so most prompts need none, which is slow to load.
        size = max(len(text.encode()) for text in (prompt, unicodedata.normalize("NFKD", prompt)))
        if not self.instruct and size + _SPECIAL_TOKENS + max_new_tokens <= self.tokens:
            return None
        count = self.count(prompt)
        if count + max_new_tokens <= self.tokens:
            return None
        return (
            f"its {count} tokens and the {max_new_tokens} of an answer do not fit the context "
            f"window of {self.tokens}"
        )

    def count(self, prompt: str) -> int:
        """Number of the prompt's tokens, as LM-Polygraph makes them."""
        from lm_polygraph.utils.model import WhiteboxModel

        host: Any = SimpleNamespace(tokenizer=_tokenizer(self.model), instruct=self.instruct)
        return int(WhiteboxModel.tokenize(host, [prompt])["input_ids"].shape[1])


def read_window(model: Mapping[str, Any], instruct: bool) -> Window:
    """The context window of a config's node `model`; unknown for models without local weights."""
    node = json.dumps(dict(model), sort_keys=True, default=str)
    config = _config(node)
    return Window(None if config is None else context_window(config), node, instruct)


@lru_cache(maxsize=4)
def _config(model: str) -> PretrainedConfig | None:
    """The configuration of a model with local weights."""
    node = json.loads(model)
    if not node.get("path") or node.get("type") in ("Blackbox", "vLLMCausalLM", "VisualLM"):
        return None
    arguments = node.get("load_model_args") or {}
    chosen = {name: arguments[name] for name in _CONFIG_ARGUMENTS if arguments.get(name)}
    return AutoConfig.from_pretrained(node["path"], **chosen)


def read_config(model: Mapping[str, Any]) -> PretrainedConfig | None:
    """The configuration of a config's node `model`; None for models without local weights."""
    return _config(json.dumps(dict(model), sort_keys=True, default=str))


@lru_cache(maxsize=1)
def _tokenizer(model: str) -> PreTrainedTokenizerBase:
    """The tokenizer that polygraph_eval loads."""
    from lm_polygraph.utils.common import load_external_module

    node = json.loads(model)
    arguments = {"model_path": node["path"], **(node.get("load_tokenizer_args") or {})}
    # A relative path is relative to the config, as LM-Polygraph's are.
    config = Path(os.environ.get("HYDRA_CONFIG", ""))
    script = config.parent / (node.get("path_to_load_script") or "")
    if script.is_file():
        return load_external_module(str(script)).load_tokenizer(**arguments)
    return load_tokenizer(**arguments)
