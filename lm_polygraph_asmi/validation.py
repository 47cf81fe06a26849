"""Settings: their choices, defaults and range checks, shared by everything that takes them.

Imports nothing heavy, so that a refused argument is refused at once.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real

SCOPES = ("all", "response")
"""Positions at which heads are masked: every one, or those that predict the response."""

SOURCES = ("all", "context", "elsewhere")
"""What a mask takes from a head: all its output, or what comes from the context's tokens, or the
rest."""

LEVELS = ("sequence", "claim")
"""What an estimator scores: answers, or the claims in them."""

MASK_SAMPLERS = ("bernoulli", "balanced")
"""How masks are drawn; see `maths.sample_head_masks`."""

TOKENS = ("none", "compact", "full")
"""How much of each token is written for many rows."""

PERTURBATIONS = ("heads", "pseudo_heads", "foreign", "isotropic", "mlp", "mlp_noise")
"""What a mask changes at the target layer: the method's own, then the arms of the falsifier."""

VARIANTS = {"asmi": "ASMI", "sem": "Sem-ASMI", "adapt": "Adapt-ASMI"}
"""Name in `score` -> symbol in tables."""

TOP_K = 64
"""K where nothing else is asked for: the paper's."""

AGGREGATIONS = ("mean", "sum", "max")
"""From the scores of tokens to that of an answer; the first is the paper's."""

TAU, BETA = 0.3, 10.0
"""Middle and steepness of Adapt-ASMI's gate where nothing else is asked for: the paper's."""


def check_number(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number; a text that reads like one is none."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number, got {value!r}")


