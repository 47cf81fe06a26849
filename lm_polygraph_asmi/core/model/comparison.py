"""A diagnostic: the masked passes that scores of a model use, compared with full passes.

`polygraph_asmi check` and the tests call it; no score does.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.core.model.check import largest_rounding
from lm_polygraph_asmi.core.model.choice import MASKABLE, passes_to_try, reads_keys_and_values
from lm_polygraph_asmi.core.model.devices import execution_device
from lm_polygraph_asmi.core.model.masked import MaskedModel, masked_model
from lm_polygraph_asmi.core.model.memory import distributions_at_once, in_chunks
from lm_polygraph_asmi.core.model.passes import full_passes
from lm_polygraph_asmi.core.model.readout import readout
from lm_polygraph_asmi.core.model.rounding import variation
from lm_polygraph_asmi.core.model.session import ModelChanged
from lm_polygraph_asmi.core.model.subnetworks import run_subnetworks
from lm_polygraph_asmi.core.model.unmasked import run_unmasked

DEPTHS = (0.6, 0.9)
FLASH = "flash_attention_2"
CASES = ((12, 1), (70, 12), (3, 40))
"""Tokens of prompt and response: short, then a far longer prompt, then a far longer response."""
LONGEST = max(map(sum, CASES))


class Compared(NamedTuple):
    """Masked passes of one layer, scope and attention implementation, compared with full passes."""

    attention: str
    layer: int
    scope: str
    passes: str  # that score, after the self-check
    difference: float  # the largest `variation` of all masks and cases
    right: bool  # whether rounding explains it


def masked_log_probs(
    f: MaskedModel,
    input_ids: Tensor,  # (tokens,), which `run_unmasked` checks
    prompt_length: int,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    scope: str = "all",
    memory_budget: int | None = None,
) -> Float[Tensor, "S T V"]:
    """Log-probabilities of each subnetwork, by the passes of a score; in a session.

    Arguments and errors as of `run_unmasked` and `run_subnetworks`.
    """
    keep_keys_and_values = reads_keys_and_values(f, [layer], scope)
    unmasked = run_unmasked(f, input_ids, prompt_length, [layer], scope, keep_keys_and_values)
    subnetworks = run_subnetworks(f, unmasked, layer, masks, memory_budget)
    hidden, device = subnetworks.hidden, execution_device(f.lm_head)
    chunk = distributions_at_once(f.model, device, memory_budget) // hidden.shape[1]
    log_probs = torch.cat(in_chunks(partial(readout, f), hidden, chunk))
    return log_probs[subnetworks.index.to(log_probs.device)]


def compare_all(
    model: PreTrainedModel, text: Int[Tensor, " tokens"], structure: str | None = None
) -> tuple[list[Compared], dict[str, str]]:
    """Compare at two depths, in both scopes, with each attention implementation that there is; and
    why the others cannot be used.

    Args:
        text: ids of an ordinary text of `LONGEST` tokens.
        structure: as the setting of that name.

    Raises TypeError: the heads of the model cannot be masked; RuntimeError: see `check_unmasked`.
    """
    found, missing = list[Compared](), dict[str, str]()
    for attention in (*MASKABLE, FLASH):
        on_gpu = model.device.type == "cuda" and is_flash_attn_2_available()
        half = model.dtype in (torch.float16, torch.bfloat16)
        if attention == FLASH and not (on_gpu and half):
            missing[attention] = f"cannot use {model.dtype}" if on_gpu else "not on this machine"
            continue
        try:
            with masked_model(model, attention, structure) as f:
                layers = sorted({f.structure.layer_at(depth) for depth in DEPTHS})
                found += [_compared(f, text, at, scope) for at in layers for scope in SCOPES]
        except ModelChanged:
            raise
        except ValueError as error:
            missing[attention] = str(error)
    if not found:
        raise ValueError(f"nothing could be compared: {'; '.join({*missing.values()})}")
    return found, missing


def _compared(f: MaskedModel, text: Tensor, layer: int, scope: str) -> Compared:
    """Heads of odd, of even and of all numbers are masked."""
    heads = torch.arange(f.num_heads(layer))
    masks = torch.stack([heads % 2, 1 - heads % 2, 0 * heads])
    differences, right = list[float](), True
    for prompt, response in CASES:
        ids = text[: prompt + response]
        log_probs = masked_log_probs(f, ids, prompt, layer, masks, scope)
        unmasked = run_unmasked(f, ids, prompt, [], scope)
        truth = readout(f, full_passes(f, unmasked, layer, masks))
        differences += map(variation, truth, log_probs)
        allowed = largest_rounding(f, unmasked)
        right &= all(each <= allowed for each in differences[-len(masks) :])  # NaN is not
    worst = max(differences, key=lambda each: (math.isnan(each), each))
    return Compared(f.attention, layer, scope, passes_to_try(f, layer, scope).first, worst, right)
