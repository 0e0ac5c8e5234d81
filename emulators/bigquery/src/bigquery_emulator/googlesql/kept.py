"""Caches translated statements until the tables they read change."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from bigquery_emulator.errors import NotFoundError
from bigquery_emulator.tables.resources import TableKey, TableResource

_MOST = 256
Kept = TypeVar("Kept")


@dataclass
class LookedUp:
    """The tables and views that a statement names, in their state at translation time."""

    find: Callable[[TableKey], TableResource]
    states: dict[TableKey, tuple[int, str]] = field(default_factory=dict)
    is_lasting: bool = True
    """False if the statement also read INFORMATION_SCHEMA, which can change at any time."""

    def __call__(self, key: TableKey) -> TableResource:
        """Finds a table and records it."""
        table = self.find(key)
        self.states[key] = (table.number, table.etag)
        return table

    def is_current(self) -> bool:
        """True if no table has changed."""
        try:
            now = {key: self.find(key) for key in self.states}
        except NotFoundError:
            return False
        return {key: (table.number, table.etag) for key, table in now.items()} == self.states


class KeptStatements(Generic[Kept]):
    """The most recently used statements, by key. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[LookedUp, Kept]] = OrderedDict()

    def get(self, key: Hashable) -> Kept | None:
        """Returns the statement if its tables have not changed."""
        with self._lock:
            entry = self._kept.get(key)
            if entry is None:
                return None
            self._kept.move_to_end(key)
        return entry[1] if entry[0].is_current() else None

    def put(self, key: Hashable, tables: LookedUp, statement: Kept) -> None:
        """Stores a statement, and drops the least recently used one if the cache is full."""
        if not tables.is_lasting:
            return
        with self._lock:
            self._kept[key] = (tables, statement)
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST:
                self._kept.popitem(last=False)
