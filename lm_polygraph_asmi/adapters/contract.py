"""Shared by all adapters: prompt and answer in; score or decision, and free baselines out."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from lm_polygraph_asmi.config import ASMIConfig

if TYPE_CHECKING:
    from lm_polygraph_asmi.calibration import Decision
    from lm_polygraph_asmi.scoring.result import Score
    from lm_polygraph_asmi.scoring.scorer import Scorer

AnyScorer = Any
"""A `Scorer`, or for decisions a `Decider`."""
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of OpenAI's messages, and the role that a chat template knows."""
UNRENDERED = ("name", "id", "provider_specific_fields", "cache_control")
"""Fields of messages and their parts that a prompt does not contain."""
MESSAGE_TYPES = ("text", "message")
"""Types that some clients write into a message; it is text in any case."""
EMPTY: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True)
class Assessment:
    """One answer, as every adapter reports it.

    Attributes:
        signal: name of the deciding signal, such as "MSP"; without a calibration, of the score.
        value: of this signal, nats; higher = more uncertain.
        score: fragility of the answer, nats; None if a decision needed no masked pass.
        msp: negative log-likelihood of the answer, nats; a free baseline, as the next two.
        perplexity: mean negative log-likelihood per token, nats: the log of the perplexity.
        entropy: mean entropy of the next-token distributions, nats.
        error_probability: calibrated probability that the answer is wrong; None without a
            calibration.
        decision: "accept" or "abstain" by the calibrated threshold; None: no decision.
        reason: for the decision, in sentences.
        key: equal for results with the same settings and model name.
        warnings: problems with prompt or answer; they may quote both.
    """

    signal: str
    value: float | None
    score: float | None
    msp: float
    perplexity: float
    entropy: float
    error_probability: float | None
    decision: str | None
    reason: str
    key: str
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, result: "Score | Decision") -> "Assessment":
        """The assessment of a `Score` or a `Decision`."""
        from lm_polygraph_asmi.scoring.result import Score

        shared: dict[str, Any] = {
            "key": config_key(result),
            "warnings": result.warnings,
            **{name: result.signals[name] for name in ("msp", "perplexity", "entropy")},
        }
        if isinstance(result, Score):
            return cls(
                signal=result.symbol, value=result.score, score=result.score, decision=None,
                error_probability=None, reason="No decision: there is no calibration.", **shared,
            )  # fmt: skip
        return cls(
            signal=result.title,
            value=result.value,
            score=None if result.score is None else result.score.score,
            error_probability=result.error_probability,
            decision={True: "accept", False: "abstain", None: None}[result.accept],
            reason=result.reason,
            **shared,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self) | {"unit": "nats", "warnings": list(self.warnings)}


def assess(scorer: AnyScorer, prompt: Any, answer: Any = None) -> Assessment:
    """Score one answer, or decide on it: the function that every adapter calls.

    Args:
        scorer: from `open_scorer`.
        prompt: a text, or chat messages as OpenAI's clients write them.
        answer: text with its leading space; None: the model's greedy answer.

    Raises:
        ValueError: as `Scorer.score`.
    """
    return Assessment.of(run(scorer, chat_messages(prompt), answer))


def run(scorer: AnyScorer, prompt: Any, answer: Any = None) -> "Score | Decision":
    """The score, or of a decider the decision."""
    answered = scorer.score if scorer_of(scorer) is scorer else scorer.decide
    return answered(prompt, answer)


def chat_messages(prompt: Any) -> Any:
    """Messages as chat templates know them: their roles, and no fields that hold nothing.

    Templates may ask whether a field such as `tool_calls` is there. Other prompts are returned
    unchanged; what is wrong with them is an error of the scorer.
    """
    if not isinstance(prompt, list | tuple) or not all(isinstance(m, Mapping) for m in prompt):
        return prompt
    messages = []
    for message in prompt:
        fields = {
            name: value
            for name, value in message.items()
            if name not in UNRENDERED
            and not (name == "type" and value in MESSAGE_TYPES)
            and (name == "content" or value not in EMPTY)
        }
        role = fields.get("role")
        fields["role"] = ROLES.get(role, role) if isinstance(role, str) else role
        if role == "assistant" and fields.get("content") is None and "tool_calls" not in fields:
            fields["content"] = ""
        messages.append(fields)
    return messages


