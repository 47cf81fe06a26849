"""`Decider` decides on many answers with one model and calibration; `decide` on one answer."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.model import scoring_session
from lm_polygraph_asmi.decisions.calibration import MACHINE, Calibration
from lm_polygraph_asmi.decisions.decision import Decision
from lm_polygraph_asmi.inputs import TEMPLATE, Answer, Prompt, parse_request
from lm_polygraph_asmi.scoring.rows import Outcome, outcomes
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.signals import signal_of

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model


class Decider:
    """A model with a calibration, which decides on many answers: accept or abstain.

    `model` and `settings` are as for `Scorer`; settings that are left out are the calibration's.
    `model` may also be a `Scorer`; then there are no `settings`. Raises ValueError: a setting on
    which the signal depends differs from the calibration's. Masked passes are run only if the
    signal is a score of ASMI.

    Example:
        >>> decider = Decider("smollm2", calibration)
        >>> decision = decider.decide(prompt, " Edda Holm")
        >>> decision.accept, decision.signal, decision.score  # no masked pass was run
        (None, 'msp', None)
    """

    result_type: ClassVar[type] = Decision

    def __init__(
        self,
        model: "Scorer | PreTrainedModel | Model | str | Path",
        calibration: Calibration | str | Path,
        **settings: Any,
    ) -> None:
        if not isinstance(calibration, Calibration):
            calibration = Calibration.load(calibration)
        self.calibration = calibration
        if isinstance(model, Scorer):
            if settings:
                raise ValueError("a Scorer has its own settings: leave those of the Decider out")
            calibration.configured(model.config.to_dict() | {"stop": model.config.stop or ()})
            self.scorer = model
            return
        of_config = {n: settings.pop(n) for n in ASMIConfig.names() if n in settings}
        self.scorer = Scorer(model, calibration.configured(of_config), **settings)

    def decide(
        self,
        prompt: Prompt,
        answer: Answer | None = None,
        samples: Sequence[Answer] | None = None,
        **template: Any,
    ) -> Decision:
        """Decide on one answer; see `lm_polygraph_asmi.decide`."""
        scorer, signal = self.scorer, signal_of(self.calibration.signal)
        with scoring_session(scorer.model):  # one session, so the model's state is read once
            scored: Any = (
                scorer.score(prompt, answer, samples, **template)
                if signal.masked
                else scorer.read(prompt, answer, signal.states, **template)
            )
            if any(name in self.calibration.settings for name in MACHINE):
                scored = replace(scored, settings=scored.settings | scorer.fingerprints())
        return self.calibration.decide(scored)

    def score_many(
        self, rows: Iterable[Any], on_error: str = "return", id_field: str = "id"
    ) -> Iterator[Outcome]:
        """Decide on rows as they arrive. For the arguments, see `Scorer.score_many`."""
        return outcomes(self.decide, rows, on_error, id_field)

    def known_fingerprints(self) -> dict[str, str]:
        """See `Scorer.known_fingerprints`."""
        return self.scorer.known_fingerprints()

    def differences(self, row: Mapping[str, Any]) -> list[str]:
        """How a written decision ("there") differs from decisions made here, in words."""
        made_with = self.calibration.made_with.items()
        others = [name for name, value in made_with if row.get(name) != value]
        return [*others, *self.scorer.differences(row)]


def decide(
    model: "Scorer | PreTrainedModel | Model | str | Path",
    prompt: Prompt,
    answer: Answer | None = None,
    *,
    calibration: Calibration | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    samples: Sequence[Answer] | None = None,
    **settings: Any,
) -> Decision:
    """Accept an answer, or abstain, with a calibration or the path of one.

    Other arguments are as for `score`; settings that are left out are the calibration's. To decide
    on many rows, use `Decider`. Raises the errors of `score` and `Decider`.

    Example:
        >>> decision = decide("smollm2", prompt, " Edda Holm", calibration=calibration)
        >>> decision.accept, decision.reason[:12]
        (None, 'No threshold')
    """
    template = {name: settings.pop(name) for name in TEMPLATE if name in settings}
    parse_request(prompt, answer, samples, **template)  # raises before a model is loaded
    if tokenizer is not None:
        settings["tokenizer"] = tokenizer
    return Decider(model, calibration, **settings).decide(prompt, answer, samples, **template)
