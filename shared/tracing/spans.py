"""Creates spans and propagates their traces with W3C Trace Context in headers and messages.

A span is created from measured times, or around a block. Without an exporter, and for traces that
are not sampled, these functions do nothing. Payloads, keys, and text from callers must never become
attributes.

https://www.w3.org/TR/trace-context/: a malformed `traceparent` is ignored, and the request starts a
new trace. If only `tracestate` is malformed, just that header is dropped. Neither makes a request
fail.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

MAX_TRACESTATE_CHARS = 512
"""Maximum length in characters.

The standard requires that this many characters be passed on, and an attribute is limited to 1,024
bytes.
"""
MAX_MEMBERS = 32
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_*/@-]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)

_current: ContextVar[TraceContext | None] = ContextVar("trace", default=None)

Kind = Literal["internal", "server", "client", "producer", "consumer"]
Attributes = Mapping[str, str | int | float | bool]
STAGE = "penstock.stage"
"""Attribute that identifies the stage that a span covers: receive, cache, publish, queue, batch,
infer, reply, and `hold` if the API holds a job back.

For a webhook, it is `webhook`; for a dead letter, it is `dead_letter`.
"""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span in a trace, in the form its children use to refer to it.

    `traceparent` is valid and has version 00. `tracestate` is valid and bounded, or empty.
    """

    traceparent: str
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """32 hexadecimal digits."""
        return self.traceparent[3:35]

    @property
    def span_id(self) -> str:
        """16 hexadecimal digits."""
        return self.traceparent[36:52]

    @property
    def is_sampled(self) -> bool:
        """True if this trace's spans are kept.

        The first process decides for all other processes.
        """
        return bool(int(self.traceparent[53:], 16) & 1)

    @property
    def exemplar(self) -> dict[str, str] | None:
        """Returns the labels for a metric's exemplar, or None if the trace can't be looked up."""
        return {"trace_id": self.trace_id, "span_id": self.span_id} if self.is_sampled else None

    def attributes(self) -> dict[str, str]:
        """Returns the context as headers or message attributes."""
        carried = {"traceparent": self.traceparent}
        if self.tracestate:
            carried["tracestate"] = self.tracestate
        return carried


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Returns a caller's context, or None if the context is missing or invalid."""
    match = _TRACEPARENT.fullmatch(traceparent)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "00" and rest is not None:  # later versions may have more fields
        return None
    return TraceContext(
        f"00-{trace_id}-{span_id}-{flags}", tracestate and _bound_tracestate(tracestate)
    )


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Reads raw headers with lowercase names. Duplicate `traceparent` headers are ignored."""
    parents, states = [], []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1:
        return None
    return read_context(
        parents[0].decode("latin-1").strip(" \t"), b",".join(states).decode("latin-1")
    )


def read_attributes(attributes: Mapping[str, str]) -> TraceContext | None:
    return read_context(attributes.get("traceparent", ""), attributes.get("tracestate", ""))


def _bound_tracestate(tracestate: str) -> str:
    """Returns the first members that fit. Empty if any is malformed or there are too many."""
    members = [member.strip(" \t") for member in tracestate.split(",", MAX_MEMBERS + 1)]
    members = [member for member in members if member]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match[1] for match in matches if match is not None}
    if len(members) > MAX_MEMBERS or len(keys) < len(members):
        return ""
    while len(text := ",".join(members)) > MAX_TRACESTATE_CHARS:
        members.pop()
    return text


def current() -> TraceContext | None:
    """Returns the current task's trace. Tasks that it creates inherit the trace."""
    return _current.get()


def set_current(context: TraceContext | None) -> Token[TraceContext | None]:
    """Sets the current task's context. The token restores the previous one."""
    return _current.set(context)


def reset_current(token: Token[TraceContext | None]) -> None:
    """Undoes a call to `set_current`."""
    _current.reset(token)


