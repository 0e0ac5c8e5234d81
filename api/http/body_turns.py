"""Lets the pieces of large bodies in by turns: one of a tenant per turn of the event loop.

All requests of an instance share one event loop. A tenant with many uploads has many pieces ready
in each of its turns, and every other request waits for all of them again and again, at each of its
own steps. With this it waits for one piece of each tenant. A tenant that is alone loses nothing,
since a turn of an idle loop is short.
"""

from __future__ import annotations

import asyncio
from collections import deque


class BodyTurns:
    """Who had a piece in this turn of the event loop, and whose pieces wait for the next ones."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By tenant that had a piece in this turn or the one before."""

    async def take(self, tenant: str) -> None:
        """Waits until a piece of the tenant may be handled. Pieces come in order of arrival."""
        loop = asyncio.get_running_loop()
        waiting = self._waiting.get(tenant)
        if waiting is None:
            self._waiting[tenant] = deque()
            loop.call_soon(self._next, loop, tenant)
            return
        turn: asyncio.Future[None] = loop.create_future()
        waiting.append(turn)
        await turn

    def _next(self, loop: asyncio.AbstractEventLoop, tenant: str) -> None:
        waiting = self._waiting[tenant]
        while waiting:
            turn = waiting.popleft()
            if not turn.done():  # its caller may have hung up
                turn.set_result(None)
                loop.call_soon(self._next, loop, tenant)
                return
        del self._waiting[tenant]