def open_scorer(model: Any, calibration: Any = None, **settings: Any) -> AnyScorer:
    """Create the scorer of an adapter; with a calibration, the decider.

    Args:
        model: local path, hub ID, or a loaded transformers model. A loaded one is scored through
            `twin_of`, since the host library may generate with it in other threads.
        calibration: as for `Decider`; None: scores without decisions.
        **settings: of `Scorer`, such as a loaded model's `tokenizer`; for a model by name, also
            those of loading.

    Raises:
        OSError, TypeError, ValueError: as `Scorer` or `Decider`.
    """
    from lm_polygraph_asmi.calibration.calibration import opened
    from lm_polygraph_asmi.calibration.decider import Decider
    from lm_polygraph_asmi.scoring.scorer import Scorer

    calibration = calibration and opened(calibration)
    loaded = model if isinstance(model, str) else twin_of(model)
    return Decider(loaded, calibration, **settings) if calibration else Scorer(loaded, **settings)


def twin_of(model: Any) -> Any:
    """A copy of a model with new modules over the same weights, at almost no memory.

    Scoring hooks modules, which would affect other threads that generate with them.
    """
    weights = {id(part): part for part in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, weights)


class Halted(ValueError):
    """The client is gone or the server shuts down: generation stops."""


def scorer_of(scorer: AnyScorer) -> "Scorer":
    """The scorer, or that of a decider."""
    return scorer.scorer if hasattr(scorer, "scorer") else scorer


def for_request(scorer: AnyScorer, stop: Sequence[str] | None, max_new_tokens: int) -> AnyScorer:
    """The scorer of one request: itself, or a copy on the same model with other stop and length.

    Args:
        scorer: from `open_scorer`.
        stop: stop strings; None: the scorer's.
        max_new_tokens: largest number of generated tokens.
    """
    base = scorer_of(scorer)
    stops = base.stop if stop is None else list(stop)
    if (stops, max_new_tokens) == (base.stop, base.config.max_new_tokens):
        return scorer
    return _with_generation(scorer, stops, max_new_tokens, base.generation.check)


def halting(scorer: AnyScorer, check: Callable[[], None]) -> AnyScorer:
    """A copy of a scorer on the same model, which calls `check` before each generated token."""
    base = scorer_of(scorer)
    return _with_generation(scorer, base.stop, base.config.max_new_tokens, check)


def _with_generation(
    scorer: AnyScorer, stop: list[str], max_new_tokens: int, check: Callable[[], None] | None
) -> AnyScorer:
    """A copy with another generation; the model, the engines and all that is cached are shared."""
    from lm_polygraph_asmi.host.stopping import StopConditions
    from lm_polygraph_asmi.scoring.generation import Generation

    base = scorer_of(scorer)
    copied = copy.copy(base)
    copied.config = base.config.replace(stop=tuple(stop), max_new_tokens=max_new_tokens)
    copied.stop, model, tokenizer = stop, base.model, base.tokenizer
    copied.stop_conditions = StopConditions(model, tokenizer, stop)
    copied.generation = Generation(model, tokenizer, copied.stop_conditions, check)
    return copied if base is scorer else scorer.with_scorer(copied)


def config_key(result: "Score | Decision") -> str:
    """Hash (12 hexadecimal digits) of the settings that comparable results must share."""
    key = ASMIConfig.key_of(result.settings)
    key |= {"layer": result.settings["layer"], "model": result.model.rstrip("/").rpartition("/")[2]}
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Replace a failed import of an adapter's library by an error that names the extra.

    Raises:
        ImportError: the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed: pip install 'lm-polygraph-asmi[{name}]'"
        ) from error