@contextmanager
def use_context(context: TraceContext | None) -> Iterator[None]:
    """Sets the current task's context inside a `with` block."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


class RecordedSpan(Protocol):
    """A span that has started, as held by an exporter."""

    def end(self, name: str, attributes: Attributes, error: str, ended_s: float) -> None:
        """Ends the span at the Unix time `ended_s`. `error` is the kind of failure, or empty."""


class Tracer(Protocol):
    """Decides which traces to keep, and receives their spans."""

    def start(
        self,
        name: str,
        kind: Kind,
        started_s: float,
        parent: TraceContext | None,
        links: Sequence[TraceContext] = (),
    ) -> tuple[TraceContext | None, RecordedSpan | None]:
        """Starts a span. Returns None instead of a span if the trace is not kept.

        If that trace starts here, there is no context either.
        """


class Span:
    """A span that has started. `context` is the span's or, without an exporter, the caller's."""

    __slots__ = ("_attributes", "_name", "_recorded", "context")

    def __init__(
        self, name: str, context: TraceContext | None, recorded: RecordedSpan | None
    ) -> None:
        self.context = context
        self._name = name
        self._recorded = recorded
        self._attributes: dict[str, str | int | float | bool] = {}

    @property
    def is_recorded(self) -> bool:
        """True if the span's attributes will be kept."""
        return self._recorded is not None

    def set(self, attributes: Attributes) -> None:
        self._attributes.update(attributes)

    def end(self, *, name: str = "", error: str = "") -> None:
        """Ends the span now. `name`: a better name, if one is known by now.

        `error`: the kind of failure.
        """
        if self._recorded is not None:
            self._recorded.end(name or self._name, self._attributes, error, time.time())


class _Installed:
    tracer: Tracer | None = None


def install(tracer: Tracer | None) -> None:
    """Sends this process's spans to `tracer` from now on, or nowhere if None."""
    _Installed.tracer = tracer


def begin(name: str, kind: Kind, started_s: float, parent: TraceContext | None) -> Span:
    """Starts this process's first span, which may decide whether its trace is kept."""
    tracer = _Installed.tracer
    if tracer is None:
        return Span(name, parent, None)
    return Span(name, *tracer.start(name, kind, started_s, parent))


class SpanBlock:
    """A span around a `with` block. See `span`."""

    __slots__ = ("_context", "_span", "_token")

    def __init__(self, span: Span, context: TraceContext | None) -> None:
        self._span = span
        self._context = context
        self._token: Token[TraceContext | None] | None = None

    def __enter__(self) -> Span:
        if self._context is not current():
            self._token = set_current(self._context)
        return self._span

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._token is not None:
            reset_current(self._token)
        self._span.end(error=_kind_of(error) if error is not None else "")


def span(
    name: str,
    kind: Kind,
    attributes: Attributes,
    *,
    started_s: float = 0.0,
    parent: TraceContext | None = None,
) -> SpanBlock:
    """Returns a span around a `with` block, which becomes the current span.

    An exception becomes the span's error.

    Args:
        attributes: attributes, which must not include payloads or keys.
        started_s: Unix time when the span started. 0 means now.
        parent: the parent span. None means the current span.
    """
    parent, tracer = parent or current(), _Installed.tracer
    if tracer is None or parent is None or not parent.is_sampled:
        return SpanBlock(Span(name, parent, None), parent)
    new_span = Span(name, *tracer.start(name, kind, started_s or time.time(), parent))
    new_span.set(attributes)
    return SpanBlock(new_span, new_span.context)


def _kind_of(error: BaseException) -> str:
    return str(getattr(error, "code", "") or type(error).__name__)


def is_recorded(parent: TraceContext | None) -> bool:
    """Returns whether spans under `parent` are kept, so collecting attributes is worthwhile."""
    return _Installed.tracer is not None and parent is not None and parent.is_sampled


def record(
    name: str,
    kind: Kind,
    times_s: tuple[float, float],
    attributes: Attributes,
    *,
    parent: TraceContext | None = None,
    links: Sequence[TraceContext] = (),
    error: str = "",
) -> None:
    """Creates a span from its start and end, in Unix time.

    If the start is after the end, it is moved to the end.

    Args:
        times_s: start and end. Two machines' clocks may disagree about the order.
        attributes: the span's attributes, which must not include payloads or keys.
        parent: the parent span. None means the current span.
        links: related spans in other traces.
        error: kind of failure, or empty.
    """
    parent = parent or current()
    tracer = _Installed.tracer
    if tracer is None or parent is None or not parent.is_sampled:
        return
    started_s, ended_s = times_s
    _, recorded = tracer.start(name, kind, min(started_s, ended_s), parent, links)
    if recorded is not None:
        recorded.end(name, attributes, error, ended_s)
