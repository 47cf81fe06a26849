"""The masked passes: the layers from the target layer on, once per head mask."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.layers import (
    decoder_layers,
    final_norm,
    heads_width,
    num_heads,
    num_layers,
    output_projection,
    readout,
)
from lm_polygraph_asmi.model.memory import default_budget, in_chunks, suffix_bytes_per_mask
from lm_polygraph_asmi.model.session import scoring_session
from lm_polygraph_asmi.model.unmasked import UnmaskedPass, run_unmasked

# Largest difference in a log-probability between a replayed and an ordinary pass that the
# floating-point type explains.
REPLAY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
REPLAY_TOLERANCE_HALF = 0.5


@dataclass(frozen=True)
class Subnetworks:
    """Final states of the distinct subnetworks of one example and layer.

    Attributes:
        hidden: states after the final norm at the T response positions, one row per distinct mask.
        counts: how often each distinct mask was drawn; sums to S.
        index: for each of the S drawn masks, its row.
    """

    hidden: Float[Tensor, "distinct T D"]
    counts: Float[Tensor, " distinct"]
    index: Int[Tensor, " S"]


@contextmanager
def masked_heads(
    model: PreTrainedModel, layer: int, masks: Shaped[Tensor, "B H"]
) -> Iterator[None]:
    """Multiply each batch row's head outputs by its mask before the layer's output projection.

    Every position is masked and nothing is rescaled, as in the paper.
    """
    width = heads_width(model)

    def hook(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heads = args[0]
        if heads.shape[-1] != width:
            raise RuntimeError(
                f"the output projection takes {heads.shape[-1]} inputs, the heads make {width}: "
                "its path in lm_polygraph_asmi.model.FAMILIES is wrong for this model"
            )
        mask = masks.to(heads).repeat_interleave(heads.shape[-1] // masks.shape[-1], dim=-1)
        return (heads * mask[:, None, :], *args[1:])

    handle = output_projection(model, layer).register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def run_suffix(
    model: PreTrainedModel, unmasked: UnmaskedPass, layer: int, masks: Shaped[Tensor, "B H"]
) -> Float[Tensor, "B T D"]:
    """Final states at the response positions under each mask, all masks in one batch."""
    hidden = unmasked.layer_inputs[layer].expand(len(masks), -1, -1)
    with masked_heads(model, layer, masks):
        for index in range(layer, num_layers(model)):
            hidden = unmasked.layer_calls[index].replay(decoder_layers(model)[index], hidden)
    return final_norm(model)(hidden[:, unmasked.predicting])


def run_subnetworks(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    memory_budget: int | None = None,
) -> Subnetworks:
    """Run the suffix under S masks; equal masks once, the all-ones mask not at all.

    Call it inside `scoring_session`, with `layer` among the target layers of `unmasked`. The
    result does not depend on the budget beyond rounding.

    Args:
        memory_budget: bytes the passes may use above weights and cached states; by default half of
            the free device memory (on a CPU: 1 GiB). On a CUDA out-of-memory the chunk is halved
            and nothing computed is lost.

    Raises:
        ValueError: masks of the wrong shape, or not of zeros and ones.
    """
    heads = num_heads(model)
    if masks.ndim != 2 or masks.shape[1] != heads or not len(masks):
        raise ValueError(
            f"masks must have shape (S, H = {heads}), one column per query head, got "
            f"{tuple(masks.shape)}"
        )
    if not ((masks == 0) | (masks == 1)).all():
        raise ValueError("masks must hold 1 (keep) and 0 (mask) only")
    distinct, index, counts = masks.unique(dim=0, return_inverse=True, return_counts=True)
    unmasked_rows = distinct.all(dim=1)
    hidden = unmasked.final_hidden.new_empty(len(distinct), *unmasked.final_hidden.shape)
    hidden[unmasked_rows] = unmasked.final_hidden
    if not unmasked_rows.all():
        masked = distinct[~unmasked_rows]
        budget = memory_budget or default_budget(model.device)
        chunk = budget // suffix_bytes_per_mask(model, len(unmasked.input_ids))
        hidden[~unmasked_rows] = torch.cat(
            in_chunks(
                lambda part: run_suffix(model, unmasked, layer, masked[part]), len(masked), chunk
            )
        )
    return Subnetworks(hidden, counts.float(), index)


def subnetwork_log_probs(
    model: PreTrainedModel,
    input_ids: Int[Tensor, " N"],
    prompt_length: int,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    *,
    attention: str | None = None,
    memory_budget: int | None = None,
) -> Float[Tensor, "S T V"]:
    """Next-token log-probabilities of S subnetworks over a fixed response, by teacher forcing.

    Row t predicts input_ids[prompt_length + t]; T = N - prompt_length. Equals S full forward
    passes whose heads at `layer` are masked before the output projection at every position.
    Source: Algorithm 1 of the paper, lines 2 to 6.

    Args:
        model: a transformers causal language model of a family in `FAMILIES`; left as found.
        input_ids: one unpadded sequence, prompt and response.
        prompt_length: number of prompt tokens, at least 1.
        layer: index of the masked layer, from 0; see `target_layer`.
        masks: 1 keeps a query head, 0 masks it.
        attention: attention implementation of all passes; by default the model's own.
        memory_budget: bytes, see `run_subnetworks`.

    Raises:
        TypeError: an unknown model family.
        ValueError: an argument out of range; the message says which.
        FloatingPointError: NaN or infinite logits.
    """
    with scoring_session(model, attention):
        unmasked = run_unmasked(model, input_ids, prompt_length, [layer])
        subnetworks = run_subnetworks(model, unmasked, layer, masks, memory_budget)
        log_probs = readout(model, subnetworks.hidden)
    return log_probs[subnetworks.index.to(log_probs.device)]


def check_replay(model: PreTrainedModel, unmasked: UnmaskedPass, layer: int) -> None:
    """Raise unless replaying the suffix with all heads kept reproduces the model's own logits.

    A cheap guard, once per run, against a model or a transformers release whose layers do more
    than the family table says. Call it inside `scoring_session`.

    Raises:
        RuntimeError: the two differ by more than rounding.
    """
    keep_all = torch.ones(1, num_heads(model))
    replayed = readout(model, run_suffix(model, unmasked, layer, keep_all)[0])
    output = model(
        input_ids=unmasked.input_ids[None].to(model.device), use_cache=False, return_dict=True
    )
    ordinary = output.logits[0, unmasked.predicting].float().log_softmax(-1)
    difference = (replayed - ordinary.to(replayed.device)).abs().max().item()
    if not difference <= REPLAY_TOLERANCE.get(model.dtype, REPLAY_TOLERANCE_HALF):
        raise RuntimeError(
            f"replaying {type(model).__name__} from layer {layer} changes a log-probability by "
            f"{difference:.3g} nats. Its entry in lm_polygraph_asmi.model.FAMILIES does not fit "
            "this model or this transformers release; please report it"
        )
