"""The subnetworks of an example: every distinct mask runs once, in chunks that fit into memory."""

import time
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformers import PreTrainedModel

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.model.check import check_unmasked, select_strategy
from lm_polygraph_asmi.model.devices import execution_device
from lm_polygraph_asmi.model.layers import context_window, num_heads
from lm_polygraph_asmi.model.memory import default_budget, in_chunks, largest_chunk
from lm_polygraph_asmi.model.readout import readout
from lm_polygraph_asmi.model.session import scoring_session
from lm_polygraph_asmi.model.structure import output_embeddings, plain_model
from lm_polygraph_asmi.model.suffix import Strategy, run_suffix, strategies
from lm_polygraph_asmi.model.unmasked import UnmaskedPass, run_unmasked

# Longest packed sequence of response positions, if it holds more than one mask. Each position is
# compared with all others of its sequence, so longer ones cost more than fewer passes save.
PACKED_POSITIONS = 256


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
        check_seconds: time of the comparison with full forward passes, 0 if none was needed.

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
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    total: int,
    budget: int,
    strategy: Strategy | None = None,
) -> int:
    """How many of `total` masks to run together within `budget` bytes; at least one."""
    if strategy is None:
        strategy = next(strategies(model, unmasked, max(unmasked.targets, default=0)))
    if strategy.one_mask:
        return 1
    if strategy.packed:
        window = context_window(model) or PACKED_POSITIONS
        longest = min(PACKED_POSITIONS, window - unmasked.before.stop)
        total = min(total, max(1, longest // len(unmasked.final_hidden)))
    return largest_chunk(total, lambda n: strategy.bytes_of(model, unmasked, n), budget)


def run_subnetworks(
    model: PreTrainedModel,
    unmasked: UnmaskedPass,
    layer: int,
    masks: Shaped[Tensor, "S H"],
    memory_budget: int | None = None,
    shortcut: bool = True,
) -> Subnetworks:
    """Run the masked passes of S masks; equal masks once, the all-ones mask not at all.

    The result was checked against full forward passes, for this example or a similar one (see
    `check`); if all masks are ones, against the model's logits. Heads are masked in the scope of
    `unmasked`. Call it in `scoring_session`, with `layer` among the target layers of
    `unmasked`. The result does not depend on the budget beyond rounding.

    Args:
        memory_budget: bytes the passes may use above weights and cached states; by default half of
            the free device memory (on a CPU: 512 MiB). On a CUDA out-of-memory the chunk is halved
            and nothing computed is lost.
        shortcut: False runs the all-ones mask like any other.

    Raises:
        RuntimeError: the self-check failed.
        TypeError: a layer without attention heads.
        ValueError: masks of the wrong shape, or not of zeros and ones.

    Example:
        >>> with scoring_session(model):
        ...     unmasked = run_unmasked(model, ids, 6, [2])
        ...     subnetworks = run_subnetworks(model, unmasked, 2, masks)
        >>> subnetworks.hidden.shape, subnetworks.counts  # (distinct, T, D)
        (torch.Size([2, 2, 16]), tensor([2., 1.]))
    """
    heads = num_heads(model, layer)
    if masks.ndim != 2 or masks.shape[1] != heads or not len(masks):
        raise ValueError(
            f"masks must have shape (S, H = {heads}), one column per query head, got "
            f"{tuple(masks.shape)}"
        )
    if not ((masks == 0) | (masks == 1)).all():
        raise ValueError("masks must contain only 1 (keep) and 0 (mask)")
    # On the CPU, since indices from there fit states on any device.
    distinct, index, counts = masks.cpu().unique(dim=0, return_inverse=True, return_counts=True)
    unmasked_rows = distinct.all(dim=1) & shortcut
    hidden = unmasked.final_hidden.new_empty(len(distinct), *unmasked.final_hidden.shape)
    hidden[unmasked_rows] = unmasked.final_hidden
    if unmasked_rows.all():
        start = time.perf_counter()
        check_unmasked(model, unmasked)
        check_seconds = time.perf_counter() - start
    else:
        masked = distinct[~unmasked_rows]
        budget = memory_budget or default_budget(*unmasked.devices)
        chunk_sizes = {
            strategy.name: masks_per_pass(model, unmasked, len(masked), budget, strategy)
            for strategy in strategies(model, unmasked, layer)
        }
        start = time.perf_counter()
        strategy = select_strategy(model, unmasked, layer, masked, chunk_sizes)
        check_seconds = time.perf_counter() - start
        hidden[~unmasked_rows] = torch.cat(
            in_chunks(
                lambda part: run_suffix(model, unmasked, layer, masked[part], strategy),
                len(masked),
                chunk_sizes[strategy.name],
            )
        )
    return Subnetworks(hidden, counts.float(), index, check_seconds)


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
        unmasked = run_unmasked(decoder, input_ids, prompt_length, [layer], scope)
        subnetworks = run_subnetworks(decoder, unmasked, layer, masks, memory_budget)
        hidden = subnetworks.hidden
        vocabulary = decoder.config.get_text_config().vocab_size
        per_mask = 12 * hidden.shape[1] * vocabulary  # float32 logits and what they pass through
        budget = memory_budget or default_budget(execution_device(output_embeddings(decoder)))
        log_probs = torch.cat(
            in_chunks(lambda part: readout(decoder, hidden[part]), len(hidden), budget // per_mask)
        )
    return log_probs[subnetworks.index.to(log_probs.device)]
