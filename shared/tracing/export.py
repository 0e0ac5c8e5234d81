"""Exports spans with OTLP over HTTP, using OpenTelemetry's SDK.

This module is imported only if an endpoint is configured (shared/tracing/setup.py). The SDK itself
reads its standard variables: OTEL_EXPORTER_OTLP_*, OTEL_BSP_*, OTEL_RESOURCE_ATTRIBUTES,
OTEL_SERVICE_NAME.

Nothing here waits for the collector. The queue is bounded, and spans that don't fit are dropped and
counted.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)
from prometheus_client import Counter

from shared.tracing.spans import Attributes, Kind, TraceContext

CLOSE_LIMIT_S = 2.0
"""Time limit for sending the remaining spans at exit. After SIGTERM, the API has 10 s in total."""
MAX_LINKS = 8
"""Maximum links per span. Each link costs 8 µs, and a batch of 32 jobs would otherwise have a
thousand links.
"""
QUEUE_SPANS = 2048
"""The default for OTEL_BSP_MAX_QUEUE_SIZE. Takes about 2 MB."""
SPANS = Counter(
    "penstock_trace_spans_total",
    "Spans, by end: exported, failed (not accepted by the collector), dropped (the queue to it "
    "was full).",
    ["end"],
)
_KINDS: dict[Kind, SpanKind] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "producer": SpanKind.PRODUCER,
    "consumer": SpanKind.CONSUMER,
}

log = logging.getLogger(__name__)


class OtlpTracer:
    """A Tracer that exports spans. `close` sends any that remain.

    Args:
        facts: attributes of this process, overridden by the environment.
        sampler: decides which traces are kept. None means the sampler set in the environment.
        exporter: where to send spans. None means the endpoint set in the environment.
        broker: `messaging.system` for spans about messages.

    Raises:
        ValueError: a variable is invalid.
    """

    def __init__(
        self,
        facts: Mapping[str, str],
        sampler: Sampler | None,
        exporter: SpanExporter | None = None,
        *,
        broker: str = "",
    ) -> None:
        self._broker = broker
        self._exporter = _CountedExporter(exporter or OTLPSpanExporter())
        self._queue = _BoundedQueue(self._exporter)
        self._ids = _ChosenIds()
        # The environment overrides what the process knows about itself.
        resource = Resource.create(dict(facts)).merge(OTELResourceDetector().detect())
        provider = TracerProvider(
            sampler=sampler,
            resource=resource,
            id_generator=self._ids,
            shutdown_on_exit=False,  # without a limit; see close
            span_limits=SpanLimits(max_links=MAX_LINKS),
        )
        provider.add_span_processor(self._queue)
        self._sampler = provider.sampler
        self._follows_flag = isinstance(self._sampler, ParentBased)
        self._tracer = provider.get_tracer("penstock")

    def start(
        self,
        name: str,
        kind: Kind,
        started_s: float,
        parent: TraceContext | None,
        links: Sequence[TraceContext] = (),
    ) -> tuple[TraceContext | None, OtlpSpan | None]:
        """Starts a span. See Tracer.

        Most calls return within the first four lines, so those lines use the SDK as little as
        possible.
        """
        if parent is None and not self._keeps_new_trace(name):
            return None, None
        if parent is not None and self._follows_flag and not parent.is_sampled:
            return parent, None
        span = self._tracer.start_span(
            name,
            context=_context_of(parent),
            kind=_KINDS[kind],
            links=[Link(_span_context(link)) for link in links[:MAX_LINKS]],
            start_time=_nanoseconds(started_s),
        )
        exported, tracestate = span.get_span_context(), parent.tracestate if parent else ""
        ids = f"00-{exported.trace_id:032x}-{exported.span_id:016x}"
        context = TraceContext(f"{ids}-{exported.trace_flags:02x}", tracestate)
        return context, OtlpSpan(span, self._broker) if span.is_recording() else None

    def _keeps_new_trace(self, name: str) -> bool:
        """Returns whether to keep a trace that starts here.

        If so, the next trace gets the ID that was sampled.
        """
        trace_id = self._ids.choose_trace_id()
        return self._sampler.should_sample(None, trace_id, name).decision != Decision.DROP

    def close(self) -> None:
        """Sends the remaining spans, for at most CLOSE_LIMIT_S.

        Any spans not sent by then are lost.
        """
        closing = threading.Thread(target=self._queue.shutdown, name="traces-close", daemon=True)
        closing.start()
        closing.join(CLOSE_LIMIT_S)
        if closing.is_alive():
            log.warning(
                "some spans were not exported before shutdown", extra={"limit_s": CLOSE_LIMIT_S}
            )
            self._exporter.shutdown()


class OtlpSpan:
    """A RecordedSpan backed by the SDK."""

    def __init__(self, span: Span, broker: str) -> None:
        self._span = span
        self._broker = broker

    def end(self, name: str, attributes: Attributes, error: str, ended_s: float) -> None:
        """Ends the span. See RecordedSpan."""
        self._span.update_name(name)
        self._span.set_attributes(attributes)
        # The code that creates these spans doesn't know which broker is in use.
        if "messaging.operation.type" in attributes:
            self._span.set_attribute("messaging.system", self._broker)
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end(_nanoseconds(ended_s))


class _ChosenIds(RandomIdGenerator):
    """Reuses the trace ID that sampling was based on, so that the SDK decides the same way."""

    def __init__(self) -> None:
        self._trace_id = 0

    def choose_trace_id(self) -> int:
        """Returns the ID for the next trace."""
        self._trace_id = super().generate_trace_id()
        return self._trace_id

    def generate_trace_id(self) -> int:
        return self._trace_id


class _CountedExporter(SpanExporter):
    """Counts the spans that the collector accepted and those it did not."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self.taken = 0
        """Number of spans that have left the queue."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:
            self.taken += len(spans)
            end = "exported" if result is SpanExportResult.SUCCESS else "failed"
            SPANS.labels(end).inc(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _BoundedQueue(SpanProcessor):
    """Like the SDK's batching, but counts the spans dropped when its queue is full."""

    def __init__(self, exporter: _CountedExporter) -> None:
        self._exporter = exporter
        self._room = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "").strip() or QUEUE_SPANS)
        self._batches = BatchSpanProcessor(exporter, max_queue_size=self._room)
        self._added = 0

    def on_end(self, span: ReadableSpan) -> None:
        # Each number only grows and is updated by a single thread, so no lock is needed.
        if self._added - self._exporter.taken >= self._room:
            SPANS.labels("dropped").inc()
            return
        self._added += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]


def _context_of(parent: TraceContext | None) -> Context:
    """Converts a parent to the SDK's context.

    Without a parent, the context is empty, so that the SDK does not look for another parent.
    """
    if parent is None:
        return Context()
    return set_span_in_context(NonRecordingSpan(_span_context(parent)), Context())


def _span_context(context: TraceContext) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(context.is_sampled)),
        trace_state=TraceState.from_header([context.tracestate]) if context.tracestate else None,
    )


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1_000_000) * 1000
