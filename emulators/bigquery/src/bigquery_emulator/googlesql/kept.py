"""Translated statements, kept while the tables that they read stay as they are."""

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
    """The tables and views that a statement named, as they were."""

    find: Callable[[TableKey], TableResource]
    states: dict[TableKey, tuple[int, str]] = field(default_factory=dict)
    is_lasting: bool = True
    """True if nothing else was read that may change, such as INFORMATION_SCHEMA."""

    def __call__(self, key: TableKey) -> TableResource:
        """Finds a table, and notes it."""
        table = self.find(key)
        self.states[key] = (table.number, table.etag)
        return table

    def is_current(self) -> bool:
        """True if every table still is what it was."""
        try:
            now = {key: self.find(key) for key in self.states}
        except NotFoundError:
            return False
        return {key: (table.number, table.etag) for key, table in now.items()} == self.states


class KeptStatements(Generic[Kept]):
    """The newest statements by what was asked. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[LookedUp, Kept]] = OrderedDict()

    def get(self, key: Hashable) -> Kept | None:
        """The statement, if its tables have not changed."""
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
        return found[1] if found[0].is_current() else None

    def put(self, key: Hashable, tables: LookedUp, statement: Kept) -> None:
        """Keeps a statement, and drops the one that was not asked for the longest."""
        if not tables.is_lasting:
            return
        with self._lock:
            self._kept[key] = (tables, statement)
            self._kept.move_to_end(key)
            while len(self._kept) > _MOST:
                self._kept.popitem(last=False)
