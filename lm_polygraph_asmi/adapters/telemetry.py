"""An OpenTelemetry event `gen_ai.evaluation.result` per score or decision; off by default.

Names follow version 1.38.0 of OpenTelemetry's semantic conventions, the first with this event
(status development; later versions refer to a separate repository).
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from lm_polygraph_asmi.adapters.contract import AnyScorer, Assessment, extra

EVENT = "gen_ai.evaluation.result"
SCHEMA = "https://opentelemetry.io/schemas/1.38.0"


def attributes(assessment: Assessment, response_id: str | None = None) -> dict[str, Any]:
    """Attributes of the event: numbers and the decision as label; no prompt, no answer."""
    values = {
        "gen_ai.evaluation.name": assessment.signal,
        "gen_ai.evaluation.score.value": assessment.value,
        "gen_ai.evaluation.score.label": assessment.decision,
        "gen_ai.evaluation.explanation": assessment.reason,
        "gen_ai.response.id": response_id,
        "asmi.score": assessment.score,
        "asmi.msp": assessment.msp,
        "asmi.perplexity": assessment.perplexity,
        "asmi.entropy": assessment.entropy,
        "asmi.error_probability": assessment.error_probability,
        "asmi.config_key": assessment.key,
    }
    return {name: value for name, value in values.items() if value is not None}


def emitter(provider: Any = None) -> Callable[..., None]:
    """A function that emits the event of an assessment: `emit(assessment, response_id=None)`.

    Args:
        provider: logger provider; None: the application's, which must be set before.

    Raises:
        ImportError: the extra `otel` is not installed.
        RuntimeError: no logger provider is set, so events would be lost silently.
    """
    with extra("otel"):
        from opentelemetry import _logs as logs
        from opentelemetry.sdk._logs import LoggerProvider

    provider = provider or logs.get_logger_provider()
    if not isinstance(provider, LoggerProvider):
        raise RuntimeError(
            "no OpenTelemetry logger provider is set: set one, or start the program with "
            "opentelemetry-instrument"
        )
    logger = provider.get_logger("lm_polygraph_asmi", schema_url=SCHEMA)

    def emit(assessment: Assessment, response_id: str | None = None) -> None:
        logger.emit(
            logs.LogRecord(
                event_name=EVENT,
                severity_number=logs.SeverityNumber.INFO,
                attributes=attributes(assessment, response_id),
            )
        )

    return emit


def instrument(scorer: AnyScorer, provider: Any = None) -> AnyScorer:
    """Make a `Scorer` or a `Decider` emit an event for each result; returns it.

    Args:
        scorer: `score` and `score_many`, or `decide` and `decide_many` emit; for `stream`, the
            caller must emit.
        provider: as for `emitter`.

    Raises:
        ImportError, RuntimeError: as `emitter`.
    """
    verb = "decide" if hasattr(scorer, "decide") else "score"
    emit, single, many = emitter(provider), getattr(scorer, verb), getattr(scorer, f"{verb}_many")

    def single_and_emit(*args: Any, **options: Any) -> Any:
        result = single(*args, **options)
        emit(Assessment.of(result))
        return result

    def many_and_emit(rows: Iterable[Any], *args: Any, **options: Any) -> Iterator[Any]:
        for outcome in many(rows, *args, **options):
            if outcome.result is not None:
                emit(Assessment.of(outcome.result))
            yield outcome

    setattr(scorer, verb, single_and_emit)
    setattr(scorer, f"{verb}_many", many_and_emit)
    return scorer
