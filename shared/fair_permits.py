"""Turns at a bounded number of permits, such as the threads of a client that blocks, by owner.

An owner starts if more permits are free than it has. So alone it has half of them and leaves half,
and it takes several owners at their worst to hold all. Those who wait take turns by owner.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque


class FairPermits:
    """Who has a permit now, and who waits for one.

    Args:
        permits: how many there are.
    """

    def __init__(self, permits: int) -> None:
        self._permits = permits
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, owner: str) -> None:
        """Waits for a permit. `give` must follow, unless this raises."""
        if not self._waiting and self._may_start(owner):
            self._running[owner] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it had its turn at the same moment
                self.give(owner)
            else:
                self._leave(owner, turn)
                self._start_next()
            raise

    def give(self, owner: str) -> None:
        """Gives a permit back."""
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._start_next()

    def _may_start(self, owner: str) -> bool:
        return self._running[owner] < self._permits - self._running.total()

    def _start_next(self) -> None:
        """Gives permits while anybody who waits may have one, to the owner that waits longest."""
        while (owner := next(filter(self._may_start, self._waiting), None)) is not None:
            turn = self._waiting[owner].popleft()
            if self._waiting[owner]:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            if not turn.cancelled():
                self._running[owner] += 1
                turn.set_result(None)

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(owner)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]
