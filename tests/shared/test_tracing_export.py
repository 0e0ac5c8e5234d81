"""A collector that is down, slow or rejecting requests loses spans, but delays nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, TraceIdRatioBased
from prometheus_client import REGISTRY

from shared.tracing.export import MAX_LINKS, QUEUE_SPANS, OtlpTracer
from shared.tracing.spans import install, record
from tests.kept_spans import new_trace
from tests.limits import WAIT_LIMIT_S
from tests.otlp import running_collector

FACTS = {"service.name": "test"}


class StuckExporter(SpanExporter):
    """Accepts nothing until it is released."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.go, self.entered = threading.Event(), threading.Event()
        self.result = result
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.entered.set()
        self.go.wait(WAIT_LIMIT_S)
        self.spans += len(spans)
        return self.result

    def shutdown(self) -> None:
        self.go.set()


def counted(end: str) -> float:
    return REGISTRY.get_sample_value("penstock_trace_spans_total", {"end": end}) or 0.0


@contextmanager
def exporting(exporter: SpanExporter | None = None) -> Iterator[OtlpTracer]:
    tracer = OtlpTracer(FACTS, ALWAYS_ON, exporter)
    install(tracer)
    try:
        yield tracer
    finally:
        install(None)


def make(spans: int) -> None:
    for _ in range(spans):
        record("done", "internal", (1.0, 2.0), {"a": "b"}, parent=new_trace())


def test_queue_is_bounded_and_counts_what_it_drops() -> None:
    exporter, dropped, sent = StuckExporter(), counted("dropped"), counted("exported")
    with exporting(exporter) as tracer:
        make(QUEUE_SPANS + 100)
        assert counted("dropped") == dropped + 100
        exporter.go.set()
        tracer.close()
    assert (exporter.spans, counted("exported")) == (QUEUE_SPANS, sent + QUEUE_SPANS)


def test_spans_that_the_collector_refuses_are_counted() -> None:
    exporter, failed = StuckExporter(SpanExportResult.FAILURE), counted("failed")
    exporter.go.set()
    with exporting(exporter) as tracer:
        make(3)
        tracer.close()
    assert counted("failed") == failed + 3


def test_stuck_collector_ends_the_process_in_time(caplog: pytest.LogCaptureFixture) -> None:
    exporter = StuckExporter()
    with exporting(exporter) as tracer:
        make(600)  # more than a batch, so that an export is in progress
        assert exporter.entered.wait(WAIT_LIMIT_S)
        tracer.close()
    assert "some spans were not exported before shutdown" in caplog.text


def test_collector_that_is_away_costs_only_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    failed = counted("failed")
    with exporting() as tracer:
        make(5)
        tracer.close()
    assert counted("failed") == failed + 5


def test_trace_that_begins_here_has_the_id_that_it_was_sampled_by() -> None:
    exporter = StuckExporter()
    exporter.go.set()
    tracer = OtlpTracer(FACTS, TraceIdRatioBased(0.5), exporter)
    kept = [
        context
        for context, span in (tracer.start("a", "server", 1.0, None) for _ in range(400))
        if span
    ]
    tracer.close()
    assert len({context.trace_id for context in kept if context}) == len(kept)
    assert 100 < len(kept) < 300


def test_span_arrives_as_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    linked = [new_trace() for _ in range(MAX_LINKS + 5)]
    parent = new_trace()
    with running_collector() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        with exporting() as tracer:
            facts: dict[str, str | int | float | bool] = {
                "text": "a",
                "number": 7,
                "share": 0.5,
                "is_so": True,
            }
            record("late", "consumer", (3.5, 2.25), facts, parent=parent, links=linked, error="bad")
            tracer.close()
    (span,) = collector.spans
    assert (span.name, span.kind, span.is_error) == ("late", "consumer", True)
    assert (span.trace_id, span.parent_id) == (parent.trace_id, parent.span_id)
    # Clocks on two machines may disagree, but no span ends before it starts.
    assert (span.start_ns, span.end_ns) == (2_250_000_000, 2_250_000_000)
    assert span.attributes == {**facts, "error.type": "bad"}
    assert span.links == [(one.trace_id, one.span_id) for one in linked[:MAX_LINKS]]


def test_spans_about_messages_name_the_broker() -> None:
    kept = InMemorySpanExporter()
    tracer = OtlpTracer(FACTS, ALWAYS_ON, kept, broker="rabbitmq")
    install(tracer)
    try:
        message = {"messaging.operation.type": "send"}
        record("publish", "producer", (1.0, 2.0), message, parent=new_trace())
        record("infer", "internal", (1.0, 2.0), {"a": "b"}, parent=new_trace())
    finally:
        install(None)
        tracer.close()
    systems = {
        span.name: (span.attributes or {}).get("messaging.system")
        for span in kept.get_finished_spans()
    }
    assert systems == {"publish": "rabbitmq", "infer": None}
