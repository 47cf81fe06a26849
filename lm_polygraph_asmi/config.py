"""Every setting of a score, declared once: type, default, unit, help and check.

`ASMIConfig` is what `score`, its command line, Hydra's configs, the estimators and the calculator
hold, and what a run's manifest, a calibration run and a scored row save. Imports nothing heavy, so
that a wrong setting is refused at once.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

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


def _one_of(known: Iterable[str]) -> Callable[[str, Any], None]:
    return lambda name, value: check_one_of(name, value, tuple(known))


def _at_least(least: int) -> Callable[[str, Any], None]:
    def check(name: str, value: Any) -> None:
        check_whole(name, value)
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")

    return check


def _truth(name: str, value: Any) -> None:
    if value not in (True, False):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _attention(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(
            f"{name} must be the name of an implementation such as 'sdpa', got {value!r}"
        )


def setting(
    default: Any,
    help: str,
    check: Callable[[str, Any], object],
    *,
    unit: str = "",
    choices: Iterable[str] = (),
    symbol: str | None = None,
    key: bool = True,
    methods: Iterable[str] = (),
) -> Any:
    """A field of `ASMIConfig`.

    Args:
        help: one line, for the command line and the reference.
        check: of name and value; raises ValueError. A value of None is not checked.
        unit: of the value.
        choices: what it may be.
        symbol: in names of scores; None: the field's name, empty: its value only.
        key: whether two scores must share it to be compared.
        methods: variants that it is for; empty: all.
    """
    about = {"help": help, "check": check, "unit": unit, "choices": tuple(choices),
             "symbol": symbol, "key": key, "methods": tuple(methods)}  # fmt: skip
    return field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class ASMIConfig:
    """Settings of a score, the same for `score`, benchmarks and the command line.

    Attributes are described by their `help`, see `describe`.

    Raises:
        ValueError: a setting out of range, or settings that cannot go together.

    Example:
        >>> ASMIConfig(scope="response").score_key()["scope"]
        'response'
        >>> ASMIConfig(depth=1.5)
        Traceback (most recent call last):
        ValueError: depth must lie in (0, 1), a share of the layers such as 0.6, got 1.5
    """

    variant: str = setting(
        "sem",
        "ASMI, Sem-ASMI (discounts disagreement of near-synonyms), or Adapt-ASMI (gates that "
        "discount by the diversity of sampled answers).",
        _one_of(VARIANTS), choices=VARIANTS,
    )  # fmt: skip
    depth: float = setting(
        0.6, "Relative depth of the masked layer.", lambda _, value: check_depth(value),
        unit="share of the layers",
    )  # fmt: skip
    top_k: int = setting(
        TOP_K, "Tokens kept of each next-token distribution.", lambda _, value: check_top_k(value),
        unit="tokens", symbol="K",
    )  # fmt: skip
    num_masks: int | None = setting(
        None, "Number of masks; default: derived from the model's heads.",
        lambda _, value: check_num_masks(value), symbol="S",
    )  # fmt: skip
    mask_rate: float | None = setting(
        None, "Probability that a head is masked; default: derived from the model's heads.",
        lambda _, value: check_mask_rate(value), symbol="p",
    )  # fmt: skip
    mask_sampler: str = setting(
        "bernoulli",
        "How masks are drawn: each head by itself (the paper's), or every head equally often.",
        _one_of(MASK_SAMPLERS), choices=MASK_SAMPLERS,
    )  # fmt: skip
    scope: str = setting(
        "all",
        "Mask heads at all positions (the paper's), or only where the answer is predicted "
        "(response: cheaper; a different score).",
        _one_of(SCOPES), choices=SCOPES,
    )  # fmt: skip
    seed: int = setting(0, "Of the masks, and of sampled answers.", check_whole, key=False)
    seeded_by: str = setting(
        "answer",
        "What the masks' seed depends on besides `seed`: the answer and its prompt, or the prompt "
        "only (as in streaming).",
        _one_of(("answer", "prompt")), choices=("answer", "prompt"), key=False,
    )  # fmt: skip
    source: str = setting(
        "all",
        "What masked heads lose: all, or only what comes from the context or from elsewhere (scope "
        "response).",
        _one_of(SOURCES), choices=SOURCES,
    )  # fmt: skip
    aggregation: str = setting(
        "mean", "How an answer's score follows from its tokens'; the paper takes the mean.",
        _one_of(AGGREGATIONS), choices=AGGREGATIONS,
    )  # fmt: skip
    perturbation: str = setting(
        "heads", "What a mask changes; all but heads are controls, no scores.",
        _one_of(PERTURBATIONS), choices=PERTURBATIONS, symbol="",
    )  # fmt: skip
    dose: float | str | None = setting(
        None, "Scale of that change: a number, or a file of `polygraph_asmi dose`.",
        lambda _, value: None if isinstance(value, str) else check_dose(value),
    )  # fmt: skip
    closing_token: bool = setting(True, "Whether the token that ends the answer counts.", _truth)
    tau: float = setting(TAU, "Middle of the gate.", check_number, methods=("adapt",))
    beta: float = setting(BETA, "Steepness of the gate.", check_number, methods=("adapt",))
    num_samples: int = setting(
        10, "Answers to sample.", _at_least(2), unit="answers", methods=("adapt",)
    )
    stop: tuple[str, ...] | None = setting(
        None, "Strings that end an answer; \\n is a line break.",
        lambda _, value: stop_strings(value),
    )  # fmt: skip
    max_new_tokens: int = setting(
        64, "Longest answer that the model writes.", _at_least(1), unit="tokens", key=False
    )
    attention: str | None = setting(
        None, "Attention implementation of ASMI's passes; default: the model's own.", _attention,
        key=False,
    )  # fmt: skip
    memory_budget: int | None = setting(
        None, "Memory for masked passes; default: half of the free GPU memory, 512 MiB on a CPU.",
        check_at_least_one, unit="bytes", key=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for own in fields(self):
            value = getattr(self, own.name)
            if value is not None or own.default is not None:
                own.metadata["check"](own.name, value)
            if isinstance(own.default, bool | int | float) and value is not None:
                # NumPy's numbers pass, and become plain ones.
                object.__setattr__(self, own.name, type(own.default)(value))
        if self.num_masks is not None:
            object.__setattr__(self, "num_masks", int(self.num_masks))
        if self.mask_rate is not None:
            object.__setattr__(self, "mask_rate", float(self.mask_rate))
        if self.stop is not None:
            object.__setattr__(self, "stop", tuple(stop_strings(self.stop)))
        if self.source != "all":
            check_source(self.source, self.scope, self.perturbation)

    def but(self, **settings: Any) -> "ASMIConfig":
        """The same with other settings.

        Raises:
            TypeError: a name that is no setting.
            ValueError: as the class.
        """
        known = [own.name for own in fields(self)]
        for name in settings:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                meant = f": {close[0]}?" if close else "."
                raise TypeError(f"there is no setting {name}{meant} There are {', '.join(known)}")
        return replace(self, **settings)

    def score_key(self) -> dict[str, Any]:
        """The settings that two scores must share to be compared."""
        return {
            own.name: sorted(self.stop or ()) if own.name == "stop" else getattr(self, own.name)
            for own in fields(self)
            if own.metadata["key"]
            and (not own.metadata["methods"] or self.variant in own.metadata["methods"])
        }

    @property
    def mask_settings(self) -> dict[str, Any]:
        """What one masked-heads calculator does once for all depths and sources."""
        names = ("top_k", "num_masks", "mask_rate", "mask_sampler", "scope", "seed", "seeded_by",
                 "perturbation", "dose")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """All settings, as JSON has them."""
        found = asdict(self)
        return found | {"stop": None if self.stop is None else list(self.stop)}

    @property
    def label(self) -> str:
        """The score's name in tables: depth and K, and whatever is not the default."""
        parts = [f"{100 * self.depth:g}%"]
        for own in fields(self)[2:]:
            value, symbol = getattr(self, own.name), own.metadata["symbol"]
            symbol = own.name if symbol is None else symbol
            shown = {*self.score_key(), "seed", "seeded_by"} - {"num_samples", "stop"}
            if own.name not in shown:
                continue
            if own.name == "closing_token":
                parts += [] if value else ["no closing token"]
            elif own.name == "top_k" or value != own.default:
                text = f"{value:.4g}" if isinstance(value, float) else f"{value}"
                parts.append(f"{symbol}={text}" if symbol else text)
        return f"{VARIANTS[self.variant]} ({', '.join(parts)})"


SCORE_KEY = tuple(own.name for own in fields(ASMIConfig) if own.metadata["key"])
"""Settings that make a score another one."""
