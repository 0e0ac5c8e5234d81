"""A subscription's deliveries: ready, leased to a consumer, or being returned.

This layer sits between a subscription, which adds messages and holds the policies, and its
consumers (streams, pulls, push workers).
"""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Protocol

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.state.ack_ids import AckIds
from pubsub_emulator.state.arrivals import Arrivals
from pubsub_emulator.state.consumers import Consumer, Consumers, Delivery
from pubsub_emulator.state.delivery_settings import DeliverySettings
from pubsub_emulator.state.journal import ChangeJournal
from pubsub_emulator.state.message import StoredMessage
from pubsub_emulator.state.queue import DeliveryQueue
from pubsub_emulator.state.received import received_message
from pubsub_emulator.state.timers import Timers

MAX_TAKE = 1000
# Keeps a response well below the default client limit of 4 MiB, unless a single message is larger.
MAX_TAKE_BYTES = 2 * 1024 * 1024


class BacklogOwner(Protocol):
    """Operations a backlog needs from its subscription."""

    settings: DeliverySettings

    def acked(self, message: StoredMessage) -> None:
        """Record that a message was acked."""

    def next_number(self) -> int:
        """Return a number, higher than all previous ones, for a delivery that was returned."""

    def forward_dead_letter(self, delivery: Delivery) -> bool:
        """Publish to the dead-letter topic. Return False if the topic no longer exists."""


