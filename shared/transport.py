"""The seam to the broker: shared/pubsub/client.py is the real one, tests/fakes.py one in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True, eq=False)
class Message:
    """A received message. `delivery_attempt` is 0 where the subscription has no dead-letter policy."""

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
    """Its lease ran out while in hand: it will be delivered again, here or elsewhere."""


class Publisher(Protocol):
    """Sends messages."""

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
    """An open subscription: an endless stream of messages whose leases are kept until ack or nack."""

    @property
    def is_connected(self) -> bool:
        """Whether the stream stood when last heard of."""

    @property
    def lost(self) -> int:
        """How many messages lost their lease while in hand."""

    def __aiter__(self) -> AsyncIterator[Message]:
        """The messages, as they come; reconnects by itself and ends only when stopped.

        Raises:
            Unavailable: the subscription is gone.
            ConfigurationError: the broker refuses us or the request.
        """

    def ack(self, message: Message) -> None:
        """Done with `message`: it is not delivered again. Sent in the background, with others."""

    def nack(self, message: Message) -> None:
        """Hands `message` back: it is delivered again, here or elsewhere."""

    async def stop(self) -> None:
        """Receives no more: the iteration ends, what nobody took yet is handed back; leases and acks go on."""


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
        """Opens a subscription with at most `max_messages` unacked messages (and bytes, 0: no bound) in hand.

        Leaving the block hands back what is in hand still and sends the last acks. With `ack_linger_s` above zero
        acks may wait that long for company: for subscriptions where nobody gains by a fast ack.
        """


class Transport(Publisher, Subscriber, Protocol):
    """A connection to the broker that does both."""


@dataclass(frozen=True, slots=True)
class SubscriptionSettings:
    """How a subscription behaves; durations in seconds."""

    topic_id: str
    filter: str = ""
    """Over attributes; can't be changed later."""
    ack_deadline_s: int = 10
    retention_s: int = 600
    """How long a message that nobody acks is kept; the shortest the service has is 10 minutes."""
    expires_after_s: int = 0
    """Removed after so long without use (a day at least); 0: never."""
    retry_min_s: float | None = None
    """Shortest pause before a redelivery; None: at once. The service's own default is 10 s, so it is always said."""
    retry_max_s: float = 60.0
    dead_letter_topic_id: str = ""
    """Where a message goes after `max_delivery_attempts`; empty: it is delivered for ever."""
    max_delivery_attempts: int = 5
    is_ordered: bool = False
    push_endpoint: str = ""
    """The URL that the broker posts messages to; empty: they are pulled."""


class Admin(Protocol):
    """Makes and removes topics and subscriptions."""

    async def ensure_topic(self, topic_id: str) -> bool:
        """Makes a topic unless it exists; says whether it was made."""

    async def ensure_subscription(self, subscription_id: str, settings: SubscriptionSettings) -> bool:
        """Makes a subscription unless it exists; says whether it was made."""

    async def delete_topic(self, topic_id: str) -> bool:
        """Removes a topic; says whether there was one."""

    async def delete_subscription(self, subscription_id: str) -> bool:
        """Removes a subscription; says whether there was one."""

    async def subscription_exists(self, subscription_id: str) -> bool:
        """Whether there is such a subscription."""
