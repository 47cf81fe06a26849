"""A model by name, made ready to score."""

from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from transformers import AutoModelForCausalLM, AutoTokenizer

from lm_polygraph_asmi.host.smollm2 import GGUF_FILE, weights_folder
from lm_polygraph_asmi.scoring.call import Scorer

SMOLLM2 = "smollm2"


def load(
    model: str,
    gguf_file: str | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    **settings: Any,
) -> Scorer:
    """A `Scorer` for a model in a folder, on a hub, or "smollm2", the demo's.

    Args:
        model: folder or name.
        gguf_file: weights in this file of the folder.
        dtype: "auto", or the name of one of torch.
        device_map: as for transformers' `from_pretrained`.
        **settings: of `Scorer`.

    Raises:
        OSError: no such model here, in the cache or on the hub.
        TypeError, ValueError: as `Scorer`; or no such dtype.
    """
    if model == SMOLLM2:
        model, gguf_file, dtype = str(weights_folder()), GGUF_FILE, "float32"
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"dtype must be auto or one of torch's, such as float32, got {dtype!r}")
    file = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map=device_map,
            **file,
        )
        tokenizer = AutoTokenizer.from_pretrained(model, **file)
    except (OSError, HFValidationError) as error:  # older releases, of a missing folder
        raise OSError(
            f"the model {model} cannot be loaded: it is neither a folder here nor in the cache, "
            f"and no hub gave it. {error}"
        ) from error
    return Scorer(loaded, tokenizer, **settings)
