"""Every setting of a score, declared once: type, default, unit, help and check.

`Scorer`, `Engine`, the calculator, the estimators, the node `asmi` of the Hydra configs, the
command-line options and the manifest of a run are all built from `ASMIConfig`. This module imports
nothing heavy, so an invalid setting raises at once.
"""

import re
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
    lone_surrogate,
)

METHODS = {"asmi": "ASMI", "sem": "Sem-ASMI", "adapt": "Adapt-ASMI"}
"""Value of `method` -> name in tables."""
SCOPES = ("all", "response")
MASK_SAMPLERS = ("bernoulli", "balanced")
AGGREGATIONS = ("mean", "sum", "max")
GATE_TOKENS = ("last", "second_last")
STRUCTURE = {
    "layers": "the module whose children are the decoder layers",
    "projection": "inside a layer, the projection of the concatenated head outputs",
    "lm_head": "the module that returns the logits",
}
"""Modules that the setting `structure` may name."""
Config = TypeVar("Config", bound="ASMIConfig")
Check = Callable[[str, Any], None]


def parameter(
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
    option: bool = True,
) -> Any:
    """A field of `ASMIConfig`.

    Args:
        default, help: as on the command line.
        check: raises ValueError for a value out of range; or the allowed values.
        unit: unit of the value.
        symbol: symbol in formulas and score names.
        of: what it affects: "masks" (what a masked pass computes), "score" (computed from the
            masked passes), "answer" (how answers are generated) or "machine" (speed only).
        key: whether scores that differ in it are different scores.
        shown: how a score name shows a value other than the default. True: "name=value", with the
            symbol if there is one; False: not at all; None: the same as `key`.
        method: the only method that uses it.
        option: whether commands have an option for it.
    """
    choices = () if callable(check) else tuple(check)
    metadata: dict[str, Any] = {
        "help": help,
        "check": check if callable(check) else partial(check_one_of, known=choices),
        "choices": choices,
        "unit": unit,
        "symbol": symbol,
    }
    metadata |= {"of": of, "key": key, "shown": key if shown is None else shown, "method": method}
    metadata["option"] = option
    return field(default=default, metadata=metadata)


def _or_none(check: Check) -> Check:
    return lambda name, value: None if value is None else check(name, value)


def _depth(name: str, value: Any) -> None:
    check_number(name, value)
    if not 0 < value < 1:
        raise ValueError(
            f"{name} must lie in (0, 1), got {value}: it is a fraction of the layers, such as 0.6"
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
            f"{name} (S) must be at least 2, got {value}: disagreement needs two subnetworks"
        )


def _top_k(name: str, value: Any) -> None:
    check_whole(f"{name} (K)", value)
    if value < 1:
        raise ValueError(f"{name} (K) must be at least 1, got {value}")


def _num_samples(name: str, value: Any) -> None:
    check_whole(name, value)
    if value < 2:
        raise ValueError(f"{name} must be at least 2, got {value}: answers are compared")


def _max_new_tokens(name: str, value: Any) -> None:
    check_whole(name, value)
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}: an answer needs a token")


def _truth(name: str, value: Any) -> None:
    if not isinstance(getattr(value, "tolist", lambda: value)(), bool):  # or NumPy's bool
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
            f"{name} must be an attention implementation such as 'sdpa', got {value!r}"
        )


_QUOTED = re.compile('(?s)(?!" *[,:\\]}]) *(["\'`“‘„«»])(?=.*[^"\'`“”‘’„«»])(.+)(["\'`”’“«»]) *')
"""Not what ends a text in JSON and begins the next, such as `", "`."""
_ESCAPE = re.compile(
    r"\\([nrt](?![a-z]+(?!\w*:))|[\n\r\t]|x[\da-fA-F]{2}|u[\da-fA-F]{4}|U[\da-fA-F]{8})"
)
"""Not the beginning of LaTeX's commands, such as \\nabla; but of a mark, such as \\nuser:."""


