"""A subscription: settings, backlog, and how messages leave it (ack, expiration, dead letter).

Plain synchronous code with an injected clock. Every change happens within one call and is recorded
in the journal.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from pubsub_emulator.errors import FailedPrecondition, PubsubError
from pubsub_emulator.protos import BigQueryConfig
from pubsub_emulator.protos import Subscription as SubscriptionProto
from pubsub_emulator.state.arrivals import Arrivals
from pubsub_emulator.state.backlog import Backlog
from pubsub_emulator.state.consumers import Consumer, Delivery
from pubsub_emulator.state.delivery_settings import DeliverySettings, Kind
from pubsub_emulator.state.filter import parse_filter
from pubsub_emulator.state.journal import ACKED, ChangeJournal
from pubsub_emulator.state.message import StoredMessage
from pubsub_emulator.state.timers import Timer, Timers
from pubsub_emulator.state.topic import Topic


class Surroundings(Protocol):
    """Operations a subscription needs from the broker."""

    timers: Timers
    journal: ChangeJournal

    def next_sequence(self) -> int:
        """Return a number that is higher than all previous ones."""

    def forward_dead_letter(self, subscription: "SubscriptionState", delivery: Delivery) -> bool:
        """Publish to the dead-letter topic. Return False if the topic no longer exists."""

    def remove_subscription(self, subscription: "SubscriptionState") -> None:
        """Delete the subscription."""


class SubscriptionState:
    """A subscription's state.

    GetSubscription returns `proto`; `holder` is the subscription's number in the journal.
    """

    def __init__(
        self, proto: SubscriptionProto, topic: Topic | None, surroundings: Surroundings, holder: int
    ) -> None:
        self.path: str = proto.name
        self.filter = parse_filter(proto.filter)
        self.topic = topic
        self.holder = holder
        self.backlog = Backlog(self, surroundings.timers, surroundings.journal, holder)
        self._surroundings = surroundings
        self._timers = surroundings.timers
        self._journal = surroundings.journal
        self._acked: deque[StoredMessage] = deque()
        self._last_active_s = self._timers.now_s()
        self._retention_timer: Timer | None = None
        self._expiration_timer: Timer | None = None
        self.configure(proto)

    def configure(self, proto: SubscriptionProto) -> None:
        """Apply new settings. Current leases keep their deadlines."""
        self.proto = proto
        self.settings = DeliverySettings.of(proto)
        if not self.settings.retain_acked:
            self._forget_acked()
        if self.settings.kind != "PULL":
            # Delivery loops don't count as connected consumers, but streams and pulls do.
            self.backlog.consumers.end(not_pullable(self.path, self.settings.kind))
        self._arm_retention()
        self._arm_expiration()

    def show_bigquery_state(self, state: str) -> None:
        """Set whether messages can be written, using the name of a `BigQueryConfig.State`."""
        self.proto.bigquery_config.state = BigQueryConfig.State.Value(state)
        self.proto.state = SubscriptionProto.State.Value(
            "ACTIVE" if state == "ACTIVE" else "RESOURCE_ERROR"
        )

    def follow_topic(self, topic: Topic | None) -> None:
        """Apply a change to the topic's retention. None: the topic was deleted."""
        self.topic = topic
        self._arm_retention()

    @property
    def retention_s(self) -> float:
        """The longer of the subscription's and the topic's retention, in seconds."""
        return max(self.settings.retention_s, self.topic.retention_s if self.topic else 0.0)

    @property
    def moment_s(self) -> float:
        """When the subscription was last used, in seconds since the epoch.

        A connected consumer counts as continuous use.
        """
        return self._timers.now_s() if len(self.backlog.consumers) else self._last_active_s

    def touch(self) -> None:
        """Record a use of the subscription. This postpones its expiration."""
        self._last_active_s = self._timers.now_s()

    def join(self, consumer: Consumer) -> None:
        """Connect a consumer. While a consumer is connected, the subscription does not expire."""
        self.touch()
        self.backlog.consumers.join(consumer)

    def leave(self, consumer: Consumer) -> None:
        """Disconnect a consumer.

        Its leases last until their messages are acked or nacked, or until they expire.
        """
        self.touch()
        self.backlog.leave(consumer)

    def add(self, message: StoredMessage, arrivals: Arrivals | None = None) -> None:
        """Add a published message that matches the filter."""
        self.backlog.add(message, arrivals)
        if self._retention_timer is None:
            self._arm_retention()

    def acked(self, message: StoredMessage) -> None:
        """Keep an acked message for a later seek, if the subscription retains acked messages."""
        if self.settings.retain_acked:
            self._journal.hold(message, self.holder, attempts=ACKED)
            self._acked.append(message)
            if self._retention_timer is None:
                self._arm_retention()

    def restore(self, message: StoredMessage, number: int, attempts: int) -> None:
        """Restore a message after a restart: acked, or to be delivered again."""
        if attempts == ACKED:
            self._acked.append(message)
        else:
            self.backlog.restore(message, number, attempts)
        if self._retention_timer is None:
            self._arm_retention()

    def restore_last_use(self, last_active_s: float) -> None:
        """After a restart, restore the time from which any expiration is counted."""
        self._last_active_s = last_active_s
        self._arm_expiration()

    def withdraw(self, sequences: Collection[int]) -> None:
        """Roll back messages, including leased and acked ones. Acks for them have no effect."""
        self.backlog.withdraw(sequences)
        for message in [message for message in self._acked if message.sequence in sequences]:
            self._journal.release(message, self.holder)
            self._acked.remove(message)

    def next_number(self) -> int:
        """Return a new number for the delivery of a message that was returned."""
        return self._surroundings.next_sequence()

    def forward_dead_letter(self, delivery: Delivery) -> bool:
        """Publish a message to the dead-letter topic. Returns False if it no longer exists."""
        return self._surroundings.forward_dead_letter(self, delivery)

    def seek(
        self, is_unacked: Callable[[StoredMessage], bool], candidates: Iterable[StoredMessage]
    ) -> None:
        """Ack messages for which `is_unacked` is false, and restore the others.

        Retained acked messages and `candidates` can be restored.

        Messages that are older than the retention period or don't match the filter are not
        restored.
        """
        now_s = self._timers.now_s()
        self.backlog.keep_only(is_unacked)
        present = {message.sequence for message in self.backlog.messages}
        wanted = {
            message.sequence: message
            for message in (*self._acked, *candidates)
            if message.sequence not in present
            and is_unacked(message)
            and message.published_s + self.retention_s > now_s
            and (self.filter is None or self.filter.matches(message.attributes))
        }
        self._acked = deque(message for message in self._acked if message.sequence not in wanted)
        self.backlog.bring_back(wanted[sequence] for sequence in sorted(wanted))
        self._arm_retention()

    def close(self, reason: PubsubError) -> None:
        """Drop everything and notify all consumers after a deletion or detachment."""
        self.backlog.clear()
        self._forget_acked()
        for timer in (self._retention_timer, self._expiration_timer):
            if timer is not None:
                timer.cancel()
        self._retention_timer = self._expiration_timer = None
        self.backlog.consumers.end(reason)

    def _forget_acked(self) -> None:
        for message in self._acked:
            self._journal.release(message, self.holder)
        self._acked.clear()

    def _arm_retention(self) -> None:
        if self._retention_timer is not None:
            self._retention_timer.cancel()
            self._retention_timer = None
        first_acked = self._acked[0] if self._acked else None
        oldest = [message for message in (self.backlog.oldest, first_acked) if message is not None]
        if oldest:
            due_s = min(message.published_s for message in oldest) + self.retention_s
            self._retention_timer = self._timers.at(due_s, self._drop_old)

    def _drop_old(self) -> None:
        self._retention_timer = None
        now_s, retention_s = self._timers.now_s(), self.retention_s
        while self._acked and self._acked[0].published_s + retention_s <= now_s:
            self._journal.release(self._acked.popleft(), self.holder)
        while (
            oldest := self.backlog.oldest
        ) is not None and oldest.published_s + retention_s <= now_s:
            self.backlog.drop_oldest()
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
        if len(self.backlog.consumers):
            self.touch()
        ttl_s = self.settings.ttl_s
        if ttl_s is not None and self._last_active_s + ttl_s <= self._timers.now_s():
            self._surroundings.remove_subscription(self)
        else:
            self._arm_expiration()


def not_pullable(path: str, kind: Kind) -> FailedPrecondition:
    """Return the error for pulling from a subscription whose messages this server delivers."""
    return FailedPrecondition(
        f"This method is not supported for this subscription type (resource={path}, type={kind})."
    )
