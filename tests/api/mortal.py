"""Processes inside the test's own process that die as if they had been killed.

After a process dies, nothing it does has any effect: it can't reach Redis, and the broker drops its
messages and redelivers the ones it held. Only the rows it had already written remain. Closing it
later does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Generic, TypeVar

from shared.broker.in_memory import InMemoryBroker, InMemorySubscription
from shared.errors import Unavailable
from shared.usage.row import Row
from tests.api.ledger import Ledger
from tests.faults.links import Links
from tests.limits import WAIT_LIMIT_S

T = TypeVar("T")


class Door:
    """A process's access to an in-memory broker: a Transport and Admin that can be cut off."""

    def __init__(self, broker: InMemoryBroker) -> None:
        self._broker = broker
        self._open: set[InMemorySubscription] = set()
        self._is_shut = False

    def __getattr__(self, name: str) -> Any:
        """Looks up any other operation on the broker."""
        operation: Callable[..., Awaitable[Any]] = getattr(self._broker, name)
        if not callable(operation):
            return operation

        async def passed(*args: Any, **given: Any) -> Any:
            self._check()
            return await operation(*args, **given)

        return passed

    @asynccontextmanager
    async def subscribe(self, subscription_id: str, **given: Any) -> AsyncIterator[Any]:
        self._check()
        async with self._broker.subscribe(subscription_id, **given) as subscription:
            self._open.add(subscription)
            yield subscription
            self._open.discard(subscription)

    async def shut(self) -> None:
        self._is_shut = True
        for subscription in self._open:
            await subscription.close()

    def _check(self) -> None:
        if self._is_shut:
            raise Unavailable("its process is dead")


class Mortal(Generic[T]):
    """A process that can be killed and restarted.

    Args:
        name: name of its link to Redis.
        made: opens the process, given its access to the broker and a list for its rows.
        ledger: receives the lists of its rows.
    """

    def __init__(
        self,
        name: str,
        links: Links,
        broker: InMemoryBroker,
        made: Callable[[Any, list[Row]], AbstractAsyncContextManager[T]],
        ledger: Ledger,
    ) -> None:
        self._name = name
        self._links = links
        self._broker = broker
        self._made = made
        self._ledger = ledger

    async def __aenter__(self) -> Mortal[T]:
        await self._start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._close()

    async def _start(self) -> None:
        self._door, self._stop = Door(self._broker), asyncio.Event()
        self._rows = list[Row]()
        self._ledger.row_lists.append(self._rows)
        started = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(started))
        async with asyncio.timeout(WAIT_LIMIT_S):
            await asyncio.wait([started, self._life], return_when=asyncio.FIRST_COMPLETED)
            self.process: T = await started if started.done() else await self._life

    async def _live(self, started: asyncio.Future[T]) -> Any:
        async with self._made(self._door, self._rows) as process:
            started.set_result(process)
            await self._stop.wait()

    async def _close(self) -> None:
        self._stop.set()
        # Not canceled if it is late, because a CancelledError would stop the event loop that all
        # tests share.
        await asyncio.wait([self._life], timeout=WAIT_LIMIT_S)
        assert self._life.done(), f"{self._name} did not stop within {WAIT_LIMIT_S:g} s"
        self._life.result()

    async def die(self, asked: Sequence[asyncio.Task[Any]]) -> None:
        """Kills the process, along with the requests whose callers are waiting for it, and starts
        the next one.
        """
        self._links.cut(self._name)
        await self._door.shut()
        lists = self._ledger.row_lists
        places = [at for at, one in enumerate(lists) if one is self._rows]
        assert places, f"{self._name} is dead already"
        lists[places[0]] = list(self._rows)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await self._close()
        self._links.heal(self._name)
        await self._start()
