"""Algorithm 1 of the paper, "Sem-ASMI Uncertainty Estimation". Whatever is scored, is scored here.

Input x of P tokens; model f; layer l*; S samples, mask rate p, truncation K (`ASMIConfig`). Line 1,
the greedy answer y of T tokens, is the caller's: LM-Polygraph's, or that of a user.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from lm_polygraph_asmi.analysis.coverage import TOP_K
from lm_polygraph_asmi.maths import (
    agreement_on_support,
    disagreement,
    example_masks,
    mask_weights,
    most_likely,
    ranked,
    top_k_coverage,
    union_support,
)
from lm_polygraph_asmi.maths.scores import aggregate, token_scores
from lm_polygraph_asmi.model import (
    Subnetworks,
    UnmaskedPass,
    readout,
    run_subnetworks,
    run_unmasked,
    unembedding,
)
from lm_polygraph_asmi.model.check import keeps_cache
from lm_polygraph_asmi.model.memory import default_budget, in_chunks, reduction_bytes
from lm_polygraph_asmi.results.names import Settings
from lm_polygraph_asmi.scoring.statistics import concatenated


def unmasked_pass(
    model: PreTrainedModel, x_y: Int[Tensor, " P+T"], P: int, layers: list[int], scope: str
) -> UnmaskedPass:
    """Line 2: h_cache, the states that enter each layer to be masked."""
    # 2: h_cache <- f_pre(x, y)
    return run_unmasked(model, x_y, P, layers, scope, keeps_cache(model, layers, scope))


def token_statistics(
    model: PreTrainedModel,
    h_cache: UnmaskedPass,
    settings: Settings,
    details: Callable[..., dict[str, Tensor]] | None = None,
) -> dict[str, Any]:
    """Lines 3 to 8: MI_t, in nats, and A_t at each of the T positions of y, (T,) each.

    Args:
        details: more statistics of a few positions, for runs that ask for them.

    Returns:
        Fields of `scoring.statistics.AnswerStatistics`, these two among them.
    """
    start, config, P = time.perf_counter(), settings.config, h_cache.prompt_length
    x_y, T = h_cache.input_ids, len(h_cache.input_ids) - P
    seeding = x_y[:P] if config.seeded_by == "prompt" else x_y
    # 3, 4: for s = 1 to S, sample masks m^(s) in {0, 1}^H, m_h ~ Bernoulli(1 - p)
    seed, masks = example_masks(
        config.num_masks, settings.num_heads, config.mask_rate, config.mask_sampler, config.seed,
        settings.layer, seeding.tolist(),
    )  # fmt: skip
    # 5: {p_t^(s)} <- f_suf(h_cache; m^(s)) at positions of y, as states before the unembedding
    p = run_subnetworks(model, h_cache, settings.layer, masks, config.memory_budget)
    # Distributions are (distinct masks, T, V), the agreement kernel is (U, U): some positions, and
    # if one of these is too large, some rows of its kernel, at a time.
    W_lm, distinct = unembedding(model), len(p.hidden)
    per_position, per_row = reduction_bytes(distinct, config.top_k, W_lm)
    budget = int(config.memory_budget or default_budget(W_lm.device))
    union = min(distinct * config.top_k, len(W_lm))
    rows = max(1, min(union, (budget - per_position) // per_row))
    reduce = partial(_reduced, model, W_lm, p, config.top_k, x_y[P:], rows, details)
    parts = in_chunks(reduce, range(T), budget // (per_position + rows * per_row))
    return {
        **concatenated(parts),
        "mask_seed": seed,
        **({} if details is None else {"masks": masks.to(torch.bool).numpy()}),
        "masked_seconds": time.perf_counter() - start,
    }


def _reduced(
    model: PreTrainedModel,
    W_lm: Float[Tensor, "V D"],
    p: Subnetworks,
    K: int,
    y: Int[Tensor, " T"],
    kernel_rows: int,
    details: Callable[..., dict[str, Tensor]] | None,
    at: range,
) -> dict[str, np.ndarray]:
    """Lines 7 and 8 at a few positions; no array of size V leaves the device."""
    log_probs = readout(model, p.hidden[:, at.start : at.stop])
    device = log_probs.device
    counts, index, W_lm = p.counts.to(device), p.index.to(device), W_lm.to(device)
    share, by_rank = mask_weights(counts, len(counts)).to(device), ranked(log_probs, max(K, *TOP_K))
    # 7: form top-K union support and tail-bucket distributions
    support = union_support(log_probs, K, by_rank)
    # 8: compute MI_t and A_t, equations "mi" and "agreement"
    information = disagreement(support, counts)
    found = {
        "mi": information.mutual_information,
        "agreement": agreement_on_support(support, W_lm, counts, kernel_rows),
        "entropy_of_mean": information.entropy_of_mean,
        "mean_entropy": information.mean_entropy,
        "tail_mass": share @ support.tail,
        "coverage": torch.einsum(
            "s,stk->tk", share, top_k_coverage(log_probs, TOP_K, by_rank)
        ).float(),
        "top_token": most_likely(by_rank)[index].int(),
    }
    if details is not None:
        found |= details(log_probs, information, W_lm, p, y[at.start : at.stop])
    return {name: value.cpu().numpy() for name, value in found.items()}


def token_uncertainty(mi: Any, agreement: Any, alpha: float = 1.0) -> Any:
    """u_t of line 9, nats: of one token, or an array; alpha 0: ASMI, 1: Sem-ASMI, else Adapt-ASMI's
    gate of the sampled answers."""
    # 9: MI_t (1 - A_t)
    return token_scores(mi, agreement, alpha)


def sequence_uncertainty(u: Sequence[float] | np.ndarray, aggregation: str = "mean") -> float:
    """U(x, y) of line 9, from u_t of the tokens that count, nats; higher = more uncertain.

    Args:
        aggregation: the paper's mean, or another of `config.AGGREGATIONS`.
    """
    # 9: U <- 1 / T sum over t
    return aggregate(u, aggregation)
