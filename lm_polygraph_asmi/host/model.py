"""LM-Polygraph's models and batches, read safely: the model inside, exact prompt ids."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.model import plain_model, structure_of

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model


def is_host_model(model: Any) -> "TypeGuard[Model]":
    """Whether this is one of LM-Polygraph's models, told without importing LM-Polygraph.

    Importing it takes seconds; a model of it can only exist where somebody has.
    """
    module = sys.modules.get("lm_polygraph.utils.model")
    return module is not None and isinstance(model, module.Model)


def causal_model(model: "Model") -> PreTrainedModel:
    """The transformers model inside LM-Polygraph's `WhiteboxModel`.

    Raises:
        TypeError: a black-box, encoder-decoder, visual or vLLM model, or one whose heads cannot be
            masked.
    """
    kind = getattr(model, "model_type", type(model).__name__)
    if kind != "CausalLM":
        raise TypeError(
            f"ASMI masks attention heads inside a causal transformers model, but this run has a "
            f"model of type {kind}. Use a WhiteboxModel of type CausalLM: black-box, vLLM and "
            "encoder-decoder models give no access to such layers"
        )
    found = plain_model(model.model)
    structure_of(found)
    return found


def check_greedy(model: "Model") -> None:
    """Refuse a run whose "greedy" answers would be sampled.

    LM-Polygraph takes `do_sample` from what the model ships where the run does not set it, and its
    greedy decoding does not override it.

    Raises:
        ValueError: decoding would sample.
    """
    parameters = getattr(model, "generation_parameters", None)
    if getattr(parameters, "do_sample", False):
        raise ValueError(
            "generation_parameters.do_sample is true, so LM-Polygraph would sample the answers it "
            "calls greedy. Set generation_params.do_sample: false; sampled answers are drawn all "
            "the same"
        )


def prompt_ids(model: "Model", text: str, row: int, stats: Mapping[str, Any]) -> Int[Tensor, " P"]:
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