def check_whole(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a whole number."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"{name} must be a whole number, got {value!r}")


def check_depth(depth: float) -> None:
    """Raise ValueError unless `depth` is a share of the layers in (0, 1)."""
    check_number("depth", depth)
    if not 0 < depth < 1:
        raise ValueError(
            f"depth must lie in (0, 1), a share of the layers such as 0.6, got {depth}"
        )


def target_layer(depth: float, num_layers: int) -> int:
    """Index (from 0) of the masked layer: min(round(depth * L), L - 1).

    36 layers at depth 0.6 give 22 and 32 give 19, the paper's prefixes of 22 and 19 layers.

    Raises:
        ValueError: depth outside (0, 1).

    Example:
        >>> target_layer(0.6, 36), target_layer(0.6, 32)
        (22, 19)
    """
    check_depth(depth)
    return min(round(depth * num_layers), num_layers - 1)


def check_top_k(top_k: int, vocabulary: int | None = None) -> None:
    """Raise ValueError unless K is at least 1 and, but for the default, no more than there is.

    Args:
        vocabulary: tokens of the model, where one is known. The default K may be above it, since
            nobody chose it: a K above V means V.
    """
    check_whole("top_k (K)", top_k)
    if top_k < 1:
        raise ValueError(f"top_k (K) must be at least 1, got {top_k}")
    if vocabulary is not None and top_k > max(vocabulary, TOP_K):
        raise ValueError(
            f"top_k (K) is {top_k}, but the model knows {vocabulary} tokens: the paper takes "
            f"{TOP_K}, and {vocabulary} would be exact"
        )


def check_num_masks(num_masks: int) -> None:
    """Raise ValueError unless S is at least 2."""
    check_whole("num_masks (S)", num_masks)
    if num_masks < 2:
        raise ValueError(
            f"num_masks (S) must be at least 2, got {num_masks}: a single subnetwork has no other "
            "to disagree with"
        )


def check_mask_rate(mask_rate: float) -> None:
    """Raise ValueError unless p lies in (0, 1)."""
    check_number("mask_rate (p)", mask_rate)
    if not 0 < mask_rate < 1:
        raise ValueError(
            f"mask_rate (p) must lie in (0, 1), got {mask_rate}: 0 keeps every head, 1 keeps none"
        )


def check_at_least_one(name: str, value: int | None) -> None:
    """Raise ValueError unless `value` is at least 1; None means a default."""
    if value is None:
        return
    check_number(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1 or null, got {value}")


def check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}")


def check_aggregation(aggregation: str) -> None:
    """Raise ValueError unless `aggregation` is one of `AGGREGATIONS`."""
    check_one_of("aggregation", aggregation, AGGREGATIONS)


def check_level(level: str) -> None:
    """Raise ValueError unless `level` is one of `LEVELS`."""
    check_one_of("level", level, LEVELS)


def check_scope(scope: str) -> None:
    """Raise ValueError unless `scope` is one of `SCOPES`."""
    check_one_of("scope", scope, SCOPES)


def check_source(source: str, scope: str, perturbation: str = "heads") -> None:
    """Raise ValueError unless `source` is one of `SOURCES`, fit for scope and perturbation."""
    check_one_of("source", source, SOURCES)
    if source != "all" and scope != "response":
        raise ValueError(
            f"source {source!r} is for scope 'response', where heads are masked at the positions "
            f"that predict the response; the scope is {scope!r}"
        )
    if source != "all" and perturbation != "heads":
        raise ValueError(
            f"source {source!r} says what masked heads lose: leave perturbation at 'heads', got "
            f"{perturbation!r}"
        )


def check_context_regex(needed: bool, context_regex: str | None) -> None:
    """Raise ValueError where a context is needed that no regular expression finds."""
    if needed and not context_regex:
        raise ValueError(
            "sources other than 'all' need to know the context of each prompt: set "
            "data.context_regex (in a calculator of your own, context_regex) to a regular "
            "expression whose first group it is"
        )


def check_mask_sampler(mask_sampler: str) -> None:
    """Raise ValueError unless `mask_sampler` is one of `MASK_SAMPLERS`."""
    check_one_of("mask_sampler", mask_sampler, MASK_SAMPLERS)


def check_perturbation(perturbation: str) -> None:
    """Raise ValueError unless `perturbation` is one of `PERTURBATIONS`."""
    check_one_of("perturbation", perturbation, PERTURBATIONS)


def check_dose(dose: float | None) -> None:
    """Raise ValueError unless `dose` is a number above 0, or None: as it is."""
    if dose is None:
        return
    check_number("dose", dose)
    if dose <= 0:
        raise ValueError(f"dose must be above 0, got {dose}: at 0 a mask changes nothing")


def check_settings(
    depths: Iterable[float],
    top_k: int,
    num_masks: int | None,
    mask_rate: float | None,
    mask_sampler: str,
    scope: str,
    perturbation: str = "heads",
    dose: float | None = None,
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
    check_perturbation(perturbation)
    check_dose(dose)


def stop_strings(stop: Sequence[str] | str | None) -> list[str]:
    """Stop strings as a list; a single text is one of them.

    Raises:
        ValueError: neither text nor texts, or an empty one, which would end every answer at once.
    """
    several = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(several, Sequence) or not all(isinstance(text, str) for text in several):
        raise ValueError(f"stop must be a text such as '\\n', or a list of texts, got {stop!r}")
    if "" in several:
        raise ValueError("an empty stop string would end every answer at once: leave it out")
    return list(several)


def check_scoring(
    variant: str,
    num_samples: int,
    tau: float,
    beta: float,
    max_new_tokens: int,
    seed: int,
    closing_token: bool = True,
    attention: str | None = None,
    aggregation: str = "mean",
) -> None:
    """Raise ValueError unless the settings that `score` has besides the masks' are in range."""
    check_one_of("variant", variant, tuple(VARIANTS))
    check_aggregation(aggregation)
    check_whole("num_samples", num_samples)
    if num_samples < 2:
        raise ValueError(f"num_samples must be at least 2, to be compared; got {num_samples}")
    check_number("tau", tau)
    check_number("beta", beta)
    check_whole("max_new_tokens", max_new_tokens)
    if max_new_tokens < 1:
        raise ValueError(
            f"max_new_tokens must be at least 1, for an answer to score; got {max_new_tokens}"
        )
    check_whole("seed", seed)
    if closing_token not in (True, False):
        raise ValueError(f"closing_token must be True or False, got {closing_token!r}")
    if not (attention is None or isinstance(attention, str)):
        raise ValueError(
            f"attention must be the name of an implementation such as 'sdpa', got {attention!r}"
        )


def came(content: object) -> str:
    """What a row holds in the place of a prompt, as the end of a message.

    Example:
        >>> came({"question": "Who?", "answer": None}), came(["Who?"])
        ('the fields question', 'a list')
    """
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    given = [str(name) for name, value in content.items() if value is not None]
    return f"the fields {', '.join(given)}" if given else "no field"
