"""`Decider`: a model with a calibration, to decide on many answers; `decide`: one call for one."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions.calibration import MACHINE, Calibration, opened
from lm_polygraph_asmi.decisions.decision import COLUMNS, DERIVED, Decision
from lm_polygraph_asmi.model import scoring_session
from lm_polygraph_asmi.scoring.batches import BatchScorer
from lm_polygraph_asmi.scoring.many import Outcome, Rows, one_by_one, run_batch
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.signals import SIGNALS
from lm_polygraph_asmi.scoring.text import Answer, Prompt, Request, parse_request
from lm_polygraph_asmi.validation import check_one_of

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

    columns = COLUMNS
    fields = frozenset({*(field.name for field in fields(Decision)), *DERIVED})

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
            run.configured(model.config.replace(stop=tuple(model.stop)))
            self.scorer = model
            return
        of_config = {n: settings.pop(n) for n in ASMIConfig.names() if n in settings}
        self.scorer = Scorer(model, run.configured(config, of_config), **settings)

    @property
    def masked(self) -> bool:
        """Whether the deciding signal needs masked passes."""
        return SIGNALS[self.calibration.signal].masked

    def decide(
        self, prompt: Prompt, answer: Answer | None = None, samples: Sequence[Answer] | None = None
    ) -> Decision:
        """Decide on one answer; see `lm_polygraph_asmi.decide`.

        Example:
            >>> decider.decide(prompt, " Edda Holm").signal
            'msp'
        """
        return self.decide_request(parse_request(prompt, answer, samples))

    def decide_request(self, request: Request) -> Decision:
        """`decide` of a request."""
        scorer = self.scorer
        with scoring_session(scorer.model):  # the model's state is read once
            if self.masked:
                return self.of(scorer.score_request(request))
            return self.of(scorer.read_request(request, self.states))

    @property
    def states(self) -> bool:
        """Whether the deciding signal needs hidden states."""
        return SIGNALS[self.calibration.signal].states

    def of(self, answer: Any) -> Decision:
        """The decision on a `Score` or an `UnmaskedAnswer` of this scorer."""
        if any(name in self.calibration.settings for name in MACHINE):
            answer = replace(answer, settings=answer.settings | self.scorer.fingerprints())
        return self.calibration.decide(answer)

    def decide_many(
        self, rows: Iterable[Any], on_error: str = "return", id_field: str = "id"
    ) -> Iterator[Outcome]:
        """Decide on rows as they arrive; arguments as of `Scorer.score_many`.

        Example:
            >>> rows = [{"id": "q1", "prompt": prompt, "answer": " Edda Holm"}, {"id": "q2"}]
            >>> for outcome in decider.decide_many(rows):
            ...     print(outcome.id, outcome.result and outcome.result.accept, outcome.error)
            q1 None None
            q2 None expected a text, or an object with a "prompt", got the fields id
        """
        check_one_of("on_error", on_error, ("return", "raise"))
        return one_by_one(self.decide_request, rows, on_error, id_field)

    def run_batch(self, rows: Sequence[Mapping[str, Any]]) -> Iterator[Outcome]:
        """Outcomes of a batch of rows, from the result cache if it has the batch."""
        key = self.scorer.batch_key(rows)
        if key:
            key |= {"calibration": self.calibration.identity}
        return run_batch(self.decide_request, rows, self.scorer.result_cache, key)


class BatchDecider(BatchScorer):
    """`score_batch` with decisions, for tables of Arrow; loads its model when created.

    Args:
        model: local path, hub ID or "smollm2".
        calibration: as for `Decider`.
        tokens: as for `score_batch`.
        **settings: of `Decider`.

    Example:
        >>> import pyarrow as pa
        >>> decide_table = BatchDecider("smollm2", calibration)
        >>> table = decide_table(pa.table({"prompt": [prompt], "answer": [" Edda Holm"]}))
        >>> table["asmi_accept"][0].as_py(), table["asmi_signal"][0].as_py()
        (None, 'msp')
    """

    def __init__(
        self,
        model: str,
        calibration: Calibration | str | Path,
        tokens: str = "compact",
        **settings: Any,
    ) -> None:
        super().__init__(model, tokens, calibration=calibration, **settings)

    def _open(self, model: str, **settings: Any) -> Rows:
        return Decider(model, **settings)


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
    request = parse_request(prompt, answer, samples)  # errors are raised before a model is loaded
    if tokenizer is not None:
        settings["tokenizer"] = tokenizer
    return Decider(model, calibration, config, **settings).decide_request(request)
