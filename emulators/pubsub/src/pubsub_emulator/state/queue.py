"""A subscription's deliveries, grouped by possible consumer: any, a key's consumer, or none.

This layer sits between a backlog, which handles leases and policies, and the ordering lines.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from pubsub_emulator.state.arrivals import Arrivals
from pubsub_emulator.state.consumers import Consumer, Consumers, Delivery
from pubsub_emulator.state.delivery_settings import DeliverySettings
from pubsub_emulator.state.message import DELIVERY_COST_BYTES, StoredMessage
from pubsub_emulator.state.ordering import OrderingLine, OrderingLines


class QueueOwner(Protocol):
    """Operations that the queue needs from its subscription."""

    settings: DeliverySettings


class DeliveryQueue:
    """All deliveries (oldest first), the ready deliveries, and each ordering key's line."""

    def __init__(self, owner: QueueOwner, consumers: Consumers) -> None:
        self.deliveries: OrderedDict[int, Delivery] = OrderedDict()
        """By number."""
        self.ready: OrderedDict[int, Delivery] = OrderedDict()
        self._owner = owner
        self._consumers = consumers
        self._lines = OrderingLines()

    @property
    def oldest(self) -> Delivery | None:
        """The delivery whose message was published first."""
        return next(iter(self.deliveries.values())) if self.deliveries else None

    def place(self, delivery: Delivery, arrivals: Arrivals | None = None) -> None:
        """Add a delivery. With `arrivals`, it becomes available only once they are released."""
        self.deliveries[delivery.number] = delivery
        delivery.message.storage.held_bytes += DELIVERY_COST_BYTES
        line = self._lines.add(delivery) if self._is_ordered(delivery.message) else None
        if arrivals is not None:
            delivery.state = "arriving"
            arrivals.note(self, delivery)
        if delivery.state == "arriving":
            # The delivery is already in its line, because later messages must wait for it.
            return
        if line is not None:
            delivery.state = "held"
            self._advance(line)
        else:
            self._make_ready(delivery)

    def let_out(self, deliveries: Iterable[Delivery]) -> None:
        """Make arriving deliveries available, except for any that have since been removed."""
        for delivery in deliveries:
            if delivery.state != "arriving":
                continue
            if self._is_ordered(delivery.message):
                self.offer_again(delivery)
            else:
                delivery.state = "ready"
                self.ready[delivery.number] = delivery
        self._consumers.offer(len(self.ready))

    def offer_again(self, delivery: Delivery) -> None:
        """Make an existing delivery ready, or make it wait behind older ones with the same key."""
        if not self._is_ordered(delivery.message):
            self._make_ready(delivery)
            return
        delivery.timer = None
        delivery.state = "held"
        self._advance(self._lines.of(delivery))

    def next_for(self, consumer: Consumer, share: int) -> Delivery | None:
        """Return a consumer's next delivery: from its own keys first, then from its share."""
        if consumer.keys:
            following = self._following(consumer)
            if following is not None:
                return following
        return next(iter(self.ready.values())) if share > 0 and self.ready else None

    def took(self, delivery: Delivery, consumer: Consumer | None) -> bool:
        """Record that a delivery was leased.

        Returns whether any consumer could have taken the delivery.
        """
        was_ready = self.ready.pop(delivery.number, None) is not None
        if self._is_ordered(delivery.message):
            self._lines.of(delivery).took(consumer)
            if consumer is not None:
                consumer.keys[delivery.message.ordering_key] = None
        return was_ready

    def give_back(self, delivery: Delivery) -> list[Delivery]:
        """Record that a lease ended. Returns the later leased deliveries with the same key."""
        if not self._is_ordered(delivery.message):
            return []
        return self._lines.of(delivery).give_back(delivery)

    def remove(self, delivery: Delivery) -> None:
        """Remove a delivery that is not ready.

        This may release the next delivery with the same key.
        """
        del self.deliveries[delivery.number]
        delivery.message.storage.held_bytes -= DELIVERY_COST_BYTES
        delivery.state = "settled"
        if self._is_ordered(delivery.message):
            self._advance(self._lines.remove(delivery))

    def replace(self, deliveries: Iterable[Delivery]) -> None:
        """Drop all deliveries and start over with the given ones."""
        for delivery in self.deliveries.values():
            delivery.message.storage.held_bytes -= DELIVERY_COST_BYTES
        self.deliveries.clear()
        self.ready.clear()
        self._lines = OrderingLines()
        for delivery in deliveries:
            self.place(delivery)

    def _following(self, consumer: Consumer) -> Delivery | None:
        while consumer.keys:
            key = next(iter(consumer.keys))
            line = self._lines.get(key)
            delivery = line.next if line is not None and line.owner is consumer else None
            if delivery is not None and delivery.state == "held":
                return delivery
            del consumer.keys[key]
        return None

    def _advance(self, line: OrderingLine) -> None:
        """Release a key's next message to anyone, or to the consumer that has the earlier ones."""
        delivery = line.next
        if delivery is None or delivery.state != "held":
            return
        if not line.out:
            self._make_ready(delivery)
        elif line.owner is not None and not line.owner.has_left:
            line.owner.keys[delivery.message.ordering_key] = None
            self._consumers.follow(line.owner)

    def _is_ordered(self, message: StoredMessage) -> bool:
        return bool(message.ordering_key) and self._owner.settings.is_ordered

    def _make_ready(self, delivery: Delivery) -> None:
        delivery.timer = None
        delivery.state = "ready"
        self.ready[delivery.number] = delivery
        self._consumers.offer(len(self.ready))
