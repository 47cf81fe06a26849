"""How much fits into memory at once, and smaller chunks when memory runs out."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.core.model.masked import MaskedModel

log = logging.getLogger("lm_polygraph")
Result = TypeVar("Result")

CPU_BUDGET, GPU_BUDGET = 2**29, 2**33
"""Larger batches make neither faster (measured on an H200: 8 GB as fast as 65 GB)."""


def default_budget(device: torch.device) -> int:
    """Bytes for passes that run on a device: half of a GPU's free memory, at most 8 GiB; 512 MiB on
    a processor. The unmasked pass is not limited."""
    if device.type != "cuda":
        return CPU_BUDGET
    # Blocks that PyTorch has reserved and does not use are free, too.
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min((torch.cuda.mem_get_info(device)[0] + unused) // 2, GPU_BUDGET)


def batch_bytes(
    f: MaskedModel, num_masks: int, positions: int, cached: int = 0, packed: bool = False
) -> int:
    """Peak bytes of one decoder layer over some positions, once for each mask.

    Counts the tensors alive at once: residual stream, norm output, attention projections, gated
    MLP, and in eager attention the score matrices. Rows after a prompt also keep the keys and
    values of every layer.

    `cached`: keys before these positions. `packed`: one sequence after the same keys, not rows of a
    batch.
    """
    config, structure = f.model.config.get_text_config(), f.structure
    hidden, size, queries = config.hidden_size, f.model.dtype.itemsize, num_masks * positions
    keys = cached + (queries if packed else positions)
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    if isinstance(intermediate, Sequence):  # layer by layer
        intermediate = max(intermediate)
    per_query = size * (4 * hidden + max(6 * structure.width, 4 * intermediate))
    if f.attention == "eager":
        # Scores, their masked copy and the softmax, which 16-bit models compute in 32 bits.
        per_query += max(10, 3 * size) * next(iter(structure.heads.values())) * keys
    # 4: keys and values, kept and joined with others. Packed, of the layer that runs; in rows, of
    # every layer. 7: the parts of a packed attention mask, and its form that is added to scores.
    if packed:
        return queries * (per_query + 7 * keys) + 4 * cached * structure.width * size
    kept = 4 * num_masks * structure.num_layers * structure.width * size * keys if cached else 0
    return queries * per_query + kept


def reduction_sizes(
    distinct: int, top_k: int, unembedding: Float[Tensor, "V D"], memory_budget: int | None
) -> tuple[int, int]:
    """How many positions to reduce to their statistics at once, and how many rows of G at once.

    A position takes its distributions under the `distinct` masks, and G, the cosine matrix of the
    agreement with a row for each of the U tokens in the union of their top K. If one position is
    too much, some rows of G are computed at a time.
    """
    vocabulary, width = unembedding.shape
    kept = min(top_k, vocabulary)
    union = min(distinct * kept, vocabulary)
    # Distributions; ids sorted for the union; both reductions and their entropies.
    reduced = distinct * (16 * vocabulary + 48 * kept + 64 * union) + 8 * union * width
    budget, per_row = int(memory_budget or default_budget(unembedding.device)), 16 * union
    rows = max(1, min(union, (budget - reduced) // per_row))
    return budget // (reduced + rows * per_row), rows


def distributions_at_once(
    model: PreTrainedModel, device: torch.device, memory_budget: int | None
) -> int:
    """Number of next-token distributions that fit, with what they pass through in 32 bits."""
    vocabulary = model.config.get_text_config().vocab_size
    return int(memory_budget or default_budget(device)) // (32 * vocabulary)


def in_chunks(run: Callable[[Any], Result], items: Any, chunk: int) -> list[Result]:
    """Results of `run` on consecutive slices of a tensor, or range, in order.

    When a device's memory runs out, slices are halved and finished ones are kept. Raises
    torch.OutOfMemoryError: even a single item does not fit.
    """
    results: list[Result] = []
    start, chunk = 0, max(1, min(len(items), chunk))
    while start < len(items):
        try:
            results.append(run(items[start : start + chunk]))
            start += chunk
            continue
        except torch.OutOfMemoryError:
            if chunk == 1:
                raise
        # Outside the handler, which would keep the failed chunk's tensors alive.
        chunk = (chunk + 1) // 2
        torch.cuda.empty_cache()
        log.warning("ASMI ran out of device memory and continues in chunks of %d", chunk)
    return results
