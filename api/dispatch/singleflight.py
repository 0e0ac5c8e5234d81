"""Single flight: identical items of concurrent requests are computed once.

The first request for an item leads it. Later requests with the same cache key join it and wait for
the same outcome. An item lives as long as one request waits for it. If its leader gives up or runs
out of time, the item is abandoned, and requests that still have time start it again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shared.messages import Item, ItemOutcome


@dataclass(slots=True, eq=False)
class InFlightJob:
    """The items of one message, and the task that sends it and waits for its reply."""

    items: list[InFlightItem]
    index: int
    """The number of the job within its request. The wire calls it `part`."""
    deadline_s: float
    queued_at_s: float = 0.0
    """Unix time at which the job could be published. 0 before that."""
    published_at_s: float = 0.0
    """Unix time at which the broker accepted the job. 0 before that."""
    is_answered: bool = False
    """Whether its outcomes are those of a reply."""
    task: asyncio.Task[list[ItemOutcome]] | None = None


@dataclass(frozen=True, slots=True)
class ItemCompletion:
    """The end of an in-flight item.

    `by_worker`: the outcome is a worker's, which writes the row of its leader.
    """

    outcome: ItemOutcome
    by_worker: bool
    queued_at_s: float = 0.0
    """When its job could be published. 0 if it was not."""


def _new_future() -> asyncio.Future[ItemCompletion | None]:
    return asyncio.get_running_loop().create_future()


@dataclass(slots=True, eq=False)
class InFlightItem:
    """One item that is being computed, as its leader requested it."""

    item: Item
    completed: asyncio.Future[ItemCompletion | None] = field(default_factory=_new_future)
    """None: the item was abandoned."""
    waiters: int = 0
    """How many items of requests wait for it."""
    job: InFlightJob | None = None
    is_unpaid: bool = False
    """The leader left without the result. The first request that gets it pays for all of it."""


class SingleFlight:
    """All items that other requests may join, by cache key."""

    def __init__(self) -> None:
        self._by_key: dict[str, InFlightItem] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def join(self, item: Item, *, shareable: bool) -> tuple[InFlightItem, bool]:
        """Returns the in-flight item for `item`, and whether the caller leads it.

        The caller must call `leave` exactly once. Nothing is awaited between lookup and insertion,
        so two requests can never both lead the same item.
        """
        key = item.cache_key if shareable else None
        in_flight = self._by_key.get(key) if key else None
        is_leader = in_flight is None
        if in_flight is None:
            in_flight = InFlightItem(item)
            if key:
                self._by_key[key] = in_flight
        in_flight.waiters += 1
        return in_flight, is_leader

    def leave(self, in_flight: InFlightItem) -> None:
        """Removes one waiter. Cancels the job if none of its items has a waiter left."""
        in_flight.waiters -= 1
        job = in_flight.job
        if in_flight.waiters or in_flight.completed.done() or job is None:
            return
        if job.task and not any(other.waiters for other in job.items):
            job.task.cancel()

    def complete(self, in_flight: InFlightItem, completion: ItemCompletion | None) -> None:
        """Ends the item for all of its waiters. Later requests start a new one.

        A second completion is ignored. None abandons the item.
        """
        key = in_flight.item.cache_key
        if key and self._by_key.get(key) is in_flight:
            del self._by_key[key]
        if not in_flight.completed.done():
            in_flight.completed.set_result(completion)
