"""Queues of messages with the same ordering key: only the oldest may be outstanding."""

import bisect

from infra.emulators.pubsub.state.consumers import Delivery, State


class OrderingLines:
    """One queue per ordering key, oldest first. Only heads are outstanding."""

    def __init__(self) -> None:
        self._lines: dict[str, list[Delivery]] = {}

    def add(self, delivery: Delivery) -> Delivery | None:
        """Put a delivery into its line by order of publishing.

        Returns:
            The delivery it pushed back from the head (a seek brings older messages than the head),
            to be taken back from its consumer. Whether the new one is the head is `is_head`.
        """
        line = self._lines.setdefault(delivery.message.ordering_key, [])
        if not line or line[-1].message.sequence < delivery.message.sequence:
            line.append(delivery)
            return None
        head = line[0]
        bisect.insort(line, delivery, key=_sequence)
        return head if line[0] is delivery else None

    def is_head(self, delivery: Delivery) -> bool:
        """Whether nothing older of its key is left."""
        return self._lines[delivery.message.ordering_key][0] is delivery

    def remove(self, delivery: Delivery) -> Delivery | None:
        """Remove a delivery. Return the new head if it may be delivered now."""
        line = self._lines[delivery.message.ordering_key]
        line.pop(bisect.bisect_left(line, delivery.message.sequence, key=_sequence))
        if not line:
            del self._lines[delivery.message.ordering_key]
            return None
        return line[0] if line[0].state is State.HELD else None


def _sequence(delivery: Delivery) -> int:
    return delivery.message.sequence
