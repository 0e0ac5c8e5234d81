"""Limits the items that a runner's batches have in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class ItemWindow:
    """Capacity for items in flight. Each open share gets an equal part of the capacity.

    Args:
        items: total capacity of all shares.
    """

    def __init__(self, items: int) -> None:
        self._items = items
        self._shares: set[Share] = set()

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Opens a share. The other shares shrink until the block exits."""
        share = Share(self)
        self._shares.add(share)
        try:
            yield share
        finally:
            self._shares.discard(share)
            for other in self._shares:
                other.wake()

    @property
    def part(self) -> int:
        """Number of items that each share may have in flight."""
        return max(1, self._items // max(1, len(self._shares)))


class Share:
    """One batch's share of the window."""

    def __init__(self, window: ItemWindow) -> None:
        self._window = window
        self._taken = 0
        self._changed = asyncio.Event()

    async def take(self, items: int) -> None:
        """Waits until the items fit.

        If the items exceed the whole share, they are admitted once nothing else is in flight.

        Only one task per batch may call this.
        """
        while self._taken and self._taken + items > self._window.part:
            self._changed.clear()
            await self._changed.wait()
        self._taken += items

    def give_back(self, items: int) -> None:
        """Releases items."""
        self._taken -= items
        self.wake()

    def wake(self) -> None:
        self._changed.set()
