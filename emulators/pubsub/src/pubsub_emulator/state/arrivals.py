"""The deliveries of one publish, which wait until all of it was taken in.

What Google's libraries publish waits until it is committed and answered, too.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

from pubsub_emulator.state.consumers import Delivery


class Queue(Protocol):
    """Where deliveries wait: those of one subscription."""

    def let_out(self, deliveries: Iterable[Delivery]) -> None:
        """Let consumers have those of them that are still here."""


class Arrivals:
    """Collects what a publish brings to each subscription, and lets it out at last."""

    def __init__(self) -> None:
        self._waiting: dict[Queue, list[Delivery]] = {}

    def note(self, queue: Queue, delivery: Delivery) -> None:
        """Note a delivery that waits in a queue."""
        waiting = self._waiting.get(queue)
        if waiting is None:
            waiting = self._waiting[queue] = []
        waiting.append(delivery)

    def forget(self) -> None:
        """Let nothing out. An error whose traceback leads here may live on."""
        self._waiting.clear()

    def let_out(self) -> Iterator[None]:
        """Let all out, a step between two subscriptions."""
        while self._waiting:
            queue, deliveries = self._waiting.popitem()
            queue.let_out(deliveries)
            if self._waiting:
                yield
