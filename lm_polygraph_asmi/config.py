"""All settings of a score, each declared once.

`Scorer`, `Engine`, the calculator, the estimators, the node `asmi` of the Hydra configs, the
command-line options and the manifest of a run are all built from `ASMIConfig`. This module imports
nothing heavy, so an invalid setting raises at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from lm_polygraph_asmi.validation import (
    check_number,
    check_one_of,
    check_text,
    check_whole,
    did_you_mean,
)

METHODS = {"asmi": "ASMI", "sem": "Sem-ASMI", "adapt": "Adapt-ASMI"}
"""Value of `method` -> name in tables."""
SCOPES = ("all", "response")
MASK_SAMPLERS = ("bernoulli", "balanced")
AGGREGATIONS = ("mean", "sum", "max")
STRUCTURE = {
    "layers": "the module whose children are the decoder layers",
    "projection": "inside a layer, the projection of the concatenated head outputs",
    "lm_head": "the module that returns the logits",
}
"""Modules that the setting `structure` can name."""


def _fraction(why: str, name: str, value: Any) -> None:
    check_number(name, value)
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie in (0, 1), got {value}: {why}")


def _truth(name: str, value: Any) -> None:
    if not isinstance(getattr(value, "tolist", lambda: value)(), bool):  # accepts NumPy's bool
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _seed(name: str, value: Any) -> None:
    check_whole(name, value)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got {value}")


def _attention(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise ValueError(
            f"{name} must be an attention implementation such as 'sdpa', got {value!r}"
        )


def check_stop(name: str, value: Any) -> None:
    """Raise ValueError unless `value` is a list of strings that can end an answer."""
    if not isinstance(value, Sequence) or not all(isinstance(text, str) for text in value):
        raise ValueError(
            f"{name} must be a string such as '\\n', or a list of strings, got {value!r}"
        )
    if "" in value:
        raise ValueError("stop must not contain an empty string: it would end every answer at once")
    for text in value:
        check_text(f"{name}: ", text)


def module_paths(structure: str | Mapping[str, str] | None) -> dict[str, str]:
    """Paths of the modules that the setting `structure` names, in the order of `STRUCTURE`.

    Raises:
        ValueError: `structure` is not such a text or mapping, or it names something else.

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
            f"structure must name modules among {', '.join(STRUCTURE)}, as in "
            f"'layers=model.blocks,projection=mixer.out', got {structure!r}"
        )
    return {name: paths[name] for name in STRUCTURE if name in paths}


def _field(
    default: Any, check: Callable[[str, Any], object] | None = None, kind: str = "score", *,
    label: str = "{name}={value}", symbol: str | None = None, choices: tuple[str, ...] = (),
    adapt: bool = False,
) -> Any:  # fmt: skip
    """A field of `ASMIConfig`, with what other modules need to know about it.

    Args:
        default: its default value.
        check: raises ValueError if a value is invalid; called with the field's name and value.
            None: the value must be one of `choices`.
        kind: what the setting changes. "masks": what a masked pass computes; "score": what is
            computed from masked passes; "answer": how answers are generated; "machine": speed, and
            rounding.
        label: how `ASMIConfig.describe` shows a value that is not the default; "": not shown.
        symbol: the paper's symbol, which is shown instead of the name.
        choices: all possible values, for the command line.
        adapt: whether only Adapt-ASMI uses the setting.
    """
    return field(
        default=default,
        metadata={
            "check": check or partial(check_one_of, known=choices),
            "kind": kind,
            "label": label,
            "symbol": symbol,
            "choices": choices,
            "adapt": adapt,
        },
    )


