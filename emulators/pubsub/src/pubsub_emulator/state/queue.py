"""The deliveries of one subscription by who may take them: anybody, the owner of a key, nobody yet.

Between a backlog, which knows leases and policies, and the ordering lines.
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
    """What the queue asks of its subscription."""

    settings: DeliverySettings


class DeliveryQueue:
    """All deliveries, oldest first, those that are ready, and the lines of the ordering keys."""

    def __init__(self, owner: QueueOwner, consumers: Consumers) -> None:
        self.deliveries: OrderedDict[int, Delivery] = OrderedDict()
        """By number."""
        self.ready: OrderedDict[int, Delivery] = OrderedDict()
        self._owner = owner
        self._consumers = consumers
        self._lines = OrderingLines()

    @property
    def oldest(self) -> Delivery | None:
        """The one whose message was published first."""
        return next(iter(self.deliveries.values())) if self.deliveries else None

    def place(self, delivery: Delivery, arrivals: Arrivals | None = None) -> None:
        """Take a delivery in. With `arrivals`, nobody gets it before they let it out."""
        self.deliveries[delivery.number] = delivery
        delivery.message.storage.held_bytes += DELIVERY_COST_BYTES
        line = self._lines.add(delivery) if self._is_ordered(delivery.message) else None
        if arrivals is not None:
            delivery.state = "arriving"
            arrivals.note(self, delivery)
        if delivery.state == "arriving":
            # It is in its line: what comes later must wait for it.
            return
        if line is not None:
            delivery.state = "held"
            self._advance(line)
        else:
            self._make_ready(delivery)

    def let_out(self, deliveries: Iterable[Delivery]) -> None:
        """Let consumers have what was arriving. Some of it may have gone since."""
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
        """Make a delivery ready that is here, or let it wait behind the older ones of its key."""
        if not self._is_ordered(delivery.message):
            self._make_ready(delivery)
            return
        delivery.timer = None
        delivery.state = "held"
        self._advance(self._lines.of(delivery))

    def next_for(self, consumer: Consumer, share: int) -> Delivery | None:
        """The next for a consumer: of its keys first, then of its share of what is ready."""
        if consumer.keys:
            following = self._following(consumer)
            if following is not None:
                return following
        return next(iter(self.ready.values())) if share > 0 and self.ready else None

    def took(self, delivery: Delivery, consumer: Consumer | None) -> bool:
        """Note that a delivery was leased. Returns whether anybody might have taken it."""
        was_ready = self.ready.pop(delivery.number, None) is not None
        if self._is_ordered(delivery.message):
            self._lines.of(delivery).took(consumer)
            if consumer is not None:
                consumer.keys[delivery.message.ordering_key] = None
        return was_ready

    def give_back(self, delivery: Delivery) -> list[Delivery]:
        """Note that a lease ended. Returns the leased ones of its key that come after it."""
        if not self._is_ordered(delivery.message):
            return []
        return self._lines.of(delivery).give_back(delivery)

    def remove(self, delivery: Delivery) -> None:
        """Take a delivery out that is not ready, for good. The next of its key may go."""
        del self.deliveries[delivery.number]
        delivery.message.storage.held_bytes -= DELIVERY_COST_BYTES
        delivery.state = "settled"
        if self._is_ordered(delivery.message):
            self._advance(self._lines.remove(delivery))

    def replace(self, deliveries: Iterable[Delivery]) -> None:
        """Start again with these and nothing else."""
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
        """Let the next message of a key out: to anybody, or to who has those before it."""
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
