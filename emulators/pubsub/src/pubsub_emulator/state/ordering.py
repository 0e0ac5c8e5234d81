"""Unacked messages by ordering key, oldest first, and which of them a consumer has taken.

Several messages with the same key may be outstanding, all held by one consumer. If one is
redelivered, all messages after it are redelivered too. Source:
https://cloud.google.com/pubsub/docs/ordering
"""

import bisect

from pubsub_emulator.state.consumers import Consumer, Delivery


class OrderingLine:
    """Messages with one key.

    The first `out` deliveries are leased to `owner`, unless it has disconnected.
    """

    __slots__ = ("deliveries", "out", "owner")

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []
        self.out = 0
        self.owner: Consumer | None = None

    @property
    def next(self) -> Delivery | None:
        """The oldest delivery that no consumer has taken."""
        return self.deliveries[self.out] if self.out < len(self.deliveries) else None

    def took(self, consumer: Consumer | None) -> None:
        """Record that the next delivery was leased. None: the consumer can't take any more."""
        self.out += 1
        self.owner = consumer

    def give_back(self, delivery: Delivery) -> list[Delivery]:
        """Take back a leased delivery and the ones after it. Returns the deliveries after it."""
        index = self._index(delivery)
        later = self.deliveries[index + 1 : self.out]
        self._keep_out(index)
        return later

    def add(self, delivery: Delivery) -> None:
        """Insert a delivery in publishing order. Nothing after it is leased."""
        bisect.insort(self.deliveries, delivery, key=_sequence)

    def remove(self, delivery: Delivery) -> None:
        """Remove a delivery, leased or not."""
        index = self._index(delivery)
        self.deliveries.pop(index)
        if index < self.out:
            self._keep_out(self.out - 1)

    def _index(self, delivery: Delivery) -> int:
        return bisect.bisect_left(self.deliveries, delivery.message.sequence, key=_sequence)

    def _keep_out(self, number: int) -> None:
        self.out = number
        if not number:
            self.owner = None


class OrderingLines:
    """One line per ordering key."""

    def __init__(self) -> None:
        self._lines: dict[str, OrderingLine] = {}

    def of(self, delivery: Delivery) -> OrderingLine:
        """Return the line that contains a delivery."""
        return self._lines[delivery.message.ordering_key]

    def get(self, key: str) -> OrderingLine | None:
        """Return a key's line, if the key has messages."""
        return self._lines.get(key)

    def add(self, delivery: Delivery) -> OrderingLine:
        """Add a delivery to its key's line."""
        line = self._lines.setdefault(delivery.message.ordering_key, OrderingLine())
        line.add(delivery)
        return line

    def remove(self, delivery: Delivery) -> OrderingLine:
        """Remove a delivery from its key's line."""
        line = self.of(delivery)
        line.remove(delivery)
        if not line.deliveries:
            del self._lines[delivery.message.ordering_key]
        return line


def _sequence(delivery: Delivery) -> int:
    return delivery.message.sequence
