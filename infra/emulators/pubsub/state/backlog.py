"""The deliveries of one subscription: ready, leased to a consumer, or coming back.

Between a subscription, which adds messages and owns the policies, and the consumers (streams,
pulls, push workers).
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, Protocol

from infra.emulators.pubsub.errors import INVALID_ACK_ID, InvalidArgument
from infra.emulators.pubsub.state.ack_ids import AckIds
from infra.emulators.pubsub.state.consumers import Consumer, Consumers, Delivery, State
from infra.emulators.pubsub.state.delivery_settings import DeliverySettings
from infra.emulators.pubsub.state.journal import ChangeJournal
from infra.emulators.pubsub.state.message import StoredMessage
from infra.emulators.pubsub.state.ordering import OrderingLines
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
        delivery.attempts = attempts
        self._place(delivery)
        if (
            0 < self._policy.settings.max_delivery_attempts <= attempts
            and delivery.state is State.READY
        ):
            del self._ready[number]
            self._lease(delivery, self._timers.now_s())

    def take(self, consumer: Consumer, max_messages: int = MAX_TAKE) -> list[Delivery]:
        """Lease ready messages to a consumer, as many as its room and its share allow.

        Returns:
            At most `max_messages`, oldest first. Empty if nothing is available. Then the consumer
            is woken when that changes.
        """
        limit = min(max_messages, self.consumers.share(consumer, len(self._ready)))
        taken: list[Delivery] = []
        size_bytes = 0
        due_s = self._timers.now_s() + consumer.ack_deadline_s
        while self._ready and len(taken) < limit and consumer.has_room:
            delivery = next(iter(self._ready.values()))
            size_bytes += delivery.message.size_bytes
            if taken and size_bytes > MAX_TAKE_BYTES:
                break
            del self._ready[delivery.number]
            delivery.attempts += 1
            self._journal.hold(delivery.message, self._holder, delivery.number, delivery.attempts)
            self._lease(delivery, due_s)
            self.consumers.took(consumer, delivery)
            taken.append(delivery)
        if not taken:
            self.consumers.wait(consumer)
        self.consumers.offer(len(self._ready))
        return taken

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
        if self._policy.settings.max_delivery_attempts:
            received.delivery_attempt = delivery.attempts

    def acknowledge(self, ack_ids: Iterable[str]) -> dict[str, str]:
        """Settle the messages of these ack ids.

        Returns:
            The refused ack ids with their reasons. Without exactly-once delivery there are none: an
            expired id acks the message if it is still there, and is ignored otherwise.

        Raises:
            InvalidArgument: an ack id that no server would have made. Nothing was acked.
        """
        refused: dict[str, str] = {}
        for ack_id, delivery, is_current in [(each, *self._find(each)) for each in ack_ids]:
            if self._policy.settings.exactly_once and not is_current:
                refused[ack_id] = INVALID_ACK_ID
            elif delivery is not None:
                self._settle(delivery)
        return refused

    def modify_ack_deadline(
        self, ack_ids: Iterable[str], deadlines_s: Iterable[int]
    ) -> dict[str, str]:
        """Move the end of leases to so many seconds from now. 0 is a nack.

        Returns:
            The refused ack ids with their reasons. None without exactly-once delivery.

        Raises:
            InvalidArgument: an ack id that no server would have made. Nothing was changed.
        """
        refused: dict[str, str] = {}
        now_s = self._timers.now_s()
        found = [(ack_id, *self._find(ack_id)) for ack_id in ack_ids]
        for (ack_id, delivery, is_current), deadline_s in zip(found, deadlines_s, strict=True):
            if delivery is None or not is_current:
                if self._policy.settings.exactly_once:
                    refused[ack_id] = INVALID_ACK_ID
            elif deadline_s == 0:
                self._give_back(delivery)
            elif delivery.state is State.LEASED:
                delivery.stop_timer()
                self._lease(delivery, now_s + deadline_s)
        return refused

    def keep_only(self, is_unacked: Callable[[StoredMessage], bool]) -> None:
        """Ack every message that the predicate denies, leased or not."""
        for delivery in list(self._deliveries.values()):
            if not is_unacked(delivery.message):
                self._settle(delivery)

    def bring_back(self, messages: Iterable[StoredMessage]) -> None:
        """Add messages that are older than some that are here, each in its place.

        Leased messages keep their lease, unless an older one of their ordering key came back.
        """
        for message in messages:
            # Not its sequence: an ack id of the time before it was acked must not ack it again.
            self._enter(message, self._policy.next_number())
        self._deliveries = _by_sequence(self._deliveries)
        self._ready = _by_sequence(self._ready)

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
            pushed_back = self._lines.add(delivery)
            if pushed_back is not None:
                self._hold(pushed_back)
            if not self._lines.is_head(delivery):
                delivery.state = State.HELD
                return
        self._make_ready(delivery)

    def _is_ordered(self, message: StoredMessage) -> bool:
        return self._policy.settings.is_ordered and bool(message.ordering_key)

    def _find(self, ack_id: str) -> tuple[Delivery | None, bool]:
        try:
            number, attempts = self.ack_ids.read(ack_id)
        except InvalidArgument:
            if self._policy.settings.exactly_once:
                return None, False
            raise
        delivery = self._deliveries.get(number)
        if delivery is None or attempts > delivery.attempts:
            return None, False
        return delivery, delivery.state is State.LEASED and delivery.attempts == attempts

    def _make_ready(self, delivery: Delivery) -> None:
        delivery.timer = None
        delivery.state = State.READY
        self._ready[delivery.number] = delivery
        self.consumers.offer(len(self._ready))

    def _lease(self, delivery: Delivery, until_s: float) -> None:
        delivery.state = State.LEASED
        delivery.timer = self._timers.at(until_s, partial(self._give_back, delivery))

    def _give_back(self, delivery: Delivery) -> None:
        # A lease ended without an ack: to the dead-letter topic, into backoff, or ready at once.
        if delivery.state is not State.LEASED:
            return
        self._end_lease(delivery)
        settings = self._policy.settings
        is_last = 0 < settings.max_delivery_attempts <= delivery.attempts
        if is_last and self._policy.forward_dead_letter(delivery):
            self._remove(delivery)
            return
        backoff_s = settings.backoff_s(delivery.attempts)
        if backoff_s == 0:
            self._make_ready(delivery)
            return
        delivery.state = State.BACKOFF
        delivery.timer = self._timers.at(
            self._timers.now_s() + backoff_s, partial(self._make_ready, delivery)
        )

    def _hold(self, delivery: Delivery) -> None:
        self._end_lease(delivery)
        self._ready.pop(delivery.number, None)
        delivery.state = State.HELD

    def _end_lease(self, delivery: Delivery) -> None:
        delivery.stop_timer()
        self.consumers.gave_back(delivery, len(self._ready))

    def _settle(self, delivery: Delivery) -> None:
        if delivery.state is not State.SETTLED:
            self._remove(delivery)
            self._policy.acked(delivery.message)

    def _remove(self, delivery: Delivery) -> None:
        self._ready.pop(delivery.number, None)
        self._end_lease(delivery)
        delivery.state = State.SETTLED
        del self._deliveries[delivery.number]
        self._journal.release(delivery.message, self._holder)
        if self._is_ordered(delivery.message):
            following = self._lines.remove(delivery)
            if following is not None:
                self._make_ready(following)


def _by_sequence(deliveries: OrderedDict[int, Delivery]) -> OrderedDict[int, Delivery]:
    return OrderedDict(sorted(deliveries.items(), key=lambda entry: entry[1].message.sequence))