@dataclass(frozen=True, kw_only=True)
class ASMIConfig:
    """The settings of a score. Raises ValueError if a setting is invalid.

    Attributes:
        method: Which score: asmi (MI), sem (MI, discounted for near-synonyms) or adapt (sem, with a
            discount that depends on sampled answers).
        depth: Masked layer, as a fraction of the layers: 0 is the first, 1 the last; the paper's is
            0.6.
        top_k: Number of most likely tokens kept per distribution, K.
        num_masks: Number of masks, S. By default, derived from the number of heads.
        mask_rate: Probability of masking a head, p. By default, derived from the number of heads.
        mask_sampler: How masks are sampled; balanced masks each head equally often.
        scope: Where heads are masked. all: at all positions, as in the paper. response: only where
            the answer is predicted, which is cheaper, gives a different score, and was measured
            most.
        seed: Random seed of masks and sampled answers.
        seeded_by: Text that seeds the masks: answer (prompt and answer) or prompt (prompt only).
        aggregation: How token scores become the answer's score; mean is the paper's.
        structure: Paths of modules, for a model whose modules are not found by name:
            layers=...,projection=...,lm_head=... (one or more of them).
        closing_token: Whether to score the token that ends the answer.
        tau: Diversity of the sampled answers at which agreement has half its weight.
        beta: How steeply the weight of agreement falls around tau.
        gate_token: Token of a sampled answer whose hidden state is compared for the diversity: the
            last one, such as a line break, or the second-last, as in LM-Polygraph.
        num_samples: Number of sampled answers.
        stop: String that ends an answer; \\n is a line break.
        max_new_tokens: Maximum answer length, in tokens.
        attention: Attention implementation of the masked passes, such as sdpa. By default, the
            model's.
        memory_budget: Memory for masked passes in bytes, besides the weights. By default, half of
            the free GPU memory (at most 8 GiB), or 512 MiB on a CPU.
        compile: Whether torch.compile runs the layers.

    Example:
        >>> config = ASMIConfig(scope="response", top_k=256)
        >>> str(config)
        'Sem-ASMI (60%, K=256, scope=response)'
        >>> config.replace(depth=0.9).depth
        0.9
    """

    # The order is that in which `label` shows the settings.
    method: str = _field("sem", choices=tuple(METHODS), label="")
    depth: float = _field(
        0.6, partial(_fraction, "it is a fraction of the layers, such as 0.6"), "masks", label=""
    )
    top_k: int = _field(64, partial(check_whole, least=1), "masks", label="", symbol="K")
    num_masks: int | None = _field(
        None,
        partial(check_whole, least=2, why=": disagreement needs two subnetworks"),
        "masks",
        symbol="S",
    )
    mask_rate: float | None = _field(
        None, partial(_fraction, "0 keeps every head, 1 keeps none"), "masks", symbol="p"
    )
    mask_sampler: str = _field("bernoulli", kind="masks", choices=MASK_SAMPLERS)
    scope: str = _field("all", kind="masks", choices=SCOPES)
    seed: int = _field(0, _seed, "masks")
    seeded_by: str = _field("answer", kind="masks", choices=("answer", "prompt"))
    aggregation: str = _field("mean", choices=AGGREGATIONS)
    structure: str | None = _field(
        None, lambda _, value: module_paths(value), "masks", label="named modules"
    )
    closing_token: bool = _field(True, _truth, label="no closing token")
    tau: float = _field(0.3, check_number, label="tau={value:g}", adapt=True)
    beta: float = _field(10.0, check_number, label="beta={value:g}", adapt=True)
    gate_token: str = _field("second_last", choices=("last", "second_last"), adapt=True)
    num_samples: int = _field(
        10, partial(check_whole, least=2, why=": answers are compared"), label="", adapt=True
    )
    stop: tuple[str, ...] | None = _field(None, check_stop, label="")
    max_new_tokens: int = _field(
        64, partial(check_whole, least=1, why=": an answer needs a token"), "answer", label=""
    )
    attention: str | None = _field(None, _attention, "machine", label="")
    memory_budget: int | None = _field(None, partial(check_whole, least=1), "machine", label="")
    compile: bool = _field(False, _truth, "machine", label="")

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in self.names():
            value = getattr(self, name)
            check_setting(name, value)
            if name == "stop" and value is not None:
                value = tuple(value)
            elif name == "structure" and value is not None:  # a text in a fixed order
                paths = module_paths(value).items()
                value = ",".join(f"{part}={path}" for part, path in paths) or None
            # NumPy numbers become plain ones.
            object.__setattr__(self, name, getattr(value, "tolist", lambda v=value: v)())

    @classmethod
    def names(cls, *of: str) -> list[str]:
        """Names of the settings; with arguments, only those of these kinds, such as "masks"."""
        return [f.name for f in fields(cls) if not of or f.metadata["kind"] in of]

    def replace(self, **changed: Any) -> "ASMIConfig":
        """A copy with some settings changed.

        Raises:
            TypeError: a setting is unknown; the message suggests a similar name.
            ValueError: a setting is invalid.
        """
        return replace(self, **self.check_names(changed))

    @classmethod
    def check_names(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings as a dictionary. TypeError if a name is unknown."""
        known = cls.names()
        for name in settings:
            if name not in known:
                meant = did_you_mean(name, known)
                raise TypeError(f"unknown setting {name}{meant}. Settings: {', '.join(known)}")
        return dict(settings)

    def to_dict(self, *of: str) -> dict[str, Any]:
        """Values for JSON, by name. Arguments are those of `names`."""
        values = {name: getattr(self, name) for name in self.names(*of)}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "ASMIConfig":
        """A config from saved values. Other keys are ignored. ValueError if a value is invalid."""
        return cls(**{name: content[name] for name in cls.names() if name in content})

    def besides_masks(self) -> dict[str, Any]:
        """Plain values of the kinds "score" and "answer", if the method uses the setting."""
        values = self.to_dict("score", "answer")
        return {n: v for n, v in values.items() if _is_used(n, self.method)}

    def score_key(self) -> dict[str, Any]:
        """Values of the settings that must be equal for two scores to be comparable."""
        return self.key_of(self.to_dict())

    @classmethod
    def key_of(cls, saved: Mapping[str, Any]) -> dict[str, Any]:
        """`score_key` of saved values. Settings that were not saved are left out."""
        key = {
            name: saved[name]
            for name in cls.names("masks", "score")
            if _is_used(name, saved["method"]) and name in saved
        }
        return key | ({"stop": sorted(key["stop"] or ())} if "stop" in key else {})

    def same_but(self, other: "ASMIConfig", *names: str) -> bool:
        """Whether settings of masks and score are equal, apart from `stop` and those in `names`.

        Settings that only Adapt-ASMI uses count if both are Adapt-ASMI.
        """
        ignored = {"stop", *names}
        return all(
            getattr(self, n) == getattr(other, n)
            for n in self.names("masks", "score")
            if n not in ignored and _is_used(n, self.method) and _is_used(n, other.method)
        )

    @property
    def symbol(self) -> str:
        """Name of the method, such as "Sem-ASMI"."""
        return METHODS[self.method]

    def at_depths(self, depths: Sequence[float] | float | None) -> tuple["ASMIConfig", ...]:
        """This config at each of the depths; None: only at its own depth.

        Raises:
            ValueError: there is no depth, or a depth is invalid.
        """
        several = (self.depth,) if depths is None else depths
        several = several if isinstance(several, Sequence) else (several,)
        if not several:
            raise ValueError("expected at least one depth, such as [0.6], got none")
        return tuple({depth_key(each): self.replace(depth=each) for each in several}.values())

    def describe(self, *names: str) -> list[str]:
        """Settings that differ from the default, as the label shows them: `["scope=response"]`."""
        changed = [n for n in names or self.names() if getattr(self, n) != getattr(ASMIConfig, n)]
        shown = {n: SETTINGS[n] for n in changed if _is_used(n, self.method)}
        return [
            declared["label"].format(name=declared["symbol"] or name, value=getattr(self, name))
            for name, declared in shown.items()
            if declared["label"]
        ]

    def counted(self, tokens: int, closed: bool) -> int:
        """Number of an answer's tokens that the score counts: all, or all but the closing one.

        A single token always counts. `closed`: whether the last token ends the answer.
        """
        return tokens - (closed and not self.closing_token and tokens > 1)

    def label(self, symbol: str) -> str:
        """Readable name: always depth and K, and other settings if they are not the default."""
        parts = [f"{100 * self.depth:g}%", f"K={self.top_k}", *self.describe()]
        return f"{symbol} ({', '.join(parts)})"

    def __str__(self) -> str:
        return self.label(self.symbol)


SETTINGS: dict[str, Mapping[str, Any]] = {f.name: f.metadata for f in fields(ASMIConfig)}
"""Setting -> what its field declares; see `_field`."""


def _is_used(name: str, method: str) -> bool:
    """Whether a method uses this setting."""
    return method == "adapt" or not SETTINGS[name]["adapt"]


def check_setting(name: str, value: Any) -> None:
    """Raise ValueError unless the value is valid. None is valid only if it is the default."""
    if value is not None or getattr(ASMIConfig, name) is not None:
        declared = SETTINGS[name]
        declared["check"](f"{name} ({declared['symbol']})" if declared["symbol"] else name, value)


def check_fits(top_k: int, vocabulary: int) -> None:
    """Raise ValueError if K is larger than the vocabulary.

    The default K is valid for any vocabulary: if it is larger, the whole vocabulary is used.
    """
    if top_k > max(vocabulary, ASMIConfig.top_k):
        raise ValueError(
            f"top_k (K) must be at most {vocabulary}, the size of the model's vocabulary, got "
            f"{top_k}. The paper uses {ASMIConfig.top_k}; {vocabulary} would be exact"
        )


def depth_key(depth: float) -> float:
    """A depth rounded for comparing and saving, so that 0.1 * 6 equals 0.6."""
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
