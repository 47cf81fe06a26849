"""The event of OpenTelemetry, against its own SDK."""

import pytest

from lm_polygraph_asmi.adapters.contract import assess
from lm_polygraph_asmi.scoring.scorer import Scorer
from tests.adapters.conftest import serving

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import InMemoryLogRecordExporter, SimpleLogRecordProcessor
from opentelemetry.sdk.trace import TracerProvider

from lm_polygraph_asmi.adapters import telemetry

PROMPT = "Who built the ferry?"


@pytest.fixture
def exporter():
    return InMemoryLogRecordExporter()


@pytest.fixture
def provider(exporter):
    found = LoggerProvider()
    found.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    return found


def events(exporter):
    return [one.log_record for one in exporter.get_finished_logs()]


def test_a_scorer_emits_an_event_for_each_score(scorer, provider, exporter):
    own = telemetry.instrument(
        Scorer(scorer.model, tokenizer=scorer.tokenizer, scope="response"), provider
    )
    expected = assess(scorer, PROMPT, " Brask")
    span = TracerProvider().get_tracer("test").start_span("chat")
    with trace.use_span(span):
        own.score(PROMPT, " Brask")
    list(own.score_many([PROMPT, {"prompt": PROMPT, "answer": " Brask"}, {"prompt": None}]))
    own.score(PROMPT, " Brask")
    first, *others = events(exporter)
    assert len(others) == 3  # none of the row that could not be scored
    assert first.event_name == "gen_ai.evaluation.result"
    assert first.span_id == span.get_span_context().span_id
    found = dict(first.attributes)
    assert found["gen_ai.evaluation.name"] == "Sem-ASMI"
    assert found["asmi.perplexity"] == pytest.approx(expected.perplexity, abs=1e-5)
    assert "gen_ai.evaluation.score.label" not in found
    assert not [value for value in found.values() if "Brask" in str(value) or value == PROMPT]
    assert exporter.get_finished_logs()[0].instrumentation_scope.schema_url.endswith("/1.38.0")


def test_the_server_emits_with_the_replys_id(scorer, provider, exporter):
    httpx = pytest.importorskip("httpx")
    with serving(scorer, emit=telemetry.emitter(provider)) as address:
        asked = {"prompt": PROMPT, "answer": [" Brask", " True"]}
        reply = httpx.post(f"http://{address}/score", json=asked).json()
        asked = {"model": "tiny", "prompt": PROMPT, "stream": True}
        assert "[DONE]" in httpx.post(f"http://{address}/v1/completions", json=asked).text
    *scored, written = events(exporter)
    assert [one.attributes["gen_ai.response.id"] for one in scored] == [reply["id"]] * 2
    values = [one.attributes["gen_ai.evaluation.score.value"] for one in scored]
    assert values == [one["asmi"]["score"] for one in reply["data"]]
    assert written.attributes["gen_ai.response.id"].startswith("cmpl-")


def test_nothing_is_emitted_unasked(scorer, exporter):
    assess(scorer, PROMPT, " Brask")
    assert not exporter.get_finished_logs()
    assert "score" not in vars(scorer)


def test_without_a_provider_events_are_not_lost_in_silence():
    with pytest.raises(RuntimeError, match="no OpenTelemetry logger provider is set"):
        telemetry.emitter()
