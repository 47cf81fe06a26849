"""Find out, without data, whether a model can be scored, with which passes, and how fast."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.config import SCOPES, ASMIConfig
from lm_polygraph_asmi.core.model import MaskedModel, attention_of, masked_model, scoring_session
from lm_polygraph_asmi.core.model.choice import MASKABLE, PASSES, passes_in_use
from lm_polygraph_asmi.host.releases import untested_releases
from lm_polygraph_asmi.scoring.scorer import Scorer

PROMPT = (
    "The ferry Ondine was built in Brask in 1931 by Edda Holm. "
    "Question: Who built the ferry?\nAnswer:"
)


@dataclass
class ModelDiagnosis:
    """What the checks of a model found."""

    model: str  # the model's name
    checks: list[dict[str, str]] = field(default_factory=list)  # each: check, state and text

    @property
    def works(self) -> bool:
        """Whether no check found a problem and at least one self-check passed."""
        states = {check["state"] for check in self.checks}
        return "problem" not in states and not {"ok", "slower"}.isdisjoint(states)

    def add(self, check: str, state: str, text: str) -> None:
        """Add a check. States: found (a module), ok, slower, unsupported, warning, problem."""
        self.checks.append({"check": check, "state": state, "text": text})

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain values for JSON."""
        return asdict(self) | {"works": self.works}

    def __rich__(self) -> Table:
        table = Table("check", "state", "found", title=self.model)
        for check in self.checks:
            table.add_row(check["check"], check["state"], Text(check["text"]))
        return table


def diagnose_model(
    name: str,
    model: PreTrainedModel | str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: ASMIConfig | None = None,
    **loading: Any,
) -> ModelDiagnosis:
    """Find a model's modules, run the self-check, and time an answer.

    The self-check runs in both scopes with each attention implementation.

    Args:
        name: the model's name in the report. Other arguments are those of `Scorer`.

    Example:
        >>> diagnosis = diagnose_model("tiny", scorer.model, scorer.tokenizer)
        >>> sorted(check["check"] for check in diagnosis.checks if check["state"] == "ok")
        ['eager, all', 'eager, response', 'sdpa, all', 'sdpa, response']
    """
    diagnosis = ModelDiagnosis(name)
    for untested in untested_releases():
        diagnosis.add(
            untested, "warning", "not a release that the tests passed on, see data/tested.csv"
        )
    config = config or ASMIConfig()
    try:
        scorer = Scorer(model, config, tokenizer=tokenizer, **loading)
    except (OSError, TypeError, ValueError) as error:
        diagnosis.add("structure", "problem", str(error))
        return diagnosis
    model, tokenizer = scorer.model, scorer.tokenizer
    with masked_model(model, structure=config.structure) as f:
        for part, description in _described(f).items():
            diagnosis.add(part, "found", description)
    for attention in dict.fromkeys([attention_of(model), *MASKABLE]):
        try:
            with scoring_session(model, attention):
                pass
        except ValueError:
            diagnosis.add(attention, "unsupported", "the model has no such implementation")
            continue
        for scope in SCOPES:
            used = config.replace(attention=attention, scope=scope)
            state, text = _checked(Scorer(model, used, tokenizer=tokenizer))
            diagnosis.add(f"{attention}, {scope}", state, text)
    return diagnosis


def _described(f: MaskedModel) -> dict[str, str]:
    model, structure = f.model, f.structure
    heads = " or ".join(map(str, sorted({*structure.heads.values()})))
    paths = {module: path for path, module in model.named_modules()}
    return {
        "class": type(model).__name__,
        "weights": f"{model.num_parameters():,} parameters, {model.dtype}, {model.device}",
        "layers": f"{structure.layers} ({structure.num_layers})",
        "heads": f"{heads} a layer, in {len(structure.heads)} of {structure.num_layers} layers",
        "output projection of the heads": ", ".join(sorted({*structure.projections.values()})),
        "base model": structure.base_model,
        "lm head": paths[f.lm_head],
    }


def _checked(scorer: Scorer) -> tuple[str, str]:
    """State and text of the self-check in the scorer's scope, with the time of one answer."""
    model, config = scorer.model, scorer.config
    try:
        scorer.score(PROMPT)  # runs the self-check, so it is not timed
        start = time.perf_counter()
        score = scorer.score(PROMPT)
    except (RuntimeError, ValueError, TypeError, FloatingPointError, NotImplementedError) as error:
        return "problem", str(error)
    seconds, tokens = time.perf_counter() - start, len(score.tokens)
    with masked_model(model, config.attention, config.structure, config.compile) as f:
        passes = next(iter(passes_in_use(f, config.scope)), "none")
    text = (
        f"{passes}; {seconds:.2f} s for {tokens} tokens after {score.prompt_tokens} prompt tokens"
    )
    if passes == (fastest := next(iter(PASSES[config.scope]))):
        return "ok", text
    return "slower", f"{text}; the fastest way, {fastest}, cannot be used for this model"