class Backlog:
    """All of a subscription's unacked messages, oldest first, each in exactly one `State`."""

    def __init__(
        self, owner: BacklogOwner, timers: Timers, journal: ChangeJournal, holder: int
    ) -> None:
        self.ack_ids = AckIds(holder)
        self.consumers = Consumers()
        self._owner = owner
        self._timers = timers
        self._journal = journal
        self._holder = holder
        self._queue = DeliveryQueue(owner, self.consumers)

    @property
    def settings(self) -> DeliverySettings:
        return self._owner.settings

    @property
    def messages(self) -> list[StoredMessage]:
        return [delivery.message for delivery in self._queue.deliveries.values()]

    @property
    def oldest(self) -> StoredMessage | None:
        """The unacked message that was published first."""
        oldest = self._queue.oldest
        return None if oldest is None else oldest.message

    @property
    def attempts_of_oldest(self) -> int:
        """The number of delivery attempts for the oldest unacked message, or 0 if there is none."""
        oldest = self._queue.oldest
        return 0 if oldest is None else oldest.attempts

    def add(self, message: StoredMessage, arrivals: Arrivals | None = None) -> None:
        """Add a message; wake a consumer unless an older message has the same ordering key.

        With `arrivals`, the message becomes available only once they are released.
        """
        self._journal.hold(message, self._holder, message.sequence)
        self._queue.place(Delivery(message.sequence, message), arrivals)

    def restore(self, message: StoredMessage, number: int, attempts: int) -> None:
        """Add a message that predates a restart. The restart ended any lease on it.

        A message that had already used its last attempt becomes a dead letter as soon as timers
        run.
        """
        delivery = Delivery(number, message)
        delivery.attempts = delivery.handouts = attempts
        self._queue.place(delivery)
        most = self.settings.max_delivery_attempts
        if not 0 < most <= attempts:
            return
        if delivery.state != "ready":
            # Queued behind an older message with the same key, whose redelivery ended this attempt.
            delivery.attempts = most - 1
            return
        self._queue.took(delivery, None)
        self._lease(delivery, self._timers.now_s())

    def take(self, consumer: Consumer, max_messages: int = MAX_TAKE) -> list[Delivery]:
        """Lease ready messages to a consumer, within its capacity and share.

        Messages with ordering keys that the consumer already holds come first.

        Returns:
            At most `max_messages`, oldest first. Empty if nothing is available, in which case the
            consumer is woken once something is.
        """
        queue = self._queue
        share = self.consumers.share(consumer, len(queue.ready))
        deliveries: list[Delivery] = []
        size_bytes = 0
        due_s = self._timers.now_s() + consumer.ack_deadline_s
        while len(deliveries) < max_messages and consumer.has_room:
            delivery = queue.next_for(consumer, share)
            if delivery is None:
                break
            size_bytes += delivery.message.size_bytes
            if deliveries and size_bytes > MAX_TAKE_BYTES:
                break
            share -= self._hand_out(delivery, consumer, due_s)
            deliveries.append(delivery)
        if not deliveries:
            self.consumers.wait(consumer)
        self.consumers.offer(len(queue.ready))
        return deliveries

    def _hand_out(self, delivery: Delivery, consumer: Consumer, due_s: float) -> bool:
        """Lease a delivery. Returns whether any consumer could have taken the delivery."""
        delivery.attempts += 1
        delivery.handouts += 1
        self._journal.hold(delivery.message, self._holder, delivery.number, delivery.attempts)
        self._lease(delivery, due_s)
        self.consumers.took(consumer, delivery)
        return self._queue.took(delivery, consumer)

    def busy(self, consumer: Consumer) -> None:
        """Wake others in place of a consumer that took nothing and now has no capacity."""
        self.consumers.busy(consumer, len(self._queue.ready))

    def leave(self, consumer: Consumer) -> None:
        """Disconnect a consumer.

        Its leases last until their messages are acked or nacked, or until they expire.
        """
        self.consumers.leave(consumer, len(self._queue.ready))

    def serialized(self, deliveries: Iterable[Delivery]) -> bytes:
        """Return leased deliveries as the `received_messages` of a serialized response."""
        shows_attempts = self.settings.max_delivery_attempts > 0
        return b"".join(
            [
                received_message(
                    delivery, self.ack_ids.of(delivery), delivery.attempts if shows_attempts else 0
                )
                for delivery in deliveries
            ]
        )

    def find(self, ack_id: str) -> tuple[Delivery | None, bool]:
        """Return an ack id's delivery, if it exists, and True if the id is for the current lease.

        Raises:
            InvalidArgument: the id has an invalid format. Not raised if exactly-once delivery is
                enabled.
        """
        try:
            number, handout = self.ack_ids.read(ack_id)
        except InvalidArgument:
            if self.settings.exactly_once:
                return None, False
            raise
        delivery = self._queue.deliveries.get(number)
        if delivery is None or handout > delivery.handouts:
            return None, False
        return delivery, delivery.state == "leased" and delivery.handouts == handout

    def settle(self, delivery: Delivery) -> None:
        """Ack a message in this backlog, leased or not."""
        if delivery.state != "settled":
            self._remove(delivery)
            self._owner.acked(delivery.message)

    def extend(self, delivery: Delivery, deadline_s: float) -> None:
        """If the lease still exists, set it to end this many seconds from now."""
        if delivery.state == "leased":
            delivery.stop_timer()
            self._lease(delivery, self._timers.now_s() + deadline_s)

    def keep_only(self, is_unacked: Callable[[StoredMessage], bool]) -> None:
        """Ack every message for which the predicate is false, leased or not."""
        for delivery in list(self._queue.deliveries.values()):
            if not is_unacked(delivery.message):
                self.settle(delivery)

    def bring_back(self, messages: Iterable[StoredMessage]) -> None:
        """Reset all deliveries, leased or not, and restore these messages as well.

        Ack ids issued before the reset do not ack the restored messages.
        """
        for delivery in self._queue.deliveries.values():
            if delivery.state == "leased":
                # This is neither a nack nor an expired lease, so it does not count as an attempt.
                # The new number invalidates the id.
                delivery.attempts -= 1
                delivery.number = self._owner.next_number()
            self._end_lease(delivery)
        brought = [Delivery(self._owner.next_number(), message) for message in messages]
        deliveries = sorted((*self._queue.deliveries.values(), *brought), key=_sequence)
        for delivery in deliveries:
            self._journal.hold(delivery.message, self._holder, delivery.number, delivery.attempts)
        self._queue.replace(deliveries)

    def drop_oldest(self) -> None:
        """Drop the message that was published first, without an ack."""
        if self._queue.oldest is not None:
            self._remove(self._queue.oldest)

    def withdraw(self, sequences: Collection[int]) -> None:
        """Drop messages, leased or not. Acks for them have no effect."""
        for delivery in [
            received
            for received in self._queue.deliveries.values()
            if received.message.sequence in sequences
        ]:
            self._remove(delivery)

    def clear(self) -> None:
        """Drop every message. Acks for them have no effect."""
        for delivery in self._queue.deliveries.values():
            self._journal.release(delivery.message, self._holder)
            delivery.stop_timer()
            delivery.state = "settled"
        self._queue.replace(())

    def _lease(self, delivery: Delivery, until_s: float) -> None:
        delivery.state = "leased"
        delivery.timer = self._timers.at(until_s, partial(self.give_back, delivery))

    def give_back(self, delivery: Delivery) -> None:
        """End a lease without an ack: dead-letter the message, back off, or make it ready now."""
        if delivery.state != "leased":
            return
        self._end_lease(delivery)
        for later in self._queue.give_back(delivery):
            self._call_back(later)
        settings = self.settings
        is_last = 0 < settings.max_delivery_attempts <= delivery.attempts
        if is_last and self._owner.forward_dead_letter(delivery):
            self._remove(delivery)
            return
        backoff_s = settings.backoff_s(delivery.attempts)
        if backoff_s == 0:
            self._queue.offer_again(delivery)
            return
        delivery.state = "backoff"
        delivery.timer = self._timers.at(
            self._timers.now_s() + backoff_s, partial(self._queue.offer_again, delivery)
        )

    def return_untried(self, deliveries: Iterable[Delivery]) -> None:
        """End the leases of messages that were not used. This does not count as an attempt."""
        for delivery in deliveries:
            if delivery.state == "leased":
                self._end_lease(delivery)
                for later in self._queue.give_back(delivery):
                    self._call_back(later)
                delivery.attempts -= 1
                self._journal.hold(
                    delivery.message, self._holder, delivery.number, delivery.attempts
                )
                self._queue.offer_again(delivery)

    def _call_back(self, delivery: Delivery) -> None:
        """End a lease because an older message with the same key is being redelivered.

        This does not count as an attempt.
        """
        self._end_lease(delivery)
        delivery.state = "held"
        delivery.attempts -= 1
        self._journal.hold(delivery.message, self._holder, delivery.number, delivery.attempts)

    def _end_lease(self, delivery: Delivery) -> None:
        delivery.stop_timer()
        self.consumers.gave_back(delivery, len(self._queue.ready))

    def _remove(self, delivery: Delivery) -> None:
        if delivery.state != "leased":
            self._queue.ready.pop(delivery.number, None)
        self._end_lease(delivery)
        self._journal.release(delivery.message, self._holder)
        self._queue.remove(delivery)


def _sequence(delivery: Delivery) -> int:
    return delivery.message.sequence
