"""The seam to the broker: shared/pubsub, shared/rabbitmq, shared/in_memory_broker.py for tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class ReceivedMessage:
    """A received message.

    `delivery_attempt` is 0 if the subscription has no dead-letter policy.
    """

    data: bytes
    attributes: Mapping[str, str]
    message_id: str
    ack_id: str
    publish_time_s: float = 0.0
    delivery_attempt: int = 0
    ordering_key: str = ""
    received_at_s: float = 0.0
    """Event loop time, in seconds."""
    lost: bool = False
    """Its lease ran out while it was held: it will be delivered again, here or elsewhere."""


GAIN, DEVIATION_GAIN, DEVIATIONS = 1 / 8, 1 / 4, 4.0
MAX_SAMPLE_S = 5.0
"""What took longer was an outage, which says nothing about the usual time."""


class SmoothedDuration:
    """A duration that is measured again and again, in seconds. 0 until the first measurement.

    Smoothed as TCP does round trips: RFC 6298, section 2
    (https://www.rfc-editor.org/rfc/rfc6298). A mean and a mean deviation, both fading.
    """

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._deviation_s = 0.0

    @property
    def most_s(self) -> float:
        """A time that few measurements exceed."""
        return self.mean_s + DEVIATIONS * self._deviation_s

    def record(self, took_s: float) -> None:
        """Takes one measurement into account."""
        if took_s > MAX_SAMPLE_S:
            return
        if not self.mean_s:
            self.mean_s, self._deviation_s = took_s, took_s / 2
            return
        off_s = abs(self.mean_s - took_s)
        self._deviation_s += DEVIATION_GAIN * (off_s - self._deviation_s)
        self.mean_s += GAIN * (took_s - self.mean_s)


class Publisher(Protocol):
    """Sends messages."""

    @property
    def round_trip(self) -> SmoothedDuration:
        """The time that the broker takes to confirm a message, as measured so far."""

    async def publish(
        self,
        topic_id: str,
        data: bytes,
        attributes: Mapping[str, str],
        *,
        ordering_key: str = "",
        timeout_s: float = 10.0,
    ) -> str:
        """Publishes one message and returns its message_id once the broker has it.

        Raises:
            Unavailable: the broker could not be reached or did not answer within `timeout_s`.
            BadInput: the broker refused the message (too large, no such topic …).
            Overloaded: too much waits to be published already, or the broker's quota is used up.
            ConfigurationError: the broker refused us (rights, credentials).
        """


class Subscription(Protocol):
    """An open subscription: an endless stream of messages.

    Their leases are kept until ack or nack.
    """

    @property
    def is_connected(self) -> bool:
        """True if the stream was open when last heard of."""

    @property
    def lost(self) -> int:
        """The number of messages that lost their lease while they were held."""

    @property
    def round_trip(self) -> SmoothedDuration:
        """The time that the broker takes to answer, as measured so far."""

    def hold(self, max_messages: int) -> None:
        """Sets how many unacked messages may be held from now on, at least those of `subscribe`.

        It takes effect in steps, and in the background: more at once, fewer as messages are acked.
        The bytes of those beyond the ones of `subscribe` are bounded by `max_bytes` too.
        """

    def __aiter__(self) -> AsyncIterator[ReceivedMessage]:
        """Yields messages as they come. Reconnects by itself, and ends only after `stop`.

        Raises:
            Unavailable: the subscription is gone.
            ConfigurationError: the broker refuses us or the request.
        """

    def ack(self, message: ReceivedMessage) -> None:
        """Done with `message`: it is not delivered again. Sent in the background, with others."""

    def nack(self, message: ReceivedMessage) -> None:
        """Hands `message` back: it is delivered again, here or elsewhere."""

    async def stop(self) -> None:
        """Stops receiving: the iteration ends, and unprocessed messages are returned.

        Leases and acks continue.
        """


class Subscriber(Protocol):
    """Opens subscriptions."""

    def subscribe(
        self,
        subscription_id: str,
        *,
        max_messages: int,
        max_bytes: int = 0,
        ack_deadline_s: int = 20,
        ack_linger_s: float = 0.0,
    ) -> AbstractAsyncContextManager[Subscription]:
        """Opens a subscription that holds at most `max_messages` unacked messages.

        With `max_bytes` above zero their bytes are bounded too. Leaving the block returns the
        messages that are still held, and sends the last acks. With `ack_linger_s` above zero acks
        may wait for this time in order to share a request. That is for subscriptions that gain
        nothing from a fast ack.
        """


class Transport(Publisher, Subscriber, Protocol):
    """A connection to the broker that does both."""


@dataclass(frozen=True, slots=True)
class SubscriptionSettings:
    """The settings of a subscription. Durations are in seconds."""

    topic_id: str
    filter: str = ""
    """Filters by attributes. Can't be changed later."""
    ack_deadline_s: int = 10
    retention_s: int = 600
    """The time that an unacked message is kept. The service's minimum is 10 minutes."""
    expires_after_s: int = 0
    """Deleted after this time without use (at least a day). 0: never."""
    retry_min_s: float | None = None
    """Shortest pause before a redelivery. None: no pause.

    It is always set, because the service's default is 10 s.
    """
    retry_max_s: float = 60.0
    dead_letter_topic_id: str = ""
    """The topic of messages that failed `max_delivery_attempts` times.

    Empty: they are delivered forever.
    """
    max_delivery_attempts: int = 5
    is_ordered: bool = False
    is_reply: bool = False
    """Whether it carries replies: they are worth nothing to anybody but one instance, for a short
    time.
    """
    push_endpoint: str = ""
    """The URL to which the broker posts messages. Empty: they are pulled."""


class Admin(Protocol):
    """Makes and removes topics and subscriptions."""

    async def ensure_topic(self, topic_id: str) -> bool:
        """Creates a topic unless it exists. Returns whether it was created."""

    async def ensure_subscription(
        self, subscription_id: str, settings: SubscriptionSettings
    ) -> bool:
        """Creates a subscription unless it exists. Returns whether it was created."""

    async def delete_topic(self, topic_id: str) -> bool:
        """Deletes a topic. Returns whether it existed."""

    async def delete_subscription(self, subscription_id: str) -> bool:
        """Deletes a subscription. Returns whether it existed."""

    async def subscription_exists(self, subscription_id: str) -> bool:
        """Returns whether the subscription exists."""

    async def missing_subscriptions(self, subscription_ids: list[str]) -> list[str]:
        """Those of `subscription_ids` that do not exist, in their order."""
