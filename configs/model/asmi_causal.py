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
    """
    model = AutoModelForCausalLM.from_pretrained(
        model_path,
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        device_map=device_map,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        **kwargs,
    )
    return model.eval()


def load_tokenizer(model_path: str, trust_remote_code: bool = False, **kwargs: str | bool):
    """Its tokenizer, padding on the left as generation in batches needs."""
    tokenizer = AutoTokenizer.from_pretrained(
        model_path, padding_side="left", trust_remote_code=trust_remote_code, **kwargs
    )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
