"""LM-Polygraph's batches, read safely: exact prompt ids, responses without batch padding."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from lm_polygraph.utils.model import Model
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.model import family_of


def causal_model(model: Model) -> PreTrainedModel:
    """The transformers model inside LM-Polygraph's `WhiteboxModel`.

    Raises:
        TypeError: a black-box, encoder-decoder, visual or vLLM model, or an unknown family.
    """
    kind = getattr(model, "model_type", type(model).__name__)
    if kind != "CausalLM":
        raise TypeError(
            f"ASMI masks attention heads inside a causal transformers model, but this run has a "
            f"model of type {kind}. Use a WhiteboxModel of type CausalLM: black-box, vLLM and "
            "encoder-decoder models give no access to such layers"
        )
    family_of(model.model)
    return model.model


def prompt_ids(model: Model, text: str, row: int, stats: Mapping[str, Any]) -> Int[Tensor, " P"]:
    """Token ids of one prompt, unpadded.

    The host's `input_tokens` are padded rows without a mask, from which padding cannot be told
    when it shares its id with another special token; so the prompt is tokenised again on its own,
    chat template included, and compared.

    Raises:
        ValueError: the two disagree.
    """
    ids = model.tokenize([text])["input_ids"][0]
    if "input_tokens" in stats:
        padded = torch.as_tensor(stats["input_tokens"][row])
        if not (padded[-len(ids) :].equal(ids) or padded[: len(ids)].equal(ids)):
            raise ValueError(
                f"prompt {row} of the batch tokenises to other ids alone than in its batch; "
                "ASMI would score another prompt than was answered. Use batch_size: 1"
            )
    return ids


def stop_strings(model: Model) -> list[str]:
    """Strings that end a generation, as configured in `generation_params`."""
    return list(getattr(model.generation_parameters, "stop_strings", None) or [])


def closes(tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, stops: list[str]) -> bool:
    """Whether the last token ends the answer: the end token, or the end of a stop string."""
    if tokens[-1] == tokenizer.eos_token_id:
        return True
    return any(stop in tokenizer.decode(list(tokens)) for stop in stops)


def response_ids(
    tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase, stops: list[str], batch_size: int
) -> list[int]:
    """A generated row as it would have come out of a batch of one.

    In a larger batch a row that ended at a stop string goes on with padding until its longest
    mate is done, and the host keeps that padding as if it were generated.
    """
    tokens = list(tokens)
    if batch_size == 1 or not tokens:
        return tokens
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        while len(tokens) > 1 and tokens[-1] == tokenizer.pad_token_id:
            tokens.pop()
    for length in range(1, len(tokens)) if stops else ():
        text = tokenizer.decode(tokens[:length])
        if any(stop in text for stop in stops):
            return tokens[:length]
    return tokens
