"""Shared by all adapters: prompt and answer in; score, free baselines and decision out."""

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
    from lm_polygraph_asmi.scoring.result import Score
    from lm_polygraph_asmi.scoring.scorer import Scorer

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of OpenAI's messages, and the role that a chat template knows."""
UNRENDERED = ("name", "id", "provider_specific_fields", "cache_control")
"""Fields of messages and their parts that a prompt does not contain."""
MESSAGE_TYPES = ("text", "message")
"""Types that some clients write into a message; it is text in any case."""
EMPTY: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True)
class Assessment:
    """One scored answer, as every adapter reports it.

    Attributes:
        method: name of the score, such as "Sem-ASMI".
        score: fragility of the answer, nats; higher = more fragile.
        msp: negative log-likelihood of the answer, nats; a free baseline, as the next two.
        perplexity: mean negative log-likelihood per token, nats: the log of the perplexity.
        entropy: mean entropy of the next-token distributions, nats.
        error_probability: calibrated probability that the answer is wrong; None without a
            calibration.
        decision: "accept" or "abstain" by the calibrated threshold; None: no decision.
        reason: for the decision, in sentences.
        key: equal for scores with the same settings and model name.
        warnings: problems with prompt or answer; they may quote both.
    """

    method: str
    score: float
    msp: float
    perplexity: float
    entropy: float
    error_probability: float | None
    decision: str | None
    reason: str
    key: str
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, score: "Score") -> "Assessment":
        """The assessment of a `Score`."""
        baselines = {name: score.signals[name] for name in ("msp", "perplexity", "entropy")}
        return cls(
            method=score.symbol,
            score=score.score,
            error_probability=score.error_probability,
            decision={True: "accept", False: "abstain", None: None}[score.accept],
            reason=score.accept_reason,
            key=config_key(score),
            warnings=score.warnings,
            **baselines,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self) | {"unit": "nats", "warnings": list(self.warnings)}


def assess(scorer: "Scorer", prompt: Any, answer: Any = None) -> Assessment:
    """Score one answer: the function that every adapter calls.

    Args:
        scorer: from `open_scorer`.
        prompt: a text, or chat messages as OpenAI's clients write them.
        answer: text with its leading space; None: the model's greedy answer.

    Raises:
        ValueError: as `Scorer.score`.
    """
    return Assessment.of(scorer.score(chat_messages(prompt), answer))


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


def open_scorer(model: Any, **settings: Any) -> "Scorer":
    """Create the scorer of an adapter.

    Args:
        model: local path, hub ID, or a loaded transformers model. A loaded one is scored through
            `twin_of`, since the host library may generate with it in other threads.
        **settings: of `Scorer`, such as a loaded model's `tokenizer` and `calibration`; for a model
            by name, also those of loading.

    Raises:
        OSError, TypeError, ValueError: as `Scorer`.
    """
    from lm_polygraph_asmi.scoring.scorer import Scorer

    return Scorer(model if isinstance(model, str) else twin_of(model), **settings)


def twin_of(model: Any) -> Any:
    """A copy of a model with new modules over the same weights, at almost no memory.

    Scoring hooks modules, which would affect other threads that generate with them.
    """
    weights = {id(part): part for part in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, weights)


class Halted(ValueError):
    """The client is gone or the server shuts down: generation stops."""


def for_request(scorer: "Scorer", stop: Sequence[str] | None, max_new_tokens: int) -> "Scorer":
    """The scorer of one request: itself, or a copy on the same model with other stop and length.

    Args:
        scorer: from `open_scorer`.
        stop: stop strings; None: the scorer's.
        max_new_tokens: largest number of generated tokens.
    """
    stops = scorer.stop if stop is None else list(stop)
    if (stops, max_new_tokens) == (scorer.stop, scorer.config.max_new_tokens):
        return scorer
    return _with_generation(scorer, stops, max_new_tokens, scorer.generation.check)


def halting(scorer: "Scorer", check: Callable[[], None]) -> "Scorer":
    """A copy of a scorer on the same model, which calls `check` before each generated token."""
    return _with_generation(scorer, scorer.stop, scorer.config.max_new_tokens, check)


def _with_generation(
    scorer: "Scorer", stop: list[str], max_new_tokens: int, check: Callable[[], None] | None
) -> "Scorer":
    """A copy with another generation; the model, the engines and all that is cached are shared."""
    from lm_polygraph_asmi.host.stopping import StopConditions
    from lm_polygraph_asmi.scoring.generation import Generation

    copied = copy.copy(scorer)
    copied.config = scorer.config.replace(stop=tuple(stop), max_new_tokens=max_new_tokens)
    copied.stop, model, tokenizer = stop, scorer.model, scorer.tokenizer
    copied.stop_conditions = StopConditions(model, tokenizer, stop)
    copied.generation = Generation(model, tokenizer, copied.stop_conditions, check)
    return copied


def config_key(score: "Score") -> str:
    """Hash (12 hexadecimal digits) of the settings that comparable scores must share."""
    key = ASMIConfig.key_of(score.settings)
    key |= {"layer": score.settings["layer"], "model": score.model.rstrip("/").rpartition("/")[2]}
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
