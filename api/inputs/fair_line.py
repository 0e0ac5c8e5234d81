"""A line in which tenants take turns. Within a tenant it is in order of arrival. Pure."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairLine(Generic[T]):
    """Entries that wait, by tenant."""

    def __init__(self) -> None:
        self._of_tenants: OrderedDict[str, deque[T]] = OrderedDict()

    def add(self, tenant: str, entry: T) -> None:
        """Appends an entry. A new tenant has the last turn."""
        self._of_tenants.setdefault(tenant, deque()).append(entry)

    def discard(self, tenant: str, entry: T) -> None:
        """Removes an entry, unless it has been popped."""
        entries = self._of_tenants.get(tenant, deque[T]())
        if entry not in entries:
            return
        entries.remove(entry)
        if not entries:
            del self._of_tenants[tenant]

    def pop(self) -> T | None:
        """Removes and returns the first entry of the tenant whose turn it is. None if none wait."""
        if not self._of_tenants:
            return None
        tenant, entries = self._of_tenants.popitem(last=False)
        first = entries.popleft()
        if entries:
            self._of_tenants[tenant] = entries
        return first
