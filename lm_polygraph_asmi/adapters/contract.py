"""What all adapters share: prompt and answer in, score, free baselines and decision out."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from lm_polygraph_asmi.config import ASMIConfig

if TYPE_CHECKING:
    from lm_polygraph_asmi.scoring.result import Score
    from lm_polygraph_asmi.scoring.scorer import Scorer


@dataclass(frozen=True)
class Assessment:
    """One scored answer, as every adapter reports it.

    Attributes:
        method: name of the score, such as "Sem-ASMI".
        score: fragility of the answer, nats; higher = more fragile.
        msp: negative log-likelihood of the answer, nats; a free baseline, as the next two.
        perplexity: mean negative log-likelihood of a token, nats: the logarithm of the perplexity.
        entropy: mean entropy of the next-token distributions, nats.
        error_probability: calibrated probability that the answer is wrong; None without a
            calibration run.
        decision: "accept" or "abstain" by the calibrated threshold; None where nothing is decided.
        reason: why, in a sentence.
        key: the same for two scores of the same settings and model name, else another.
        warnings: what may be wrong with the question; they may quote prompt and answer.
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
        free = {name: score.signals[name] for name in ("msp", "perplexity", "entropy")}
        return cls(
            method=score.symbol,
            score=score.score,
            error_probability=score.error_probability,
            decision={True: "accept", False: "abstain", None: None}[score.accept],
            reason=score.accept_reason,
            key=config_key(score),
            warnings=score.warnings,
            **free,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self) | {"unit": "nats", "warnings": list(self.warnings)}


def assess(scorer: "Scorer", prompt: Any, answer: Any = None) -> Assessment:
    """Score one answer: the function that every adapter calls.

    Args:
        scorer: from `open_scorer`.
        prompt: a text, or chat messages.
        answer: text as it follows the prompt; None for the model's own greedy answer.

    Raises:
        ValueError: as `Scorer.score`.
    """
    return Assessment.of(scorer.score(prompt, answer))


def open_scorer(model: Any, **settings: Any) -> "Scorer":
    """The scorer of an adapter; the only place that makes one.

    Args:
        model: name, folder, or a loaded transformers model. A loaded one is scored through a twin
            (see `twin_of`): threads of the host library may generate with it at the same time.
        **settings: of `Scorer`, among them a loaded model's `tokenizer`, and `calibration`, a
            calibration run; of `scoring.loading.load` for a model by name.

    Raises:
        OSError, TypeError, ValueError: as `Scorer`.
    """
    from lm_polygraph_asmi.scoring.loading import load
    from lm_polygraph_asmi.scoring.scorer import Scorer

    if isinstance(model, str):
        return load(model, **settings)
    return Scorer(twin_of(model), **settings)


def twin_of(model: Any) -> Any:
    """A model with modules of its own over the same weights, at no memory worth naming.

    Scoring puts hooks into modules, and another thread that generates with the same modules would
    run into them.
    """
    shared = {id(part): part for part in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)


class Halted(ValueError):
    """Whoever asked is gone, or the server ends: the answer is not written on."""


def for_request(
    scorer: "Scorer",
    stop: Sequence[str] | None,
    max_new_tokens: int,
    halted: Callable[[], bool] = lambda: False,
) -> "Scorer":
    """The same scorer, over the same model, for one prompt, with an ending and a length of its own.

    Args:
        scorer: from `open_scorer`.
        stop: what ends an answer; None for the scorer's own.
        max_new_tokens: at most so many tokens.
        halted: asked before each token; once it is true, generation raises `Halted`.
    """
    import torch
    from transformers import StoppingCriteriaList

    from lm_polygraph_asmi.host.stopping import StopConditions
    from lm_polygraph_asmi.scoring.generation import Generation

    own = copy.copy(scorer)
    own.config = own.config.replace(max_new_tokens=max_new_tokens)
    if stop is not None:
        own.stop = list(stop)
        own.stop_conditions = StopConditions(own.model, own.tokenizer, own.stop)
    closes = own.stop_conditions.closes
    prompt: list[int] = []  # how long the prompt is: known at the first token

    def ends(ids: Any, _: Any, **__: Any) -> Any:
        if halted():
            raise Halted
        prompt[:] = prompt or [ids.shape[-1] - 1]
        rows = ids[:, prompt[0] :].tolist()  # several where answers are drawn
        return torch.tensor([bool(own.stop) and closes(row) for row in rows], device=ids.device)

    # In the place of the criterion that reads the whole vocabulary for every new stop string.
    stopping = StoppingCriteriaList([ends])
    own.generation = Generation(own.model, own.tokenizer, own.stop_conditions, stopping)
    return own


def config_key(score: "Score") -> str:
    """Twelve hexadecimal digits of the settings that two scores must share to be compared."""
    used = ASMIConfig.key_of(score.settings)
    used |= {"layer": score.settings["layer"], "model": score.model.rstrip("/").rpartition("/")[2]}
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest()[:12]


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Turn the failed import of an adapter's library into what to do about it.

    Raises:
        ImportError: the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed: pip install 'lm-polygraph-asmi[{name}]'"
        ) from error
