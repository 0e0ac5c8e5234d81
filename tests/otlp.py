"""A collector that accepts OTLP over HTTP, and keeps the bytes and the decoded spans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanProto
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.limits import WAIT_LIMIT_S

Value = str | int | float | bool


@dataclass(frozen=True)
class ReceivedSpan:
    """A received span. Ids are hexadecimal; times are nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    links: list[tuple[str, str]]
    """Each link's (trace id, span id)."""
    is_error: bool
    trace_state: str
    resource: dict[str, Value]

    @property
    def stage(self) -> str:
        return str(self.attributes.get("penstock.stage", ""))


class Collector:
    """Spans and bodies received so far."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.bodies: list[bytes] = []
        self.spans: list[ReceivedSpan] = []
        self.url = ""

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            self.bodies.append(body)
            self.spans += list(_spans_of(request))
            self._changed.notify_all()

    def of_trace(self, trace_id: str) -> list[ReceivedSpan]:
        return [span for span in list(self.spans) if span.trace_id == trace_id]

    def until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, WAIT_LIMIT_S), [
                (span.stage, span.name) for span in self.spans[-20:]
            ]

    def stages(self, trace_id: str, wanted: set[str]) -> dict[str, ReceivedSpan]:
        """Returns a trace's spans, keyed by stage, once all the `wanted` stages have arrived."""
        self.until(lambda: {span.stage for span in self.of_trace(trace_id)} >= wanted)
        return {span.stage: span for span in self.of_trace(trace_id)}


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()

    class Take(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            known = (self.path, self.headers["content-type"])
            if known == ("/v1/traces", "application/x-protobuf"):
                collector.take(body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words: object) -> None:
            """Discards the message, to keep the test output clean."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Take) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
        thread.start()
        yield collector
        server.shutdown()
        thread.join(WAIT_LIMIT_S)


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    for of_resource in request.resource_spans:
        resource = _values(of_resource.resource.attributes)
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=SpanProto.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_values(span.attributes),
                    links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
                    is_error=span.status.code == Status.STATUS_CODE_ERROR,
                    trace_state=span.trace_state,
                    resource=resource,
                )


def _values(attributes: object) -> dict[str, Value]:
    found: list[KeyValue] = list(attributes)  # type: ignore[call-overload]
    return {one.key: _value(one.value) for one in found}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    assert kind is not None
    found: Value = getattr(value, kind)
    return found
