"""How much fits into memory at once, and what to do when it was too much."""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from lm_polygraph_asmi.model.layers import heads_width
from lm_polygraph_asmi.model.session import attention_of

log = logging.getLogger("lm_polygraph")
Result = TypeVar("Result")

CPU_BUDGET = 2**30


def default_budget(device: torch.device) -> int:
    """Bytes for masked passes: half of the free device memory, or 1 GiB on a CPU.

    Larger batches do not make a CPU faster, so its figure is small on purpose.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free // 2
    return CPU_BUDGET


def pass_bytes(model: PreTrainedModel, num_queries: int, num_keys: int) -> int:
    """Peak bytes of one decoder layer's activations over `num_queries` positions in all.

    A count of the tensors alive at once: residual stream and norm output, the attention
    projections, the gated MLP, and, under eager attention, the score matrices.

    Args:
        num_keys: how many positions each of them attends to.
    """
    config = model.config.get_text_config()
    hidden = config.hidden_size
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    per_query = 4 * hidden + max(4 * heads_width(model), 3 * intermediate)
    if attention_of(model) == "eager":
        per_query += 3 * config.num_attention_heads * num_keys
    return num_queries * (per_query * model.dtype.itemsize + num_keys)


def largest_chunk(total: int, bytes_of: Callable[[int], int], budget: int) -> int:
    """How many of `total` items fit into `budget` bytes together; at least one."""
    return max((n for n in range(1, total + 1) if bytes_of(n) <= budget), default=1)


def in_chunks(run: Callable[[slice], Result], total: int, chunk: int) -> list[Result]:
    """Results of `run` on consecutive slices of range(total), in order.

    On a CUDA out-of-memory the slices are halved and the work goes on where it stopped, so nothing
    computed is lost.

    Raises:
        torch.OutOfMemoryError: even a single item does not fit.
    """
    done: list[Result] = []
    start, chunk = 0, max(1, min(total, chunk))
    while start < total:
        try:
            done.append(run(slice(start, start + chunk)))
            start += chunk
        except torch.OutOfMemoryError:
            if chunk == 1:
                raise
            chunk = (chunk + 1) // 2
            torch.cuda.empty_cache()
            log.warning("ASMI ran out of device memory and goes on in pieces of %d", chunk)
    return done
