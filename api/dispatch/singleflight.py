"""Items in flight in this instance, so that identical ones are computed once; the dispatcher's table.

A flight belongs to no request: all that wait for it are equal, and it lives as long as one of them does. It lands once,
with an outcome that all share, or it is given up (its leader left, or had no more time) and those who still have time
ask again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from shared.messages import Item, ItemOutcome


@dataclass(slots=True, eq=False)
class JobInFlight:
    """The flights that travel in one message, and the task that sees them through."""

    flights: list[Flight]
    part: int
    deadline_s: float
    published_at_s: float = 0.0
    """When the broker had it; 0 before."""
    task: asyncio.Task[list[ItemOutcome]] | None = None


@dataclass(frozen=True, slots=True)
class Landing:
    """How a flight ended. `by_worker`: a worker was handed the item and writes the row of the one who asked first."""

    outcome: ItemOutcome
    by_worker: bool
    published_at_s: float = 0.0


@dataclass(slots=True, eq=False)
class Flight:
    """One item on its way, as its leader asked for it."""

    item: Item
    landed: asyncio.Future[Landing | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """None: given up."""
    waiting: int = 0
    """Places in requests that wait for it."""
    job: JobInFlight | None = None

    def land(self, landing: Landing | None) -> None:
        """Ends the flight; a second landing changes nothing."""
        if not self.landed.done():
            self.landed.set_result(landing)


class Flights:
    """All flights that others may join, by cache_key."""

    def __init__(self) -> None:
        self._by_key: dict[str, Flight] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def board(self, item: Item, *, joinable: bool) -> tuple[Flight, bool]:
        """The flight for `item`, and whether the caller leads it; the caller leaves it exactly once.

        Looking and entering happen without a pause, so two that ask at the same time never both lead.
        """
        key = item.cache_key if joinable else None
        flight = self._by_key.get(key) if key else None
        is_leader = flight is None
        if flight is None:
            flight = Flight(item)
            if key:
                self._by_key[key] = flight
        flight.waiting += 1
        return flight, is_leader

    def leave(self, flight: Flight) -> None:
        """One place fewer waits; a job for which nobody waits any more is canceled."""
        flight.waiting -= 1
        if flight.waiting or flight.landed.done() or flight.job is None:
            return
        if flight.job.task and not any(other.waiting for other in flight.job.flights):
            flight.job.task.cancel()

    def end(self, flight: Flight, landing: Landing | None) -> None:
        """Lands the flight; who asks from now on starts a new one."""
        if flight.item.cache_key and self._by_key.get(flight.item.cache_key) is flight:
            del self._by_key[flight.item.cache_key]
        flight.land(landing)
