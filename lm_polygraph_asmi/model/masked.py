"""The subnetworks of an answer: every distinct mask runs once, in chunks that fit into memory."""

import logging
import time
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.model.check import (
    PASSES,
    Pass,
    check_unmasked,
    checked,
    failure,
    keeps_cache,
)
from lm_polygraph_asmi.model.devices import execution_device
from lm_polygraph_asmi.model.heads import output_embeddings, plain_model
from lm_polygraph_asmi.model.layers import num_heads
from lm_polygraph_asmi.model.memory import (
    batch_bytes,
    default_budget,
    in_chunks,
    largest_chunk,
    packed_bytes,
    rows_bytes,
)
from lm_polygraph_asmi.model.passes import (
    UnmaskedPass,
    full_passes,
    packed,
    rows_after_prompt,
    run_unmasked,
)
from lm_polygraph_asmi.model.readout import readout
from lm_polygraph_asmi.model.session import scoring_session

log = logging.getLogger("lm_polygraph")

PACKED_POSITIONS = {"cpu": 256}
"""Most response positions in one packed sequence, by type of device. Each is compared with all
others, so longer ones cost a processor more than fewer passes save."""
PACKED_ON_GPU = 4096


def rounding(dtype: torch.dtype) -> float:
    """Largest difference in a log-probability, in nats, that a floating-point type explains."""
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 0.5)


@dataclass(frozen=True)
class Subnetworks:
    """Final states of the distinct subnetworks of one example and layer.

    Attributes:
        hidden: states after the final norm at the T response positions, one row per distinct mask.
        counts: how often each distinct mask was drawn; sums to S.
        index: for each of the S drawn masks, its row.
        check_seconds: time of the comparison with full passes, 0 if none was needed.

    Example:
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     subnetworks = run_subnetworks(model, unmasked, 2, masks)
        >>> isinstance(subnetworks, Subnetworks), subnetworks.index
        (True, tensor([1, 0, 0]))
    """

    hidden: Float[Tensor, "distinct T D"]
    counts: Float[Tensor, " distinct"]
    index: Int[Tensor, " S"]
    check_seconds: float = 0.0


