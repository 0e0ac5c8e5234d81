"""One subscription's backlog: what waits, what is leased to whom, and what comes back.

Between topics, which add messages, and consumers (streams, pulls, push), which take them. Plain synchronous
code on an injected clock; every change happens inside one call, so a log could record the calls.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from infra.local.pubsub.consumers import Consumer, Consumers
from infra.local.pubsub.delivery import Delivery, State
from infra.local.pubsub.errors import INVALID_ACK_ID, InvalidArgument, PubsubError
from infra.local.pubsub.filter import parse_filter
from infra.local.pubsub.message import StoredMessage
from infra.local.pubsub.ordering import OrderingLines
from infra.local.pubsub.protos import Subscription as SubscriptionProto
from infra.local.pubsub.subscription_settings import SubscriptionSettings
from infra.local.pubsub.timers import Timer, Timers
from infra.local.pubsub.topic import Topic

MAX_TAKE = 1000
# One response stays well under what clients accept by default (4 MiB), unless one message alone is bigger.
MAX_TAKE_BYTES = 2 * 1024 * 1024


class Surroundings(Protocol):
    """What a subscription asks of the broker around it."""

    timers: Timers

    def forward_dead_letter(self, subscription: "Subscription", delivery: Delivery) -> bool:
        """Publish to the dead-letter topic; False when that topic is gone."""

    def expire_subscription(self, subscription: "Subscription") -> None:
        """Delete a subscription that nobody used for its time to live."""


class Subscription:
    """The state of one subscription; `proto` is what GetSubscription shows."""

    def __init__(self, proto: SubscriptionProto, topic: Topic, surroundings: Surroundings, ack_id_prefix: str) -> None:
        self.path: str = proto.name
        self.filter = parse_filter(proto.filter)
        self.topic: Topic | None = topic
        self.consumers = Consumers()
        self._surroundings = surroundings
        self._timers = surroundings.timers
        self._ack_id_prefix = ack_id_prefix
        self._deliveries: OrderedDict[int, Delivery] = OrderedDict()
        self._ready: OrderedDict[int, Delivery] = OrderedDict()
        self._lines = OrderingLines()
        self._acked: deque[StoredMessage] = deque()
        self._next_number = 1
        self._last_active_s = self._timers.now_s()
        self._retention_timer: Timer | None = None
        self._expiration_timer: Timer | None = None
        self.configure(proto)

    def configure(self, proto: SubscriptionProto) -> None:
        """Take over new settings; running leases keep their deadlines."""
        self.proto = proto
        self.settings = SubscriptionSettings.of(proto)
        if not self.settings.retain_acked:
            self._acked.clear()
        self._arm_retention()
        self._arm_expiration()

    @property
    def backlog(self) -> list[StoredMessage]:
        """The unacked messages, oldest first."""
        return [delivery.message for delivery in self._deliveries.values()]

    @property
    def retained(self) -> list[StoredMessage]:
        """The acked messages that a seek can still bring back, in order of their acks."""
        return list(self._acked)

    @property
    def retention_s(self) -> float:
        """How long after publishing a message stays, in seconds: the longer of this and the topic's retention."""
        return max(self.settings.retention_s, self.topic.retention_s if self.topic else 0.0)

    def join(self, consumer: Consumer) -> None:
        """Connect a consumer; while one is connected the subscription does not expire."""
        self.touch()
        self.consumers.join(consumer)

    def leave(self, consumer: Consumer) -> None:
        """Disconnect a consumer; its leases stay until they are acked, nacked or run out."""
        self.touch()
        self.consumers.leave(consumer, len(self._ready))

    def touch(self) -> None:
        """Note that somebody uses the subscription, which puts its expiration off."""
        self._last_active_s = self._timers.now_s()

    def add(self, message: StoredMessage) -> None:
        """Take in a published message that matches the filter, and wake a consumer for it."""
        delivery = Delivery(self._next_number, message)
        self._next_number += 1
        self._deliveries[delivery.number] = delivery
        if self._retention_timer is None:
            self._arm_retention()
        if self._is_ordered(message):
            pushed_back = self._lines.add(delivery)
            if pushed_back is not None:
                self._hold(pushed_back)
            if not self._lines.is_head(delivery):
                delivery.state = State.HELD
                return
        self._make_ready(delivery)

    def take(self, consumer: Consumer, max_messages: int = MAX_TAKE) -> list[Delivery]:
        """Lease ready messages to a consumer, as many as its room and its share allow.

        Returns:
            At most `max_messages`, oldest first; empty if nothing can be taken: then the consumer is woken when
            that changes.
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
            delivery.state = State.LEASED
            delivery.attempts += 1
            delivery.timer = self._timers.at(due_s, partial(self._lease_ran_out, delivery))
            self.consumers.took(consumer, delivery)
            taken.append(delivery)
        if not taken:
            self.consumers.wait(consumer)
        self.consumers.offer(len(self._ready))
        return taken

    def fill(self, received: Any, delivery: Delivery) -> None:
        """Write a delivery into a `ReceivedMessage`."""
        received.ack_id = f"{self._ack_id_prefix}.{delivery.number}.{delivery.attempts}"
        received.message.CopyFrom(delivery.message.proto)
        if self.settings.max_delivery_attempts:
            received.delivery_attempt = delivery.attempts

    def acknowledge(self, ack_ids: Iterable[str]) -> dict[str, str]:
        """Settle the messages of these ack ids.

        Returns:
            The refused ack ids with their reasons. Without exactly-once delivery there are none: an expired id
            acks the message if it is still there, and is ignored otherwise.

        Raises:
            InvalidArgument: an ack id that no server would have made; nothing was acked.
        """
        refused: dict[str, str] = {}
        for ack_id, delivery, is_current in self._find_all(ack_ids):
            if self.settings.exactly_once and not is_current:
                refused[ack_id] = INVALID_ACK_ID
            elif delivery is not None:
                self._settle(delivery, keep=True)
        return refused

    def modify_ack_deadline(self, ack_ids: Iterable[str], deadlines_s: Iterable[int]) -> dict[str, str]:
        """Move the end of leases to so many seconds from now; 0 gives the message back at once (a nack).

        Returns:
            The refused ack ids with their reasons; none without exactly-once delivery.

        Raises:
            InvalidArgument: an ack id that no server would have made; nothing was changed.
        """
        refused: dict[str, str] = {}
        now_s = self._timers.now_s()
        found = self._find_all(ack_ids)
        for (ack_id, delivery, is_current), deadline_s in zip(found, deadlines_s, strict=True):
            if delivery is None or not is_current:
                if self.settings.exactly_once:
                    refused[ack_id] = INVALID_ACK_ID
            elif deadline_s == 0:
                self.give_back(delivery)
            elif delivery.state is State.LEASED:
                delivery.stop_timer()
                delivery.timer = self._timers.at(now_s + deadline_s, partial(self._lease_ran_out, delivery))
        return refused

    def settle(self, delivery: Delivery) -> None:
        """Ack a delivery that is leased, for a consumer inside the server."""
        self._settle(delivery, keep=True)

    def give_back(self, delivery: Delivery) -> None:
        """End a lease without an ack: to the dead-letter topic, into backoff, or ready at once."""
        if delivery.state is not State.LEASED:
            return
        self._end_lease(delivery)
        most = self.settings.max_delivery_attempts
        if most and delivery.attempts >= most and self._surroundings.forward_dead_letter(self, delivery):
            self._settle(delivery, keep=False)
            return
        backoff_s = self.settings.backoff_s(delivery.attempts)
        if backoff_s == 0:
            self._make_ready(delivery)
            return
        delivery.state = State.BACKOFF
        delivery.timer = self._timers.at(self._timers.now_s() + backoff_s, partial(self._make_ready, delivery))

    def reset(self, is_unacked: Callable[[StoredMessage], bool], candidates: Iterable[StoredMessage]) -> None:
        """Seek: ack what `is_unacked` denies and bring back what it affirms, from the retained and `candidates`.

        Messages past the retention stay gone. What is leased and stays unacked keeps its lease, unless an older
        message of its ordering key came back.
        """
        now_s = self._timers.now_s()
        for delivery in list(self._deliveries.values()):
            if not is_unacked(delivery.message):
                self._settle(delivery, keep=True)
        present = {delivery.message.sequence for delivery in self._deliveries.values()}
        wanted = {
            message.sequence: message
            for message in (*self._acked, *candidates)
            if message.sequence not in present
            and is_unacked(message)
            and message.published_s + self.retention_s > now_s
            and (self.filter is None or self.filter.matches(message.attributes))
        }
        self._acked = deque(message for message in self._acked if message.sequence not in wanted)
        for sequence in sorted(wanted):
            self.add(wanted[sequence])
        self._deliveries = _by_sequence(self._deliveries)
        self._ready = _by_sequence(self._ready)

    def close(self, reason: PubsubError) -> None:
        """Drop everything and end all consumers; the subscription was deleted or detached."""
        for delivery in self._deliveries.values():
            delivery.stop_timer()
            delivery.state = State.SETTLED
        self._deliveries.clear()
        self._ready.clear()
        self._lines.clear()
        self._acked.clear()
        for timer in (self._retention_timer, self._expiration_timer):
            if timer is not None:
                timer.cancel()
        self._retention_timer = self._expiration_timer = None
        self.consumers.end(reason)

    def _is_ordered(self, message: StoredMessage) -> bool:
        return self.settings.is_ordered and bool(message.ordering_key)

    def _find_all(self, ack_ids: Iterable[str]) -> list[tuple[str, Delivery | None, bool]]:
        return [(ack_id, *self._find(ack_id)) for ack_id in ack_ids]

    def _find(self, ack_id: str) -> tuple[Delivery | None, bool]:
        try:
            prefix, number, attempt = ack_id.split(".")
            wanted, attempts = int(number), int(attempt)
        except ValueError:
            if self.settings.exactly_once:
                return None, False
            raise InvalidArgument(f"You have passed an invalid ack ID to the service (ack_id={ack_id}).") from None
        delivery = self._deliveries.get(wanted) if prefix == self._ack_id_prefix else None
        if delivery is None or attempts > delivery.attempts:
            return None, False
        return delivery, delivery.state is State.LEASED and delivery.attempts == attempts

    def _make_ready(self, delivery: Delivery) -> None:
        delivery.timer = None
        delivery.state = State.READY
        self._ready[delivery.number] = delivery
        self.consumers.offer(len(self._ready))

    def _lease_ran_out(self, delivery: Delivery) -> None:
        self.give_back(delivery)

    def _end_lease(self, delivery: Delivery) -> None:
        delivery.stop_timer()
        self.consumers.gave_back(delivery, len(self._ready))

    def _hold(self, delivery: Delivery) -> None:
        if delivery.state is State.LEASED:
            self._end_lease(delivery)
        delivery.stop_timer()
        self._ready.pop(delivery.number, None)
        delivery.state = State.HELD

    def _settle(self, delivery: Delivery, *, keep: bool) -> None:
        if delivery.state is State.SETTLED:
            return
        if delivery.state is State.READY:
            self._ready.pop(delivery.number, None)
        self._end_lease(delivery)
        delivery.state = State.SETTLED
        del self._deliveries[delivery.number]
        if keep and self.settings.retain_acked:
            self._acked.append(delivery.message)
            self._arm_retention()
        if self._is_ordered(delivery.message):
            following = self._lines.remove(delivery)
            if following is not None:
                self._make_ready(following)

    def _arm_retention(self) -> None:
        if self._retention_timer is not None:
            self._retention_timer.cancel()
            self._retention_timer = None
        oldest = [message.published_s for message in list(self._acked)[:1]]
        if self._deliveries:
            oldest.append(next(iter(self._deliveries.values())).message.published_s)
        if oldest:
            self._retention_timer = self._timers.at(min(oldest) + self.retention_s, self._drop_old)

    def _drop_old(self) -> None:
        self._retention_timer = None
        now_s, retention_s = self._timers.now_s(), self.retention_s
        while self._acked and self._acked[0].published_s + retention_s <= now_s:
            self._acked.popleft()
        while self._deliveries:
            oldest = next(iter(self._deliveries.values()))
            if oldest.message.published_s + retention_s > now_s:
                break
            self._settle(oldest, keep=False)
        self._arm_retention()

    def _arm_expiration(self) -> None:
        if self._expiration_timer is not None:
            self._expiration_timer.cancel()
            self._expiration_timer = None
        if self.settings.ttl_s is not None:
            due_s = self._last_active_s + self.settings.ttl_s
            self._expiration_timer = self._timers.at(due_s, self._check_expiration)

    def _check_expiration(self) -> None:
        self._expiration_timer = None
        if len(self.consumers):
            self.touch()
        if self.settings.ttl_s is not None and self._last_active_s + self.settings.ttl_s <= self._timers.now_s():
            self._surroundings.expire_subscription(self)
        else:
            self._arm_expiration()


def _by_sequence(deliveries: OrderedDict[int, Delivery]) -> OrderedDict[int, Delivery]:
    return OrderedDict(sorted(deliveries.items(), key=lambda entry: entry[1].message.sequence))
