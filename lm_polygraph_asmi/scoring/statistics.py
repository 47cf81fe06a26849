"""Statistics of one answer at one depth, as `Engine.score` returns them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from lm_polygraph_asmi.results.names import Settings

MASKS_FIRST = ("top_token", "kl", "masked_log_likelihood")
"""Statistics of tokens whose axis 0 are the S masks; of all others, it is the T tokens."""

UNMASKED = (
    "tokens", "prompt_length", "entropy", "log_likelihood", "unmasked_seconds", "masked_seconds",
    "reused",
)  # fmt: skip
"""Fields of the answer, its unmasked pass and its time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerStatistics:
    """Statistics of an answer under S head masks at one layer.

    T: tokens of the answer, S: masks, H: heads of the layer. The unmasked model's are the same at
    every depth. "Support": the union of the subnetworks' top-K sets, and the rest as one token.

    Attributes:
        tokens: (T,) the scored token ids.
        prompt_length: tokens in the prompt.
        entropy: (T,) of the unmasked model over the whole vocabulary, nats, higher = more
            uncertain.
        log_likelihood: (T,) of each token under the unmasked model, nats, at most 0.
        mi: (T,) MI_t, nats, higher = more uncertain.
        agreement: (T,) A_t, in [0, 1], higher = closer in meaning.
        entropy_of_mean: (T,) of the averaged distribution on the support, nats.
        mean_entropy: (T,) mean over masks of the entropies on the support, nats.
        tail_mass: (T,) mean over masks of the mass outside the union.
        coverage: (T, 7) mean over masks of the mass of the top K, for each K of
            `analysis.coverage.TOP_K`.
        top_token: (S, T) most likely token of each subnetwork.
        mask_seed: seed of the masks.
        settings: in use, with those derived for the model.
        unmasked_seconds: spent on the unmasked pass, which other depths may share.
        masked_seconds: spent on this depth alone.
        reused: whether this depth was read from the result cache.
        masks: (S, H) 1 = kept; only with details, as all that follow.
        kl: (S, T) divergence of each subnetwork from the mean, nats.
        masked_log_likelihood: (S, T) of each token under each mask, over the whole vocabulary,
            nats, at most 0.
        candidates: (T, 8) most likely tokens of the averaged distribution.
        candidate_cosines: (T, 8, 8) cosines of their output-projection rows, not clipped.
    """

    tokens: Int[np.ndarray, " T"]
    prompt_length: int
    entropy: Float[np.ndarray, " T"]
    log_likelihood: Float[np.ndarray, " T"]
    mi: Float[np.ndarray, " T"]
    agreement: Float[np.ndarray, " T"]
    entropy_of_mean: Float[np.ndarray, " T"]
    mean_entropy: Float[np.ndarray, " T"]
    tail_mass: Float[np.ndarray, " T"]
    coverage: Float[np.ndarray, "T 7"]
    top_token: Int[np.ndarray, "S T"]
    mask_seed: int
    settings: Settings
    unmasked_seconds: float
    masked_seconds: float
    reused: bool
    masks: Bool[np.ndarray, "S H"] | None = None
    kl: Float[np.ndarray, "S T"] | None = None
    masked_log_likelihood: Float[np.ndarray, "S T"] | None = None
    candidates: Int[np.ndarray, "T 8"] | None = None
    candidate_cosines: Float[np.ndarray, "T 8 8"] | None = None

    def masked(self) -> dict[str, Any]:
        """What the masked layer adds, as plain values by name: what a run saves by depth."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in UNMASKED}
        values = {name: value for name, value in values.items() if value is not None}
        return values | {"settings": self.settings.to_dict()}


def concatenated(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Statistics of consecutive tokens, joined by name."""
    return {
        name: np.concatenate([part[name] for part in parts], axis=int(name in MASKS_FIRST))
        for name in parts[0]
    }
