"""An in-memory tracer: keeps every span in a sampled trace, and the traces that begin here."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from shared.tracing.spans import STAGE, Attributes, Kind, TraceContext, install


@dataclass
class KeptSpan:
    """An open or finished span. Times are Unix time."""

    name: str
    kind: Kind
    context: TraceContext
    parent: TraceContext | None
    links: list[TraceContext]
    started_s: float
    ended_s: float = 0.0
    error: str = ""
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict)

    def end(self, name: str, attributes: Attributes, error: str, ended_s: float) -> None:
        assert not self.ended_s, "ended twice"
        self.name, self.error, self.ended_s = name, error, ended_s
        self.attributes = dict(attributes)

    @property
    def stage(self) -> str:
        return str(self.attributes.get(STAGE, ""))


class KeptSpans:
    """The spans started so far. Implements shared.tracing.spans.Tracer."""

    def __init__(self) -> None:
        self.spans: list[KeptSpan] = []

    def start(
        self,
        name: str,
        kind: Kind,
        started_s: float,
        parent: TraceContext | None,
        links: Sequence[TraceContext] = (),
    ) -> tuple[TraceContext, KeptSpan | None]:
        trace_id = parent.trace_id if parent else secrets.token_hex(16)
        is_kept = parent is None or parent.is_sampled
        context = TraceContext(
            f"00-{trace_id}-{secrets.token_hex(8)}-0{int(is_kept)}",
            parent.tracestate if parent else "",
        )
        if not is_kept:
            return context, None
        span = KeptSpan(name, kind, context, parent, list(links), started_s)
        self.spans.append(span)
        return context, span

    def of(self, stage: str) -> list[KeptSpan]:
        """Returns the finished spans for one stage."""
        return [span for span in self.spans if span.ended_s and span.stage == stage]

    def the(self, stage: str) -> KeptSpan:
        """Returns the only span that a stage has."""
        (found,) = self.of(stage)
        return found


@contextmanager
def keeping_spans() -> Iterator[KeptSpans]:
    """Keeps this process's spans during the block."""
    kept = KeptSpans()
    install(kept)
    try:
        yield kept
    finally:
        install(None)


def new_trace(flags: str = "01") -> TraceContext:
    return TraceContext(f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{flags}")
