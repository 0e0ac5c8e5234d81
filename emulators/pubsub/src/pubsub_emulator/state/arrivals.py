"""A publish's deliveries, held until all of its messages have been added.

Messages published by Google's libraries are also held until they are committed and the response is
sent.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from pubsub_emulator.state.consumers import Delivery


class Queue(Protocol):
    """Holds a subscription's deliveries."""

    def let_out(self, deliveries: Iterable[Delivery]) -> None:
        """Make the deliveries that still exist available to consumers."""


class Arrivals:
    """Collects a publish's deliveries to each subscription, then releases them."""

    def __init__(self) -> None:
        self._waiting: dict[Queue, list[Delivery]] = {}

    def note(self, queue: Queue, delivery: Delivery) -> None:
        """Record a delivery that is waiting in a queue."""
        waiting = self._waiting.get(queue)
        if waiting is None:
            waiting = self._waiting[queue] = []
        waiting.append(delivery)

    def forget(self) -> None:
        """Drop all deliveries without releasing them.

        An error's traceback may keep this object alive.
        """
        self._waiting.clear()

    def let_out(self) -> Iterator[None]:
        """Release all deliveries, yielding between subscriptions."""
        while self._waiting:
            queue, deliveries = self._waiting.popitem()
            queue.let_out(deliveries)
            if self._waiting:
                yield
