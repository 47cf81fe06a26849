"""Statistics of one answer at one depth, as `Engine.score` returns them, and their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.mask_plan import OperatingPoint, operating_point

TOP_K = (1, 8, 16, 32, 64, 128, 256)
"""The K of the paper's analysis of coverage; `coverage` is saved at these."""
CANDIDATES = 8
"""Tokens per position in the field `candidates`."""
MASKS_FIRST = ("top_token", "kl", "masked_log_likelihood")
"""Statistics of shape (S, T). Of the others that `concatenated` joins, axis 0 are the T tokens."""

NOT_BY_DEPTH = (
    "tokens", "prompt_length", "entropy", "log_likelihood", "likeliest", "unmasked_seconds",
    "masked_seconds", "reused",
)  # fmt: skip
"""Fields that a run does not save by depth: those of the unmasked model, and times."""


@dataclass(frozen=True)
class Settings:
    """A config with the attention in use, and what S and p depend on in the model.

    Saved with every example and depth, as a flat dictionary of plain values.
    """

    config: ASMIConfig
    layer: int  # index of the masked layer, from 0
    num_layers: int
    num_heads: int  # query heads
    requested_layer: int | None = None  # the one at `depth`, if it has no heads

    @property
    def operating_point(self) -> OperatingPoint:
        """p and S: those of the config; where it has none, derived from the number of heads."""
        return operating_point(self.num_heads, self.config.num_masks, self.config.mask_rate)

    def to_dict(self) -> dict[str, Any]:
        """All settings of a statistic by name; from the config, those of the masks."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "config"}
        used = {"attention": self.config.attention, **self.operating_point._asdict()}
        return self.config.to_dict("masks") | used | values


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerStatistics:
    """Statistics of an answer under S head masks at one layer.

    T: tokens of the answer, S: masks, H: heads of the layer; information and entropies in nats. The
    support is the union of the subnetworks' top-K sets and one bin for all other tokens.
    """

    tokens: Int[np.ndarray, " T"]
    prompt_length: int
    # Of the unmasked model's distributions over the whole vocabulary; the same at every depth.
    entropy: Float[np.ndarray, " T"]  # higher = more uncertain
    log_likelihood: Float[np.ndarray, " T"]  # at most 0
    # Of the subnetworks' distributions on the support.
    mi: Float[np.ndarray, " T"]  # MI_t, higher = more uncertain
    agreement: Float[np.ndarray, " T"]  # A_t in [0, 1], higher = closer in meaning; top-K only
    entropy_of_mean: Float[np.ndarray, " T"]  # of the averaged distribution
    mean_entropy: Float[np.ndarray, " T"]  # mean over masks
    tail_mass: Float[np.ndarray, " T"]  # mean over masks of the mass outside the union
    coverage: Float[np.ndarray, "T 7"]  # mean mass of the top K, for each K of `TOP_K`
    top_token: Int[np.ndarray, "S T"]  # the most likely one
    mask_seed: int
    settings: Settings  # in use, with those derived for the model
    # Until the unmasked pass has ended and was checked; other depths may share it.
    unmasked_seconds: float
    masked_seconds: float  # of this depth alone, with the self-check of masked passes
    reused: bool  # whether this depth was read from the result cache
    # The unmasked model's most likely tokens; None: stored by a release before 0.4.
    likeliest: Int[np.ndarray, " T"] | None = None
    # With details only.
    masks: Bool[np.ndarray, "S H"] | None = None  # True = kept
    kl: Float[np.ndarray, "S T"] | None = None  # divergence of each subnetwork from the mean
    masked_log_likelihood: Float[np.ndarray, "S T"] | None = None  # over the whole vocabulary
    candidates: Int[np.ndarray, "T 8"] | None = None  # most likely under the averaged distribution
    candidate_cosines: Float[np.ndarray, "T 8 8"] | None = None  # of their rows, not clipped

    def masked(self) -> dict[str, Any]:
        """Statistics of the masked layer by name, its settings as plain values."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in NOT_BY_DEPTH}
        values["settings"] = self.settings.to_dict()
        return {name: value for name, value in values.items() if value is not None}


def concatenated(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Statistics of consecutive tokens, joined by name."""
    return {
        name: np.concatenate([part[name] for part in parts], axis=int(name in MASKS_FIRST))
        for name in parts[0]
    }


def masked_layer(used: Mapping[str, Any]) -> str:
    """The masked layer of saved settings in words; also the requested one, if it has no heads."""
    text = f"layer {used['layer']} of {used['num_layers']}"
    requested = used["requested_layer"]
    return text if requested is None else f"{text} (layer {requested} has no heads)"
