"""`Decider`: a model with a calibration, to decide on many answers; `decide`: one call for one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions.calibration import MACHINE, Calibration, opened
from lm_polygraph_asmi.decisions.decision import Decision
from lm_polygraph_asmi.model import scoring_session
from lm_polygraph_asmi.scoring.rows import Outcome, outcomes
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.signals import SIGNALS
from lm_polygraph_asmi.scoring.text import Answer, Prompt, parse_request
from lm_polygraph_asmi.scoring.unmasked import fingerprints, read

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model


class Decider:
    """A model with a calibration, to decide on many answers: accept or abstain.

    Decisions by MSP, perplexity, entropy or a learned score run no masked pass; those by ASMI's
    scores are computed with the score.

    Args:
        model: as for `Scorer`; or a `Scorer`, which sets all settings.
        calibration: a `Calibration`, or the path of a saved one.
        config: as for `Scorer`.
        **settings: as for `Scorer`; those left out are the calibration's.

    Raises:
        OSError, TypeError, ValueError: as `Scorer` and `Calibration.load`; or a setting that the
            deciding signal depends on differs from the calibration's.

    Example:
        >>> decider = Decider("smollm2", calibration)
        >>> decision = decider.decide(prompt, " Edda Holm")
        >>> decision.accept, decision.signal, decision.score  # no masked pass was run
        (None, 'msp', None)
    """

    _result: ClassVar[type] = Decision

    def __init__(
        self,
        model: "Scorer | PreTrainedModel | Model | str | Path",
        calibration: Calibration | str | Path,
        config: ASMIConfig | None = None,
        **settings: Any,
    ) -> None:
        self.calibration = run = opened(calibration)
        if isinstance(model, Scorer):
            if config is not None or settings:
                raise ValueError("a Scorer has settings: leave those of the Decider out")
            run.configured(model.config.replace(stop=model.config.stop or ()))
            self.scorer = model
            return
        of_config = {n: settings.pop(n) for n in ASMIConfig.names() if n in settings}
        self.scorer = Scorer(model, run.configured(config, of_config), **settings)

    def decide(
        self, prompt: Prompt, answer: Answer | None = None, samples: Sequence[Answer] | None = None
    ) -> Decision:
        """Decide on one answer; see `lm_polygraph_asmi.decide`.

        Example:
            >>> decider.decide(prompt, " Edda Holm").signal
            'msp'
        """
        scorer, signal = self.scorer, SIGNALS[self.calibration.signal]
        with scoring_session(scorer.model):  # the model's state is read once
            found: Any = (
                scorer.score(prompt, answer, samples)
                if signal.masked
                else read(scorer, prompt, answer, signal.states)
            )
            if any(name in self.calibration.settings for name in MACHINE):
                found = replace(found, settings=found.settings | fingerprints(scorer))
        return self.calibration.decide(found)

    def score_many(
        self, rows: Iterable[Any], on_error: str = "return", id_field: str = "id"
    ) -> Iterator[Outcome]:
        """Decide on rows as they arrive; arguments as of `Scorer.score_many`.

        Example:
            >>> rows = [{"id": "q1", "prompt": prompt, "answer": " Edda Holm"}, {"id": "q2"}]
            >>> for outcome in decider.score_many(rows):
            ...     print(outcome.id, outcome.result and outcome.result.accept, outcome.error)
            q1 None None
            q2 None expected a text, or an object with a "prompt", got the fields id
        """
        return outcomes(self.decide, rows, on_error, id_field)

    @property
    def made_with(self) -> dict[str, Any]:
        """What all decisions by this calibration share."""
        run = self.calibration
        limit = run.guarantee.threshold
        return {"calibration": run.name, "signal": run.signal, "threshold": limit}


def decide(
    model: "Scorer | PreTrainedModel | Model | str | Path",
    prompt: Prompt,
    answer: Answer | None = None,
    *,
    calibration: Calibration | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: ASMIConfig | None = None,
    samples: Sequence[Answer] | None = None,
    **settings: Any,
) -> Decision:
    """Accept an answer, or abstain: what a calibration says of it.

    If `answer` is omitted, it is the model's greedy answer. Many rows: `Decider`.

    Args:
        model, prompt, answer, tokenizer, samples: as for `score`.
        calibration: made by `calibrate_rows`, `calibrate_run` or `polygraph_asmi calibrate`, or the
            path of its file.
        config: as for `score`.
        **settings: as for `score`; those left out are the calibration's.

    Returns:
        A `Decision`; its value is in nats, higher = more uncertain.

    Raises:
        OSError, TypeError, ValueError: as `Decider` and `score`.

    Example:
        >>> decision = decide("smollm2", prompt, " Edda Holm", calibration=calibration)
        >>> decision.accept, decision.reason[:12]
        (None, 'No threshold')
    """
    parse_request(prompt, answer, samples)  # errors are raised before a model is loaded
    if tokenizer is not None:
        settings["tokenizer"] = tokenizer
    return Decider(model, calibration, config, **settings).decide(prompt, answer, samples)
