"""Load script of the shipped configs, called by polygraph_eval with the `load_*_args`."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def load_model(
    model_path: str,
    dtype: str = "auto",
    device_map: str | None = "auto",
    attn_implementation: str = "eager",
    trust_remote_code: bool = False,
    **kwargs: str,
):
    """A causal language model, in evaluation mode.

    `attn_implementation` is eager by default because LM-Polygraph's RAUQ reads attention maps;
    ASMI's own passes follow the option `attention` of its calculator.

    Raises:
        OSError: no such folder, and no such model in the cache or on the hub.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            model_path,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            device_map=device_map,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
            **kwargs,
        )
    except OSError as error:
        raise OSError(
            f"the model {model_path} cannot be loaded: it is neither a folder here nor in the "
            "cache, and the hub did not give it (no connection, no such name, or a licence to "
            f"accept). Set model.path to a local folder, or fetch it once. {error}"
        ) from error
    return model.eval()


def load_tokenizer(model_path: str, trust_remote_code: bool = False, **kwargs: str | bool):
    """Its tokenizer, padding on the left as generation in batches needs."""
    tokenizer = AutoTokenizer.from_pretrained(
        model_path, padding_side="left", trust_remote_code=trust_remote_code, **kwargs
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
