"""Every setting of a score, declared once: type, default, unit, help and check.

Everything else is made of `ASMIConfig`: what `Scorer`, `Engine`, the calculator and the estimators
hold, the node `asmi` of Hydra's configs, the options of the command line, the manifest of a run.
Imports nothing heavy, so that a refused setting is refused at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, TypeVar

from lm_polygraph_asmi.validation import (
    check_at_least_one,
    check_number,
    check_one_of,
    check_whole,
)

METHODS = {"asmi": "ASMI", "sem": "Sem-ASMI", "adapt": "Adapt-ASMI"}
"""The setting `method` -> symbol in tables."""
SCOPES = ("all", "response")
SOURCES = ("all", "context", "elsewhere")
MASK_SAMPLERS = ("bernoulli", "balanced")
PERTURBATIONS = ("heads", "pseudo_heads", "foreign", "isotropic", "mlp", "mlp_noise")
AGGREGATIONS = ("mean", "sum", "max")
STREAMED = {"scope": "response", "seeded_by": "prompt", "source": "all"}
"""Settings of every score that is made while its answer is written."""

Own = TypeVar("Own", bound="ASMIConfig")
Check = Callable[[str, Any], None]


def setting(
    default: Any,
    help: str,
    check: Check | Sequence[str],
    *,
    unit: str = "",
    symbol: str = "",
    of: str = "score",
    key: bool = True,
    shown: Callable[[Any], str] | bool | None = None,
    method: str | None = None,
) -> Any:
    """A field of `ASMIConfig`.

    Args:
        default, help: as on the command line.
        check: raises ValueError for a value out of range; or the choices there are.
        unit: of the value.
        symbol: in formulas and names.
        of: what it belongs to: "masks" (what a masked pass computes), "score" (what is made of
            that), "answer" (how answers are generated) or "machine" (how fast, not what).
        key: whether two scores that differ in it are different scores.
        shown: how a name says a value other than the default; True: "name=value", or the symbol
            for its name; False: names do not. None: as the key.
        method: the only one it is for.
    """
    choices = () if callable(check) else tuple(check)
    found = check if callable(check) else partial(check_one_of, known=choices)
    about: dict[str, Any] = {
        "help": help,
        "check": found,
        "choices": choices,
        "unit": unit,
        "symbol": symbol,
    }
    about |= {"of": of, "key": key, "shown": key if shown is None else shown, "method": method}
    return field(default=default, metadata=about)


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _depth(name: str, value: Any) -> None:
    check_number(name, value)
    if not 0 < value < 1:
        raise ValueError(
            f"{name} must lie in (0, 1), a share of the layers such as 0.6, got {value}"
        )


def _mask_rate(name: str, value: Any) -> None:
    check_number(f"{name} (p)", value)
    if not 0 < value < 1:
        raise ValueError(
            f"{name} (p) must lie in (0, 1), got {value}: 0 keeps every head, 1 keeps none"
        )


def _num_masks(name: str, value: Any) -> None:
    check_whole(f"{name} (S)", value)
    if value < 2:
        raise ValueError(
            f"{name} (S) must be at least 2, got {value}: a single subnetwork has no other "
            "to disagree with"
        )


def _top_k(name: str, value: Any) -> None:
    check_whole(f"{name} (K)", value)
    if value < 1:
        raise ValueError(f"{name} (K) must be at least 1, got {value}")


def _scale(name: str, value: Any) -> None:
    if value is None or isinstance(value, str):  # a file, read where it is used
        return
    check_number(name, value)
    if value <= 0:
        raise ValueError(f"{name} must be above 0, got {value}: at 0 a mask changes nothing")


def _num_samples(name: str, value: Any) -> None:
    check_whole(name, value)
    if value < 2:
        raise ValueError(f"{name} must be at least 2, to be compared; got {value}")


def _max_new_tokens(name: str, value: Any) -> None:
    check_whole(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, for an answer to score; got {value}")


def _truth(name: str, value: Any) -> None:
    if not isinstance(getattr(value, "tolist", lambda: value)(), bool):  # NumPy's too
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _seed(name: str, value: Any) -> None:
    check_whole(name, value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got {value}")


def _bytes(name: str, value: Any) -> None:
    check_whole(name, value)
    check_at_least_one(name, value)


def _attention(name: str, value: Any) -> None:
    if not (value is None or isinstance(value, str)):
        raise ValueError(
            f"{name} must be the name of an implementation such as 'sdpa', got {value!r}"
        )


def _stop(name: str, value: Any) -> None:
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"{name} must be a text such as '\\n', or a list of texts, got {value!r}")
    if "" in value:
        raise ValueError("an empty stop string would end every answer at once: leave it out")


@dataclass(frozen=True, kw_only=True)
class ASMIConfig:
    """The settings of a score. `to_dict` and `from_dict` are its plain values.

    Raises:
        ValueError: a setting out of range, or settings that cannot go together.

    Example:
        >>> config = ASMIConfig(scope="response", top_k=256)
        >>> str(config)
        'Sem-ASMI (60%, K=256, scope=response)'
        >>> config.replace(depth=0.9).depth
        0.9
    """

    # In the order of names; `label`.
    method: str = setting("sem", "The score; adapt draws answers.", tuple(METHODS), shown=False)
    depth: float = setting(
        0.6, "Relative depth of the masked layer.", _depth, unit="share of the layers", of="masks",
        shown=False,
    )  # fmt: skip
    top_k: int = setting(
        64, "Tokens kept per distribution.", _top_k, symbol="K", of="masks", shown=False
    )
    num_masks: int | None = setting(
        None, "Number of masks; without it, derived from the model's heads.",
        _or_none(_num_masks), symbol="S", of="masks",
    )  # fmt: skip
    mask_rate: float | None = setting(
        None, "Share of heads that a mask takes; without it, derived from the model's heads.",
        _or_none(_mask_rate), symbol="p", of="masks",
    )  # fmt: skip
    mask_sampler: str = setting(
        "bernoulli", "How masks are drawn; balanced masks each head equally often.", MASK_SAMPLERS,
        of="masks",
    )  # fmt: skip
    scope: str = setting(
        "all", "Where heads are masked: at all positions, or at those of the response alone, far "
        "cheaper.", SCOPES, of="masks",
    )  # fmt: skip
    seed: int = setting(
        0, "Of the masks, and of drawn answers.", _seed, of="masks", key=False,
        shown=True,
    )  # fmt: skip
    seeded_by: str = setting(
        "answer", "What masks follow from: prompt and answer, or the prompt alone.",
        ("answer", "prompt"), of="masks", key=False, shown=True,
    )  # fmt: skip
    source: str = setting(
        "all", "What masked heads lose: all, or what comes from the context or from elsewhere "
        "(with scope response).", SOURCES, of="masks",
    )  # fmt: skip
    aggregation: str = setting(
        "mean", "How the score comes of its tokens'; the mean is the paper's.", AGGREGATIONS,
    )  # fmt: skip
    perturbation: str = setting(
        "heads", "What a mask changes; all but heads are controls.", PERTURBATIONS, of="masks",
        shown=str,
    )  # fmt: skip
    perturbation_scale: float | str | None = setting(
        None, "Times that change: a number, or a file of `polygraph_asmi experiments scale`.",
        _scale, of="masks", shown="scale={:.4g}".format,
    )  # fmt: skip
    closing_token: bool = setting(
        True, "Whether the token that ends the answer counts.", _truth,
        shown=lambda _: "no closing token",
    )  # fmt: skip
    tau: float = setting(
        0.3, "Middle of the gate.", check_number, method="adapt", shown="tau={:g}".format
    )
    beta: float = setting(
        10.0, "Steepness of the gate.", check_number, method="adapt", shown="beta={:g}".format
    )
    # Of the answers rather than of their score: runs over the same answers are told apart by these.
    num_samples: int = setting(10, "Answers to draw.", _num_samples, method="adapt", shown=False)
    stop: tuple[str, ...] | None = setting(
        None, "Ends answers; \\n is a line break.", _or_none(_stop), shown=False
    )
    max_new_tokens: int = setting(
        64, "Length of a generated answer.", _max_new_tokens, unit="tokens", of="answer", key=False
    )
    attention: str | None = setting(
        None, "Attention implementation of the masked passes, such as sdpa; without it, the "
        "model's.", _attention, of="machine", key=False,
    )  # fmt: skip
    memory_budget: int | None = setting(
        None, "For masked passes above the weights; without it, half of the free GPU memory, or "
        "512 MiB on a CPU.", _or_none(_bytes), unit="bytes", of="machine", key=False,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "stop" and value is not None:
                value = (value,) if isinstance(value, str) else value
                one.metadata["check"](one.name, value)
                value = tuple(value)
            one.metadata["check"](one.name, value)
            # NumPy's numbers pass, and become plain ones.
            object.__setattr__(self, one.name, getattr(value, "tolist", lambda v=value: v)())
        if self.source != "all" and self.scope != "response":
            raise ValueError(
                f"source {self.source!r} is for scope 'response', where heads are masked at the "
                f"positions that predict the response; the scope is {self.scope!r}"
            )
        if self.source != "all" and self.perturbation != "heads":
            raise ValueError(
                f"source {self.source!r} says what masked heads lose: leave perturbation at "
                f"'heads', got {self.perturbation!r}"
            )

    @classmethod
    def names(cls, *of: str) -> list[str]:
        """Its settings; with arguments, those that belong to "masks", "score" and so on."""
        return [one.name for one in fields(cls) if not of or one.metadata["of"] in of]

    def replace(self: Own, **changed: Any) -> Own:
        """The same with other values.

        Raises:
            TypeError: there is no such setting; with what was meant, perhaps.
            ValueError: one out of range.
        """
        return replace(self, **self.check_names(changed))

    @classmethod
    def check_names(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The same, unless there is one of which it knows nothing: TypeError."""
        known = cls.names()
        for name in settings:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                meant = f": {close[0]}?" if close else "."
                raise TypeError(f"there is no setting {name}{meant} There are {', '.join(known)}")
        return dict(settings)

    def to_dict(self, *of: str) -> dict[str, Any]:
        """Plain values by name, fit for JSON; with arguments, as `names`."""
        found = {name: getattr(self, name) for name in self.names(*of)}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in found.items()}

    @classmethod
    def from_dict(cls: type[Own], content: Mapping[str, Any]) -> Own:
        """Of saved values; others that stand beside them are passed over."""
        return cls(**{name: content[name] for name in cls.names() if name in content})

    @classmethod
    def used(cls, method: str) -> "list[Field[Any]]":
        """Declarations of the settings that a method has a use for."""
        return [one for one in fields(cls) if one.metadata["method"] in (None, method)]

    def besides_masks(self) -> dict[str, Any]:
        """Plain values of what makes a score, and its answer, of the statistics of masks."""
        own = self.to_dict("score", "answer")
        return {one.name: own[one.name] for one in self.used(self.method) if one.name in own}

    def score_key(self) -> dict[str, Any]:
        """The settings that two scores must share to be compared, and their values."""
        return self.key_of(self.to_dict())

    @classmethod
    def key_of(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The same of saved values, those that are there."""
        names = [one.name for one in cls.used(saved["method"]) if one.metadata["key"]]
        found = {name: saved[name] for name in names if name in saved}
        return found | ({"stop": sorted(found["stop"] or ())} if "stop" in found else {})

    def same_but(self, other: "ASMIConfig", *names: str) -> bool:
        """Whether what a name says of two scores is the same, apart from some settings."""
        gated = self.method == other.method
        return all(
            getattr(self, one.name) == getattr(other, one.name)
            for one in fields(self)
            if one.name not in names
            and (one.metadata["shown"] or one.name in ("method", "depth", "top_k"))
            and (gated or one.metadata["method"] is None)
        )

    @property
    def symbol(self) -> str:
        """Of the method, such as "Sem-ASMI"."""
        return METHODS[self.method]

    @property
    def is_control(self) -> bool:
        """Whether something else than heads, or another scale of them, is perturbed."""
        return (self.perturbation, self.perturbation_scale) != ("heads", None)

    def said(self, *names: str) -> list[str]:
        """What names say of settings that differ from the default: `["scope=response"]`."""
        return [
            _said(one, getattr(self, one.name))
            for one in self.used(self.method)
            if one.metadata["shown"] and (not names or one.name in names)
            and getattr(self, one.name) != one.default
        ]  # fmt: skip

    def label(self, symbol: str, *more: str) -> str:
        """Name for people: depth and K always, the rest where it is not the default."""
        parts = [f"{100 * self.depth:g}%", f"K={self.top_k}", *self.said(), *more]
        return f"{symbol} ({', '.join(parts)})"

    def __str__(self) -> str:
        return self.label(self.symbol)


def _said(one: "Field[Any]", value: Any) -> str:
    shown = one.metadata["shown"]
    return str(shown(value)) if callable(shown) else f"{one.metadata['symbol'] or one.name}={value}"


def field_of(name: str) -> "Field[Any]":
    """The declaration of a setting."""
    return next(one for one in fields(ASMIConfig) if one.name == name)


def check_setting(name: str, value: Any) -> None:
    """Raise ValueError unless a value is one that this setting can have."""
    field_of(name).metadata["check"](name, value)


def check_streamed(settings: Mapping[str, Any]) -> None:
    """Raise ValueError where settings cannot be those of an answer that is not there yet."""
    for name, only in STREAMED.items():
        if settings.get(name, only) != only:
            raise ValueError(
                f"{name}={settings[name]!r}: while an answer is written it is scored with "
                f"{name}={only!r}. Score the finished answer for anything else"
            )


def check_fits(top_k: int, vocabulary: int) -> None:
    """Raise ValueError unless K is no more than there is.

    But for the default, which nobody chose: a K above V means V.
    """
    if top_k > max(vocabulary, ASMIConfig.top_k):
        raise ValueError(
            f"top_k (K) is {top_k}, but the model knows {vocabulary} tokens: the paper takes "
            f"{ASMIConfig.top_k}, and {vocabulary} would be exact"
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
    check_setting("depth", depth)
    return min(round(depth * num_layers), num_layers - 1)