def check_stop(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a list of strings, each of which may end an answer."""
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise ValueError(
            f"{name} must be a string such as '\\n', or a list of strings, got {value!r}"
        )
    if "" in value:
        raise ValueError("stop must not contain an empty string: it would end every answer at once")
    for text in value:
        if half := lone_surrogate(text):
            raise ValueError(f"{name} must be text, got {half}: replace it")
        if quoted := _QUOTED.fullmatch(text):
            raise ValueError(
                f"{name} {text!r} is wrapped in quotes, which would be part of the string that "
                f"ends an answer: expected {quoted[2]!r}. The cmd.exe of Windows takes no single "
                "quotes off: use double ones"
            )
        if escape := _ESCAPE.search(text):
            raise ValueError(
                f"{name} {text!r} is spelled with a backslash ({escape[0]!r}), which a model does "
                "not write for a line break: expected the character itself, as by '\\n' in Python "
                'and "\\n" in YAML; on the command line, --stop reads \\n, and no other'
            )


def module_paths(structure: str | Mapping[str, str] | None) -> dict[str, str]:
    """Paths of the modules that the setting `structure` names, in the order of `STRUCTURE`.

    Raises:
        ValueError: not such a text or mapping, or another name.

    Example:
        >>> module_paths("projection=mixer.out, layers=decoder.blocks")
        {'layers': 'decoder.blocks', 'projection': 'mixer.out'}
    """
    paths: Any = structure or {}
    if isinstance(structure, str):
        parts = [part.partition("=") for part in structure.split(",")]
        paths = {name.strip(): path.strip() for name, _, path in parts}
    valid = isinstance(paths, Mapping) and paths.keys() <= STRUCTURE.keys()
    if not valid or not all(isinstance(path, str) and path for path in paths.values()):
        raise ValueError(
            f"structure names modules among {', '.join(STRUCTURE)}, as in "
            f"'layers=model.blocks,projection=mixer.out', got {structure!r}"
        )
    return {name: paths[name] for name in STRUCTURE if name in paths}


def _structure(_: str, value: Any) -> None:
    module_paths(value)


@dataclass(frozen=True, kw_only=True)
class ASMIConfig:
    """The settings of a score. `to_dict` and `from_dict` convert to and from plain values.

    Raises:
        ValueError: a setting out of range, or settings that contradict each other.

    Example:
        >>> config = ASMIConfig(scope="response", top_k=256)
        >>> str(config)
        'Sem-ASMI (60%, K=256, scope=response)'
        >>> config.replace(depth=0.9).depth
        0.9
    """

    # In the order that `label` shows them.
    method: str = parameter(
        "sem", "Which score: asmi (MI), sem (MI, discounted for near-synonyms) or adapt (sem, with "
        "a discount that depends on sampled answers).", tuple(METHODS), shown=False,
    )  # fmt: skip
    depth: float = parameter(
        0.6, "Masked layer: 0 is the first, 1 the last; the paper's is 0.6.", _depth,
        unit="fraction of the layers", of="masks", shown=False,
    )  # fmt: skip
    top_k: int = parameter(
        64, "Most likely tokens kept per distribution.", _top_k, symbol="K", of="masks", shown=False
    )
    num_masks: int | None = parameter(
        None, "Number of masks; by default, derived from the number of heads.",
        _or_none(_num_masks), symbol="S", of="masks",
    )  # fmt: skip
    mask_rate: float | None = parameter(
        None, "Probability of masking a head; by default, derived from the number of heads.",
        _or_none(_mask_rate), symbol="p", of="masks",
    )  # fmt: skip
    mask_sampler: str = parameter(
        "bernoulli", "How masks are sampled; balanced masks each head equally often.",
        MASK_SAMPLERS, of="masks",
    )  # fmt: skip
    scope: str = parameter(
        "all", "Where heads are masked: all positions (as in the paper), or response: only where "
        "the answer is predicted (cheaper, a different score, and the one measured most).", SCOPES,
        of="masks",
    )  # fmt: skip
    seed: int = parameter(
        0, "Random seed of masks and sampled answers.", _seed, of="masks", shown=True
    )  # fmt: skip
    seeded_by: str = parameter(
        "answer", "Text that seeds the masks: answer (prompt and answer) or prompt (prompt only).",
        ("answer", "prompt"), of="masks", shown=True,
    )  # fmt: skip
    aggregation: str = parameter(
        "mean", "How token scores become the answer's score; mean is the paper's.", AGGREGATIONS,
    )  # fmt: skip
    structure: str | None = parameter(
        None, "Modules of a model whose structure is not found, by path: "
        "layers=...,projection=...,lm_head=..., any of them.", _or_none(_structure),
        of="masks", shown=lambda _: "named modules",
    )  # fmt: skip
    closing_token: bool = parameter(
        True, "Whether to score the token that ends the answer.", _truth,
        shown=lambda _: "no closing token",
    )  # fmt: skip
    tau: float = parameter(
        0.3, "Diversity of the sampled answers at which agreement has half its weight.",
        check_number, method="adapt", shown="tau={:g}".format,
    )  # fmt: skip
    beta: float = parameter(
        10.0, "How steeply the weight of agreement falls around tau.",
        check_number, method="adapt", shown="beta={:g}".format,
    )  # fmt: skip
    gate_token: str = parameter(
        "second_last", "Token of a sampled answer whose hidden state the gate reads: the last one, "
        "such as a line break, or the second-last, as LM-Polygraph's embeddings do.", GATE_TOKENS,
        method="adapt",
    )  # fmt: skip
    # These belong to the answers rather than the score, but they distinguish runs.
    num_samples: int = parameter(
        10, "Number of sampled answers.", _num_samples, method="adapt", shown=False
    )
    stop: tuple[str, ...] | None = parameter(
        None, "String that ends an answer; \\n is a line break.", _or_none(check_stop), shown=False
    )
    max_new_tokens: int = parameter(
        64, "Maximum answer length.", _max_new_tokens, unit="tokens", of="answer", key=False
    )
    attention: str | None = parameter(
        None, "Attention implementation of the masked passes, such as sdpa; by default, the "
        "model's.", _attention, of="machine", key=False,
    )  # fmt: skip
    memory_budget: int | None = parameter(
        None, "Memory for masked passes, besides the weights; by default, half of the free GPU "
        "memory (at most 8 GiB), or 512 MiB on a CPU.", _or_none(_bytes), unit="bytes",
        of="machine", key=False,
    )  # fmt: skip
    compile: bool = parameter(
        False, "Whether torch.compile runs the layers.", _truth, of="machine", key=False
    )

    def __post_init__(self) -> None:
        for declared in fields(self):
            name, check = declared.name, declared.metadata["check"]
            value = getattr(self, name)
            if name == "stop" and value is not None:
                value = (value,) if isinstance(value, str) else value
                check(name, value)
                value = tuple(value)
            check(name, value)
            if name == "structure" and value is not None:  # a text, whatever its order
                paths = module_paths(value)
                value = ",".join(f"{part}={path}" for part, path in paths.items()) or None
            # NumPy numbers become plain ones.
            object.__setattr__(self, name, getattr(value, "tolist", lambda v=value: v)())

    @classmethod
    def names(cls, *of: str) -> list[str]:
        """Names of the settings; with arguments, only those of "masks", "score" and so on."""
        return [f.name for f in fields(cls) if not of or f.metadata["of"] in of]

    def replace(self: Config, **changed: Any) -> Config:
        """A copy with some settings changed.

        Raises:
            TypeError: an unknown setting; the message suggests a similar name.
            ValueError: a setting out of range.
        """
        return replace(self, **self.check_names(changed))

    @classmethod
    def check_names(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings as a dict; TypeError if a name is unknown."""
        known = cls.names()
        for name in settings:
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else "."
                raise TypeError(f"unknown setting {name}{hint} Settings: {', '.join(known)}")
        return dict(settings)

    def to_dict(self, *of: str) -> dict[str, Any]:
        """JSON-serialisable values by name; arguments as for `names`."""
        values = {name: getattr(self, name) for name in self.names(*of)}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    @classmethod
    def from_dict(cls: type[Config], content: Mapping[str, Any]) -> Config:
        """A config from saved values, other keys ignored; ValueError: a value out of range."""
        return cls(**{name: content[name] for name in cls.names() if name in content})

    @classmethod
    def used(cls, method: str) -> "list[Field[Any]]":
        """Fields of the settings that a method uses."""
        return [f for f in fields(cls) if f.metadata["method"] in (None, method)]

    def besides_masks(self) -> dict[str, Any]:
        """Plain values of the settings of score and answer that the method uses."""
        values = self.to_dict("score", "answer")
        return {f.name: values[f.name] for f in self.used(self.method) if f.name in values}

    def score_key(self) -> dict[str, Any]:
        """Values of the settings that must be equal for two scores to be comparable."""
        return self.key_of(self.to_dict())

    @classmethod
    def key_of(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        """`score_key` of saved values; settings that were not saved are left out."""
        names = [f.name for f in cls.used(saved["method"]) if f.metadata["key"]]
        key = {name: saved[name] for name in names if name in saved}
        return key | ({"stop": sorted(key["stop"] or ())} if "stop" in key else {})

    def same_but(self, other: "ASMIConfig", *names: str) -> bool:
        """Whether two scores have the same label and samples, apart from the settings `names`."""
        same_method = self.method == other.method
        return all(
            getattr(self, f.name) == getattr(other, f.name)
            for f in fields(self)
            if f.name not in names
            and (f.metadata["shown"] or f.name in ("method", "depth", "top_k", "num_samples"))
            and (same_method or f.metadata["method"] is None)
        )

    @property
    def symbol(self) -> str:
        """Name of the method, such as "Sem-ASMI"."""
        return METHODS[self.method]

    def at_depths(self: Config, depths: Sequence[float] | float | None) -> tuple[Config, ...]:
        """This config at each depth; None: at its depth alone.

        Raises:
            ValueError: no depth, or one out of range.
        """
        several = (self.depth,) if depths is None else depths
        several = several if isinstance(several, Sequence) else (several,)
        if not several:
            raise ValueError("expected at least one depth, such as [0.6], got none")
        return tuple({depth_key(at): self.replace(depth=at) for at in several}.values())

    def describe(self, *names: str) -> list[str]:
        """Settings that differ from the default, as the label shows them: `["scope=response"]`."""
        return [
            _shown(f, getattr(self, f.name))
            for f in self.used(self.method)
            if f.metadata["shown"] and (not names or f.name in names)
            and getattr(self, f.name) != f.default
        ]  # fmt: skip

    def label(self, symbol: str) -> str:
        """Readable name: always depth and K, other settings where they are not the default."""
        parts = [f"{100 * self.depth:g}%", f"K={self.top_k}", *self.describe()]
        return f"{symbol} ({', '.join(parts)})"

    def __str__(self) -> str:
        return self.label(self.symbol)


def _shown(f: "Field[Any]", value: Any) -> str:
    shown = f.metadata["shown"]
    return str(shown(value)) if callable(shown) else f"{f.metadata['symbol'] or f.name}={value}"


def field_of(name: str) -> "Field[Any]":
    """The dataclass field of a setting."""
    return next(f for f in fields(ASMIConfig) if f.name == name)


def check_setting(name: str, value: Any) -> None:
    """Raise ValueError unless the value is valid for this setting."""
    field_of(name).metadata["check"](name, value)


def check_fits(top_k: int, vocabulary: int) -> None:
    """Raise ValueError if K is larger than the vocabulary.

    The default K passes with any vocabulary V: a K above V means V.
    """
    if top_k > max(vocabulary, ASMIConfig.top_k):
        raise ValueError(
            f"top_k (K) must be at most {vocabulary}, the size of the model's vocabulary, got "
            f"{top_k}: the paper uses {ASMIConfig.top_k}, and {vocabulary} is exact"
        )


def depth_key(depth: float) -> float:
    """A depth as it is compared and saved: rounded, so that 0.1 * 6 and 0.6 are one."""
    return round(float(depth), 6)


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
