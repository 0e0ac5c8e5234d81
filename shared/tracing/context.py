"""The trace of a request or a job: W3C Trace Context, as headers and messages carry it.

https://www.w3.org/TR/trace-context/. A malformed `traceparent` counts as none, and the request
starts a new trace. A malformed `tracestate` is dropped alone. Neither fails a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass

LONGEST_TRACESTATE = 512
"""Characters. The standard asks to pass on that many, and an attribute has at most 1,024 bytes."""
MOST_MEMBERS = 32
_TRACEPARENT = re.compile(
    r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(-.*)?"
)
_MEMBER = re.compile(
    r"([a-z0-9][a-z0-9_*/@-]{0,255})=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace, as its children name it.

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
        """Whether spans of this trace are kept. The first process decides it for all others."""
        return bool(int(self.traceparent[53:], 16) & 1)

    @property
    def exemplar(self) -> dict[str, str] | None:
        """The labels of a metric's exemplar. None for a trace that nobody can look up."""
        return {"trace_id": self.trace_id, "span_id": self.span_id} if self.is_sampled else None

    def attributes(self) -> dict[str, str]:
        """The same as headers, or as attributes of a message."""
        carried = {"traceparent": self.traceparent}
        if self.tracestate:
            carried["tracestate"] = self.tracestate
        return carried


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context of a caller. None if it sent none, or an invalid one."""
    found = _TRACEPARENT.fullmatch(traceparent)
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "00" and rest is not None:  # later versions may have more fields
        return None
    return TraceContext(f"00-{trace_id}-{span_id}-{flags}", tracestate and _bounded(tracestate))


def read_headers(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """The same from raw headers, with names in lower case. Two `traceparent` are none."""
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
    """The same from the attributes of a message."""
    return read_context(attributes.get("traceparent", ""), attributes.get("tracestate", ""))


def _bounded(tracestate: str) -> str:
    """The members that fit, first ones first. Empty if one is malformed or there are too many."""
    members = [member.strip(" \t") for member in tracestate.split(",", MOST_MEMBERS + 1)]
    members = [member for member in members if member]
    found = [_MEMBER.fullmatch(member) for member in members]
    keys = {one[1] for one in found if one is not None}
    if len(members) > MOST_MEMBERS or len(keys) < len(members):
        return ""
    while len(text := ",".join(members)) > LONGEST_TRACESTATE:
        members.pop()
    return text


_current: ContextVar[TraceContext | None] = ContextVar("trace", default=None)


def current() -> TraceContext | None:
    """The trace that the running task works for. Tasks that it creates inherit it."""
    return _current.get()


def set_current(context: TraceContext | None) -> Token[TraceContext | None]:
    """Makes `context` that of the running task. The token takes it back."""
    return _current.set(context)


def reset_current(token: Token[TraceContext | None]) -> None:
    """Takes back a `set_current`."""
    _current.reset(token)


@contextmanager
def entered(context: TraceContext | None) -> Iterator[None]:
    """Makes `context` that of the running task during the block."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
