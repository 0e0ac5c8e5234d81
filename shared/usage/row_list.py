"""Stores rows in a list, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from shared.usage.row import Row


class RowList:
    """A shared.usage.row.RowSink whose rows are safe immediately.

    Args:
        rows: receives written rows. Defaults to a new list.
    """

    def __init__(self, rows: list[Row] | None = None) -> None:
        self.rows: list[Row] = [] if rows is None else rows

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    def write(self, *rows: Row, on_safe: Callable[[], None] | None = None) -> None:
        self.rows.extend(rows)
        if on_safe is not None:
            on_safe()
