"""Rows on their way to BigQuery, and the callbacks for when they are safe."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from shared.usage.spool import Fields, Segment


class UnsavedRow(NamedTuple):
    """A row that is only in memory, and the callback for when it is safe."""

    fields: Fields
    on_safe: Callable[[], None] | None
    loop: asyncio.AbstractEventLoop | None
    since_s: float


@dataclass(eq=False, slots=True)
class RowBatch:
    """Rows that are sent together: those of a segment, or some that are in memory alone."""

    segment: Segment | None
    rows: list[Fields]
    since_s: float
    unsaved: list[UnsavedRow] = field(default_factory=list)


def notify_safe(rows: Sequence[UnsavedRow]) -> None:
    """Calls every `on_safe` on its event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
    for row in rows:
        if row.on_safe is not None and row.loop is not None:
            by_loop.setdefault(row.loop, []).append(row.on_safe)
    for loop, calls in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, and so are its callers
            loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
