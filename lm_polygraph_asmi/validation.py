"""Settings: their choices, defaults and range checks, shared by everything that takes them.

Imports nothing heavy, so that a refused argument is refused at once.
"""

import math
from collections.abc import Iterable, Sequence

SCOPES = ("all", "response")
"""Positions at which heads are masked: every one, or those that predict the response."""

MASK_SAMPLERS = ("bernoulli", "balanced")
"""How masks are drawn; see `maths.sample_head_masks`."""


VARIANTS = {"asmi": "ASMI", "sem": "Sem-ASMI", "adapt": "Adapt-ASMI"}
"""Name in `score` -> symbol in tables."""

TAU, BETA = 0.3, 10.0
"""Middle and steepness of Adapt-ASMI's gate where nothing else is asked for: the paper's."""


def check_depth(depth: float) -> None:
    """Raise ValueError unless `depth` is a share of the layers in (0, 1)."""
    if not 0 < depth < 1:
        raise ValueError(
            f"depth must lie in (0, 1), a share of the layers such as 0.6, got {depth}"
        )


def target_layer(depth: float, num_layers: int) -> int:
    """Index (from 0) of the masked layer: min(round(depth * L), L - 1).

    36 layers at depth 0.6 give 22 and 32 give 19, the paper's prefixes of 22 and 19 layers.

    Raises:
        ValueError: depth outside (0, 1).
    """
    check_depth(depth)
    return min(round(depth * num_layers), num_layers - 1)


def check_top_k(top_k: int) -> None:
    """Raise ValueError unless K is at least 1."""
    if top_k < 1:
        raise ValueError(f"top_k (K) must be at least 1, got {top_k}")


def check_num_masks(num_masks: int) -> None:
    """Raise ValueError unless S is at least 2."""
    if num_masks < 2:
        raise ValueError(
            f"num_masks (S) must be at least 2, got {num_masks}: a single subnetwork has no other "
            "to disagree with"
        )


def check_mask_rate(mask_rate: float) -> None:
    """Raise ValueError unless p lies in (0, 1)."""
    if not 0 < mask_rate < 1:
        raise ValueError(
            f"mask_rate (p) must lie in (0, 1), got {mask_rate}: 0 keeps every head, 1 keeps none"
        )


def check_at_least_one(name: str, value: int | None) -> None:
    """Raise ValueError unless `value` is at least 1; None means a default."""
    if value is not None and value < 1:
        raise ValueError(f"{name} must be at least 1 or null, got {value}")


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_scope(scope: str) -> None:
    """Raise ValueError unless `scope` is one of `SCOPES`."""
    _check_one_of("scope", scope, SCOPES)


def check_mask_sampler(mask_sampler: str) -> None:
    """Raise ValueError unless `mask_sampler` is one of `MASK_SAMPLERS`."""
    _check_one_of("mask_sampler", mask_sampler, MASK_SAMPLERS)


def check_settings(
    depths: Iterable[float],
    top_k: int,
    num_masks: int | None,
    mask_rate: float | None,
    mask_sampler: str,
    scope: str,
) -> None:
    """Raise ValueError unless all are in range; an S or p of None is derived later."""
    for depth in depths:
        check_depth(depth)
    check_top_k(top_k)
    if num_masks is not None:
        check_num_masks(num_masks)
    if mask_rate is not None:
        check_mask_rate(mask_rate)
    check_mask_sampler(mask_sampler)
    check_scope(scope)


def check_scoring(
    variant: str, num_samples: int, tau: float, beta: float, stop: Sequence[str]
) -> None:
    """Raise ValueError unless the settings that `score` has besides the masks' are in range."""
    _check_one_of("variant", variant, tuple(VARIANTS))
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2, to be compared; got {num_samples}")
    if not (math.isfinite(tau) and math.isfinite(beta)):
        raise ValueError(f"tau and beta must be finite, got {tau} and {beta}")
    if "" in stop:
        raise ValueError("an empty stop string would end every answer at once: leave it out")
