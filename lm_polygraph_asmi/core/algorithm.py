"""Algorithm 1 of the paper, "Sem-ASMI Uncertainty Estimation", up to the statistics of tokens.

Input x of P tokens; model f; layer l*; S samples, mask rate p, truncation K (`Settings`). f is a
handle to the model in a session; no head of it is masked, but for as long as a masked pass runs.
Line 1, the greedy answer y of T tokens, is left to the caller: LM-Polygraph generates it, or a user
has it.
Lines 2 to 8 follow. Line 9 is in `scores`, which needs no model, so saved statistics can be scored
again.
"""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm_polygraph_asmi.core.maths import (
    Disagreement,
    agreement_on_support,
    cosines,
    disagreement,
    example_seed,
    mask_weights,
    most_likely,
    ranked,
    sample_head_masks,
    top_k_coverage,
    union_support,
)
from lm_polygraph_asmi.core.model import (
    MaskedModel,
    UnmaskedPass,
    check_unmasked,
    readout,
    reads_keys_and_values,
    run_subnetworks,
    run_unmasked,
    unembedding,
)
from lm_polygraph_asmi.core.model.memory import in_chunks, reduction_sizes
from lm_polygraph_asmi.core.statistics import CANDIDATES, TOP_K, Settings, concatenated


def unmasked_pass(
    f: MaskedModel, x_y: Int[Tensor, " tokens"], P: int, layers: list[int], scope: str
) -> UnmaskedPass:
    """Line 2 for each layer l* of `layers`; the paper's h^cache is the field `entering`.

    The whole model runs, not only f^pre: the unmasked distributions are used as well. Raises
    RuntimeError: they are not those of the model itself, see `check_unmasked`.

    `scope`: where heads will be masked, at all positions or only where the response is predicted.
    """
    # 2: h_cache <- f_pre(x, y)
    # The fastest masked passes of scope "response" (`passes.packed`) need the prompt's keys and
    # values besides h_cache. They are kept only then.
    keep = reads_keys_and_values(f, layers, scope)
    unmasked = run_unmasked(f, x_y, P, layers, scope, keep_keys_and_values=keep)
    check_unmasked(f, unmasked)
    return unmasked


def token_statistics(
    f: MaskedModel, unmasked: UnmaskedPass, settings: Settings, details: bool = False
) -> dict[str, Any]:
    """Lines 3 to 8: MI_t, in nats, and A_t at each of the T positions of y, (T,) each.

    Args:
        unmasked: what `unmasked_pass` returned.
        details: whether statistics of each mask, and of the most likely tokens, are added.

    Returns:
        Fields of `AnswerStatistics`, these two among them.
    """
    config, layer, K = settings.config, settings.layer, settings.config.top_k
    x_y, P = unmasked.input_ids, unmasked.prompt_length
    p, S = settings.operating_point
    # 3, 4: for s = 1 to S, sample masks m^(s) in {0, 1}^H, m_h ~ Bernoulli(1 - p)
    seeding = x_y[:P] if config.seeded_by == "prompt" else x_y
    seed = example_seed(config.seed, [layer, *seeding.tolist()])
    generator = torch.Generator().manual_seed(seed)
    masks = sample_head_masks(S, settings.num_heads, p, generator, config.mask_sampler)
    # 5: {p_t^(s)} <- f_suf(h_cache; m^(s)) at positions of y, as states before the unembedding
    # 6: end for
    subnetworks = run_subnetworks(f, unmasked, layer, masks, config.memory_budget)
    y, W_lm = x_y[P:], unembedding(f)
    # How many positions, and rows of the cosine matrix G in A_t, fit into memory at once.
    positions, rows_of_G = reduction_sizes(len(subnetworks.hidden), K, W_lm, config.memory_budget)

    def reduced(at: range) -> dict[str, np.ndarray]:
        """Statistics of a few positions; no array of size V leaves the device."""
        log_probs = readout(f, subnetworks.hidden[:, at.start : at.stop])
        weight = W_lm.to(log_probs.device)
        # Equal masks ran once: how often each row was drawn, and the row of each of the S draws.
        counts = subnetworks.counts.to(log_probs.device)
        row_of_draw = subnetworks.index.to(log_probs.device)
        share = mask_weights(counts, len(log_probs))  # counts / S
        by_rank = ranked(log_probs, max(K, *TOP_K))
        # 7: form top-K union support and tail-bucket distributions
        support = union_support(log_probs, K, by_rank)
        # 8: compute MI_t and A_t, equations "mi" and "agreement"
        information = disagreement(support, counts)
        agreement = agreement_on_support(support, weight, counts, rows_of_G)
        coverage = torch.einsum("s,stk->tk", share, top_k_coverage(log_probs, TOP_K, by_rank))
        statistics = {
            "mi": information.mutual_information,
            "agreement": agreement,
            "entropy_of_mean": information.entropy_of_mean,
            "mean_entropy": information.mean_entropy,
            "tail_mass": share @ support.tail,
            "coverage": coverage.float(),
            "top_token": most_likely(by_rank)[row_of_draw].int(),
        }
        if details:
            chosen = y[at.start : at.stop]
            statistics |= mask_details(log_probs, information, weight, share, row_of_draw, chosen)
        return {name: value.cpu().numpy() for name, value in statistics.items()}

    statistics = concatenated(in_chunks(reduced, range(len(y)), positions)) | {"mask_seed": seed}
    return statistics | ({"masks": masks.to(torch.bool).numpy()} if details else {})


def mask_details(
    log_probs: Float[Tensor, "distinct T V"],
    information: Disagreement,
    W_lm: Float[Tensor, "V D"],
    share: Float[Tensor, " distinct"],
    row_of_draw: Int[Tensor, " S"],
    y: Int[Tensor, " T"],
) -> dict[str, Tensor]:
    """Statistics of each drawn mask, and of the tokens that are most likely on average."""
    mean = torch.einsum("s,stv->tv", share, log_probs.double().exp())
    candidates = mean.topk(min(CANDIDATES, mean.shape[-1]), dim=-1).indices
    return {
        "kl": information.divergence_from_mean[row_of_draw].float(),
        "masked_log_likelihood": log_probs[:, range(len(y)), y][row_of_draw].float(),
        "candidates": candidates.int(),
        "candidate_cosines": cosines(W_lm[candidates]),
    }
