"""A model and its tokenizer from a folder, the cache or a hub; errors say what to do."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from lm_polygraph_asmi.host.smollm2 import GGUF_FILE, weights_folder

SMOLLM2 = "smollm2"
"""Name of the demo's model."""


def load_model(
    model_path: str,
    dtype: str = "auto",
    device_map: str | None = "auto",
    attn_implementation: str | None = "eager",
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> PreTrainedModel:
    """A causal language model, in evaluation mode.

    Args:
        model_path: folder, or name on a hub.
        dtype: "auto", or the name of one of torch's.
        device_map: as for transformers' `from_pretrained`.
        attn_implementation: eager by default because LM-Polygraph's RAUQ reads attention maps;
            ASMI's own passes follow the option `attention` of its calculator. None is
            transformers' choice.
        trust_remote_code: whether code that comes with the model may run.
        **kwargs: for `from_pretrained`, such as `gguf_file` or `revision`.

    Raises:
        OSError: no such folder, and no such model in the cache or on the hub.
        ValueError: no such dtype.
    """
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype must be auto or one of torch's, such as float32, got {dtype!r}")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map=device_map,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **kwargs,
        )
    except (OSError, HFValidationError) as error:  # the latter of older releases, of no folder
        raise OSError(
            f"the model {model_path} cannot be loaded: {_why(model_path, error)}"
        ) from error
    except ValueError as error:
        if "Unrecognized model" not in str(error):
            raise
        raise ValueError(
            f"the model {model_path} cannot be loaded: its config.json is missing, or names no "
            "model_type. Name a folder as transformers' save_pretrained writes it; for weights in "
            "a GGUF file name the file, too (gguf_file)"
        ) from error
    return model.eval()


def _why(model_path: str, error: Exception) -> str:
    """Why there is no model, and what to do."""
    if Path(model_path).is_dir():
        return f"the folder is not complete. {error}"
    if model_path.startswith(("/", ".", "~")):  # no hub has such names
        return "there is no such folder. Name one that is there, or a model's name on a hub"
    return (
        "it is neither a folder here nor in the cache, and no hub gave it (no connection, no such "
        "name, or a licence to accept). Name a local folder (model.path in a config), or fetch it "
        f"once. {error}"
    )


def load_tokenizer(
    model_path: str, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """Its tokenizer, padding on the left as generation in batches needs.

    Raises:
        OSError: none there.
    """
    tokenizer = AutoTokenizer.from_pretrained(
        model_path, padding_side="left", trust_remote_code=trust_remote_code, **kwargs
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@lru_cache(maxsize=1)  # a notebook calls again and again
def load_named(
    name: str, gguf_file: str | None = None, dtype: str = "auto", device_map: str | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer by name, without progress bars; the last one is kept in memory.

    Args:
        name: folder, name on a hub, or "smollm2", the demo's.
        gguf_file: weights in this file of the folder.
        dtype: "auto", or the name of one of torch's.
        device_map: as for transformers' `from_pretrained`.

    Raises:
        OSError: no such model here, in the cache or on the hub.
        ValueError: no such dtype; another file or dtype for "smollm2".
    """
    if name == SMOLLM2:
        if gguf_file is not None or dtype not in ("auto", "float32"):
            raise ValueError(
                f"{SMOLLM2} is one file, computed in float32: leave out gguf_file and dtype "
                f"(got {gguf_file!r}, {dtype!r})"
            )
        name, gguf_file, dtype = str(weights_folder()), GGUF_FILE, "float32"
    file: dict[str, Any] = {"gguf_file": gguf_file} if gguf_file else {}
    with quiet():
        model = load_model(name, dtype, device_map, attn_implementation=None, **file)
        return model, load_tokenizer(name, **file)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, notes and warnings of other libraries; errors are raised as ever."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        # Converting GGUF weights shows a bar that no setting of transformers hides.
        with redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
