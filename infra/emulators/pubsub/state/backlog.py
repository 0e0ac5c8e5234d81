"""The deliveries of one subscription: ready, leased to a consumer, or coming back.

Between a subscription, which adds messages and owns the policies, and the consumers (streams,
pulls, push workers).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Protocol

from infra.emulators.pubsub.errors import InvalidArgument
from infra.emulators.pubsub.state.ack_ids import AckIds
from infra.emulators.pubsub.state.consumers import Consumer, Consumers, Delivery, State
from infra.emulators.pubsub.state.delivery_settings import DeliverySettings
from infra.emulators.pubsub.state.journal import ChangeJournal
from infra.emulators.pubsub.state.message import StoredMessage
from infra.emulators.pubsub.state.ordering import OrderingLine, OrderingLines
from infra.emulators.pubsub.state.timers import Timers

MAX_TAKE = 1000
# One response stays well under what clients accept by default (4 MiB), unless one message alone is
# bigger.
MAX_TAKE_BYTES = 2 * 1024 * 1024


class Policy(Protocol):
    """What the backlog asks of its subscription."""

    settings: DeliverySettings

    def acked(self, message: StoredMessage) -> None:
        """Note that a message was acked."""

    def next_number(self) -> int:
        """Return a number for a delivery that came back, higher than all before."""

    def forward_dead_letter(self, delivery: Delivery) -> bool:
        """Publish to the dead-letter topic. Return False if that topic is gone."""


class Backlog:
    """All unacked messages of one subscription, oldest first, each in one `State`."""

    def __init__(self, policy: Policy, timers: Timers, journal: ChangeJournal, holder: int) -> None:
        self.ack_ids = AckIds(holder)
        self.consumers = Consumers()
        self._policy = policy
        self._timers = timers
        self._journal = journal
        self._holder = holder
        self._deliveries: OrderedDict[int, Delivery] = OrderedDict()
        self._ready: OrderedDict[int, Delivery] = OrderedDict()
        self._lines = OrderingLines()

    @property
    def settings(self) -> DeliverySettings:
        """Those of the subscription."""
        return self._policy.settings

    @property
    def messages(self) -> list[StoredMessage]:
        """The unacked messages, oldest first."""
        return [delivery.message for delivery in self._deliveries.values()]

    @property
    def oldest(self) -> StoredMessage | None:
        """The unacked message that was published first."""
        return next(iter(self._deliveries.values())).message if self._deliveries else None

    @property
    def attempts_of_oldest(self) -> int:
        """How often the oldest unacked message was delivered. 0 if there is none."""
        return next(iter(self._deliveries.values())).attempts if self._deliveries else 0

    def add(self, message: StoredMessage) -> None:
        """Add a message and wake a consumer, unless an older one of its ordering key is present."""
        self._enter(message, message.sequence)

    def restore(self, message: StoredMessage, number: int, attempts: int) -> None:
        """Take in a message that was here before a restart: whatever lease it had ended with that.

        One that had its last attempt is a dead letter as soon as time goes on.
        """
        delivery = Delivery(number, message)
        delivery.attempts = delivery.handouts = attempts
        self._place(delivery)
        most = self.settings.max_delivery_attempts
        if not 0 < most <= attempts:
            return
        if delivery.state is not State.READY:
            # Behind an older one of its key, whose redelivery ended this attempt.
            delivery.attempts = most - 1
            return
        del self._ready[number]
        self._lease(delivery, self._timers.now_s())
        if self._is_ordered(message):
            self._lines.of(delivery).took(None)

    def take(self, consumer: Consumer, max_messages: int = MAX_TAKE) -> list[Delivery]:
        """Lease ready messages to a consumer, as many as its room and its share allow.

        Those that follow on what it has of an ordering key come first.

        Returns:
            At most `max_messages`, oldest first. Empty if nothing is available. Then the consumer
            is woken when that changes.
        """
        share = self.consumers.share(consumer, len(self._ready))
        taken: list[Delivery] = []
        size_bytes = 0
        due_s = self._timers.now_s() + consumer.ack_deadline_s
        while len(taken) < max_messages and consumer.has_room:
            delivery = self._following(consumer) or self._first_ready(share)
            if delivery is None:
                break
            size_bytes += delivery.message.size_bytes
            if taken and size_bytes > MAX_TAKE_BYTES:
                break
            share -= self._hand_out(delivery, consumer, due_s)
            taken.append(delivery)
        if not taken:
            self.consumers.wait(consumer)
        self.consumers.offer(len(self._ready))
        return taken

    def _following(self, consumer: Consumer) -> Delivery | None:
        while consumer.keys:
            key = next(iter(consumer.keys))
            line = self._lines.get(key)
            delivery = line.next if line is not None and line.owner is consumer else None
            if delivery is not None and delivery.state is State.HELD:
                return delivery
            del consumer.keys[key]
        return None

    def _first_ready(self, share: int) -> Delivery | None:
        return next(iter(self._ready.values())) if share > 0 and self._ready else None

    def _hand_out(self, delivery: Delivery, consumer: Consumer, due_s: float) -> bool:
        """Lease a delivery. Returns whether it was one that anybody might have taken."""
        was_ready = self._ready.pop(delivery.number, None) is not None
        delivery.attempts += 1
        delivery.handouts += 1
        self._journal.hold(delivery.message, self._holder, delivery.number, delivery.attempts)
        self._lease(delivery, due_s)
        self.consumers.took(consumer, delivery)
        if self._is_ordered(delivery.message):
            self._lines.of(delivery).took(consumer)
            consumer.keys[delivery.message.ordering_key] = None
        return was_ready

    def busy(self, consumer: Consumer) -> None:
        """Wake others instead of a consumer that took nothing and can't take more now."""
        self.consumers.busy(consumer, len(self._ready))

    def leave(self, consumer: Consumer) -> None:
        """Disconnect a consumer. Its leases stay until they are acked, nacked or run out."""
        self.consumers.leave(consumer, len(self._ready))

    def fill(self, received: Any, delivery: Delivery) -> None:
        """Write a leased delivery into a `ReceivedMessage`."""
        received.ack_id = self.ack_ids.of(delivery)
        received.message.CopyFrom(delivery.message.proto)
        if self.settings.max_delivery_attempts:
            received.delivery_attempt = delivery.attempts

    def find(self, ack_id: str) -> tuple[Delivery | None, bool]:
        """The delivery that an ack id means, if it is here, and whether the id is of its lease now.

        Raises:
            InvalidArgument: no server would have made the id. Not with exactly-once delivery.
        """
        try:
            number, handout = self.ack_ids.read(ack_id)
        except InvalidArgument:
            if self.settings.exactly_once:
                return None, False
            raise
        delivery = self._deliveries.get(number)
        if delivery is None or handout > delivery.handouts:
            return None, False
        return delivery, delivery.state is State.LEASED and delivery.handouts == handout

    def settle(self, delivery: Delivery) -> None:
        """Ack a message that is here, leased or not."""
        if delivery.state is not State.SETTLED:
            self._remove(delivery)
            self._policy.acked(delivery.message)

    def extend(self, delivery: Delivery, deadline_s: float) -> None:
        """Let a lease, if there still is one, end so many seconds from now."""
        if delivery.state is State.LEASED:
            delivery.stop_timer()
            self._lease(delivery, self._timers.now_s() + deadline_s)

    def keep_only(self, is_unacked: Callable[[StoredMessage], bool]) -> None:
        """Ack every message that the predicate denies, leased or not."""
        for delivery in list(self._deliveries.values()):
            if not is_unacked(delivery.message):
                self.settle(delivery)

    def bring_back(self, messages: Iterable[StoredMessage]) -> None:
        """Deliver from the start: what is here, leased or not, and these messages with it.

        An ack id of the time before does not ack what it brings back.
        """
        for delivery in self._deliveries.values():
            if delivery.state is State.LEASED:
                # No nack and no lease that ran out, so no attempt. Its number is what ends the id.
                delivery.attempts -= 1
                delivery.number = self._policy.next_number()
            self._end_lease(delivery)
        brought = [Delivery(self._policy.next_number(), message) for message in messages]
        deliveries = sorted((*self._deliveries.values(), *brought), key=_sequence)
        self._deliveries.clear()
        self._ready.clear()
        self._lines = OrderingLines()
        for delivery in deliveries:
            self._journal.hold(delivery.message, self._holder, delivery.number, delivery.attempts)
            self._place(delivery)

    def drop_oldest(self) -> None:
        """Forget the message that was published first, unacked."""
        self._remove(next(iter(self._deliveries.values())))

    def withdraw(self, sequences: Collection[int]) -> None:
        """Forget messages, leased or not. Acks for them have no effect."""
        for delivery in [
            each for each in self._deliveries.values() if each.message.sequence in sequences
        ]:
            self._remove(delivery)

    def clear(self) -> None:
        """Forget every message. Acks for them have no effect."""
        for delivery in self._deliveries.values():
            self._journal.release(delivery.message, self._holder)
            delivery.stop_timer()
            delivery.state = State.SETTLED
        self._deliveries.clear()
        self._ready.clear()
        self._lines = OrderingLines()

    def _enter(self, message: StoredMessage, number: int) -> None:
        self._journal.hold(message, self._holder, number)
        self._place(Delivery(number, message))

    def _place(self, delivery: Delivery) -> None:
        self._deliveries[delivery.number] = delivery
        if self._is_ordered(delivery.message):
            delivery.state = State.HELD
            self._advance(self._lines.add(delivery))
        else:
            self._make_ready(delivery)

    def _advance(self, line: OrderingLine) -> None:
        """Let the next message of a key out: to anybody, or to who has those before it."""
        delivery = line.next
        if delivery is None or delivery.state is not State.HELD:
            return
        if not line.out:
            self._make_ready(delivery)
        elif line.owner is not None and not line.owner.has_left:
            line.owner.keys[delivery.message.ordering_key] = None
            self.consumers.follow(line.owner)

    def _is_ordered(self, message: StoredMessage) -> bool:
        return self.settings.is_ordered and bool(message.ordering_key)

    def _make_ready(self, delivery: Delivery) -> None:
        delivery.timer = None
        delivery.state = State.READY
        self._ready[delivery.number] = delivery
        self.consumers.offer(len(self._ready))

    def _lease(self, delivery: Delivery, until_s: float) -> None:
        delivery.state = State.LEASED
        delivery.timer = self._timers.at(until_s, partial(self.give_back, delivery))

    def give_back(self, delivery: Delivery) -> None:
        """End a lease without an ack: to the dead-letter topic, into backoff, or ready at once."""
        if delivery.state is not State.LEASED:
            return
        self._end_lease(delivery)
        if self._is_ordered(delivery.message):
            for later in self._lines.of(delivery).give_back(delivery):
                self._call_back(later)
        settings = self.settings
        is_last = 0 < settings.max_delivery_attempts <= delivery.attempts
        if is_last and self._policy.forward_dead_letter(delivery):
            self._remove(delivery)
            return
        backoff_s = settings.backoff_s(delivery.attempts)
        if backoff_s == 0:
            self._offer_again(delivery)
            return
        delivery.state = State.BACKOFF
        delivery.timer = self._timers.at(
            self._timers.now_s() + backoff_s, partial(self._offer_again, delivery)
        )

    def _call_back(self, delivery: Delivery) -> None:
        """End a lease because an older message of its key comes again. That is no attempt."""
        self._end_lease(delivery)
        delivery.state = State.HELD
        delivery.attempts -= 1
        self._journal.hold(delivery.message, self._holder, delivery.number, delivery.attempts)

    def _offer_again(self, delivery: Delivery) -> None:
        if not self._is_ordered(delivery.message):
            self._make_ready(delivery)
            return
        delivery.timer = None
        delivery.state = State.HELD
        self._advance(self._lines.of(delivery))

    def _end_lease(self, delivery: Delivery) -> None:
        delivery.stop_timer()
        self.consumers.gave_back(delivery, len(self._ready))

    def _remove(self, delivery: Delivery) -> None:
        self._ready.pop(delivery.number, None)
        self._end_lease(delivery)
        delivery.state = State.SETTLED
        del self._deliveries[delivery.number]
        self._journal.release(delivery.message, self._holder)
        if self._is_ordered(delivery.message):
            self._advance(self._lines.remove(delivery))


def _sequence(delivery: Delivery) -> int:
    return delivery.message.sequence