def masks_per_pass(
    model: PreTrainedModel, unmasked: UnmaskedPass, total: int, budget: int, way: Pass
) -> int:
    """How many of `total` masks to run together within `budget` bytes; at least one."""
    length, before = len(unmasked.final_hidden), unmasked.before
    if way is packed:
        device = unmasked.final_hidden.device.type
        total = min(total, max(1, PACKED_POSITIONS.get(device, PACKED_ON_GPU) // length))
        needed = partial(packed_bytes, model, positions=length, cached=before)
    elif way is rows_after_prompt:
        needed = partial(rows_bytes, model, positions=length, cached=before)
    else:
        needed = partial(batch_bytes, model, positions=before + length)
    return largest_chunk(total, needed, budget)


def run_subnetworks(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    memory_budget: int | None = None,
    shortcut: bool = True,
) -> Subnetworks:
    """Run the masked passes of S masks; equal masks once, the all-ones mask not at all.

    Call it in `scoring_session`, with `layer` among the target layers of `unmasked`; see `check`.

    Args:
        memory_budget: bytes the passes may use above weights and cached states; by default half of
            the free device memory (on a CPU: 512 MiB). On a CUDA out-of-memory the chunk is halved
            and nothing computed is lost.
        shortcut: False runs the all-ones mask like any other.

    Raises:
        RuntimeError: the self-check failed.
        ValueError: a layer without heads, masks of the wrong shape, or not of zeros and ones.

    Example:
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     subnetworks = run_subnetworks(model, unmasked, 2, masks)
        >>> subnetworks.hidden.shape, subnetworks.counts  # (distinct, T, D)
        (torch.Size([2, 2, 16]), tensor([2., 1.]))
    """
    check_masks(masks, num_heads(model, layer))
    # On the CPU, since indices from there fit states on any device.
    distinct, index, counts = masks.cpu().unique(dim=0, return_inverse=True, return_counts=True)
    unmasked_rows = distinct.all(dim=1) & shortcut
    hidden = unmasked.final_hidden.new_empty(len(distinct), *unmasked.final_hidden.shape)
    hidden[unmasked_rows] = unmasked.final_hidden
    start = time.perf_counter()
    check_unmasked(model, unmasked)
    seconds = time.perf_counter() - start
    if unmasked_rows.all():
        return Subnetworks(hidden, counts.float(), index, seconds)
    masked = distinct[~unmasked_rows]
    budget = memory_budget or default_budget(unmasked.final_hidden.device)
    names = checked(model, layer, unmasked.scope).names
    while True:
        start, wrong = time.perf_counter(), None
        way = PASSES[unmasked.scope][names[0]]
        chunk = masks_per_pass(model, unmasked, len(masked), budget, way)
        try:
            states = torch.cat(in_chunks(partial(way, model, unmasked, layer), masked, chunk))
        except (torch.OutOfMemoryError, FloatingPointError):
            raise
        except Exception as error:  # models raise different errors
            if way is full_passes:
                raise
            wrong = f"{type(error).__name__}: {error}"
        else:
            start = time.perf_counter()
            keys = unmasked.before + len(unmasked.final_hidden) * (chunk if way is packed else 1)
            wrong = failure(model, unmasked, layer, masked, states, keys)
        seconds += time.perf_counter() - start
        if wrong is None:
            hidden[~unmasked_rows] = states
            return Subnetworks(hidden, counts.float(), index, seconds)
        slow = names.pop(0)
        log.warning(
            "%s: %r failed the self-check (scope %s): %s. Using %r, which is slower",
            type(model).__name__, slow, unmasked.scope, wrong, names[0],
        )  # fmt: skip


def check_masks(masks: Shaped[Tensor, "S H"], heads: int) -> None:
    """Raise ValueError unless masks are zeros and ones, a column for each head."""
    if masks.ndim != 2 or masks.shape[1] != heads or not len(masks):
        raise ValueError(
            f"masks must have shape (S, H = {heads}), one column per query head, got "
            f"{tuple(masks.shape)}"
        )
    if not ((masks == 0) | (masks == 1)).all():
        raise ValueError("masks must contain only 1 (keep) and 0 (mask)")


def subnetwork_log_probs(
    model: nn.Module,
    input_ids: Int[Tensor, " N"],
    prompt_length: int,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    *,
    scope: str = "all",
    attention: str | None = None,
    memory_budget: int | None = None,
) -> Float[Tensor, "S T V"]:
    """Next-token log-probabilities of S subnetworks over a fixed response, by teacher forcing.

    Row t predicts input_ids[prompt_length + t]; T = N - prompt_length. Equals S full forward
    passes whose heads at `layer` are masked before the output projection at every position
    (scope "all"; source: Algorithm 1 of the paper, lines 2 to 6), or only at the positions that
    predict the response, input_ids[prompt_length - 1 : N - 1] (scope "response"). The passes run
    over the first N - 1 tokens; that is the same unless a model's rotary angles depend on the
    length (LongRoPE, at the one length where it switches).

    Args:
        model: a decoder-only transformers language model, also inside a wrapper of PEFT; left as
            found.
        input_ids: one unpadded sequence, prompt and response.
        prompt_length: number of prompt tokens, at least 1.
        layer: index of the masked layer, from 0; see `target_layer`.
        masks: 1 keeps a query head, 0 masks it.
        scope: positions at which heads are masked, "all" or "response".
        attention: attention implementation of all passes; by default the model's own.
        memory_budget: bytes, see `run_subnetworks`.

    Raises:
        TypeError: the heads cannot be masked; the message gives the reason.
        RuntimeError: the self-check failed (see `check`).
        ValueError: an argument out of range; the message says which.
        FloatingPointError: logits that are no distribution, as `readout`.

    Example:
        >>> log_probs = subnetwork_log_probs(model, ids, 6, 2, masks)
        >>> log_probs.shape  # (S, T, V)
        torch.Size([3, 2, 50])
        >>> unmasked = model.eval()(ids[None]).logits[0, 5:7].log_softmax(-1)
        >>> torch.allclose(log_probs[0], unmasked, atol=1e-5)  # the first mask keeps every head
        True
    """
    decoder = plain_model(model)
    ASMIConfig(scope=scope)  # raises for invalid values
    with scoring_session(decoder, attention):
        keep = keeps_cache(decoder, [layer], scope)
        unmasked = run_unmasked(decoder, input_ids, prompt_length, [layer], scope, keep)
        subnetworks = run_subnetworks(decoder, unmasked, layer, masks, memory_budget)
        hidden = subnetworks.hidden
        vocabulary = decoder.config.get_text_config().vocab_size
        per_mask = 12 * hidden.shape[1] * vocabulary  # float32 logits and what they pass through
        budget = memory_budget or default_budget(execution_device(output_embeddings(decoder)))
        log_probs = torch.cat(in_chunks(partial(readout, decoder), hidden, budget // per_mask))
    return log_probs[subnetworks.index.to(log_probs.device)]
