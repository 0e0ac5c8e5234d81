"""An in-memory broker for tests: implements shared/broker/transport.py without a server.

    broker = InMemoryBroker()
    await broker.ensure_topic("jobs.m")
    await broker.ensure_subscription("jobs.m.workers", SubscriptionSettings("jobs.m"))
    async with broker.subscribe("jobs.m.workers", max_messages=10) as subscription: ...

It provides the Pub/Sub and RabbitMQ guarantees that Penstock relies on, and the same tests check
all three brokers (tests/shared/test_brokers.py):

- A message is delivered at least once to each subscription to its topic, until it is acked. It is
  redelivered after a nack, when its subscriber closes, and after `expire_leases`.
- Messages arrive in the order in which they were published. In an ordered subscription, unacked
  messages with the same ordering key are held by one subscriber at a time. If one is redelivered,
  so are later messages with the same key.
- A subscriber holds at most `max_messages` messages, and receives no more once they exceed
  `max_bytes`. Subscribers take turns.
- A message returned `max_delivery_attempts` times becomes a dead letter.
- It rejects everything that Pub/Sub or RabbitMQ rejects: a missing topic, an empty or oversized
  message, and out-of-range attributes, names, settings, and filters.

It has no clock. Leases therefore never expire on their own, a returned message is redelivered
immediately, and neither messages nor subscriptions expire. It does not support push. The backlog is
unbounded.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

from shared.broker.transport import (
    AttributeFilter,
    ReceivedMessage,
    SmoothedDuration,
    SubscriptionSettings,
    parse_filter,
)
from shared.errors import (
    BadInput,
    ConfigurationError,
    InputTooLarge,
    PenstockError,
    Unavailable,
)

MAX_MESSAGE_BYTES = 10_000_000
MAX_ATTRIBUTES, MAX_NAME_BYTES, MAX_VALUE_BYTES = 100, 128, 1024
"""Pub/Sub's limits, except for names, where RabbitMQ's limit is lower."""
MAX_ORDERING_KEY_BYTES = 1024
ACK_DEADLINE_S, RETENTION_S, DELIVERY_ATTEMPTS = (10, 600), (600, 2_678_400), (5, 100)
"""Minimum and maximum values of subscription settings:
https://cloud.google.com/pubsub/docs/reference/rpc/google.pubsub.v1#subscription
"""
MIN_EXPIRES_AFTER_S = 86_400
_RESERVED = re.compile(r"goog(?!client_)|x-|CC|BCC")
"""Prefixes of attribute names reserved by Pub/Sub or RabbitMQ."""
_ID = re.compile(r"(?!goog)[A-Za-z][A-Za-z0-9._~+%-]{2,254}")
"""https://cloud.google.com/pubsub/docs/pubsub-basics#resource_names"""


@dataclass(eq=False)
class _Delivery:
    """A message in one subscription. `number` is the message's position in publication order."""

    number: int
    data: bytes
    attributes: dict[str, str]
    message_id: str
    ordering_key: str
    published_at_s: float
    attempts: int = 0


@dataclass(eq=False)
class _Queue:
    """One subscription: its backlog, oldest first, and its pullers, in round-robin order."""

    settings: SubscriptionSettings
    passes: AttributeFilter | None = None
    waiting: deque[_Delivery] = field(default_factory=deque)
    pullers: deque[InMemorySubscription] = field(default_factory=deque)
    holders: dict[str, InMemorySubscription] = field(default_factory=dict)
    """The subscriber that holds an ordering key's unacked messages."""

    def takes(self, attributes: Mapping[str, str]) -> bool:
        return self.passes is None or self.passes.matches(attributes)

    def deliver(self) -> None:
        """Delivers waiting messages, in turn, to pullers that have room."""
        idle = 0
        while self.waiting and idle < len(self.pullers):
            puller = self.pullers[0]
            self.pullers.rotate(-1)
            delivery = self._next_for(puller) if puller.has_room else None
            if delivery is None:
                idle += 1
                continue
            idle = 0
            self.waiting.remove(delivery)
            if key := self.key_of(delivery):
                self.holders[key] = puller
            puller.take(delivery)

    def put_back(self, delivery: _Delivery) -> None:
        """Puts a delivery back into the backlog, ahead of messages published later."""
        later = (
            index for index, waiting in enumerate(self.waiting) if waiting.number > delivery.number
        )
        self.waiting.insert(next(later, len(self.waiting)), delivery)

    def key_of(self, delivery: _Delivery) -> str:
        """Returns the ordering key if the subscription is ordered; otherwise, an empty string."""
        return delivery.ordering_key if self.settings.is_ordered else ""

    def _next_for(self, puller: InMemorySubscription) -> _Delivery | None:
        return next(
            (
                delivery
                for delivery in self.waiting
                if self.holders.get(self.key_of(delivery), puller) is puller
            ),
            None,
        )


@dataclass(eq=False)
class _Held:
    message: ReceivedMessage
    delivery: _Delivery


class InMemorySubscription:
    """An open subscription, created by InMemoryBroker.subscribe.

    See shared.broker.transport.Subscription.
    """

    def __init__(
        self, broker: InMemoryBroker, queue: _Queue, max_messages: int, max_bytes: int
    ) -> None:
        self._broker = broker
        self._queue = queue
        self._max_messages = self._least_messages = max_messages
        self._max_bytes = max_bytes
        self._received: deque[ReceivedMessage] = deque()
        self._held: dict[str, _Held] = {}
        self._arrival = asyncio.Event()
        self._end: PenstockError | None = None
        self._is_stopped = False
        self.lost = 0
        """Messages whose lease was lost while they were held."""
        self.round_trip = SmoothedDuration()
        """Always 0 in memory."""

    def hold(self, max_messages: int) -> None:
        """See shared.broker.transport.Subscription. Takes effect at once."""
        self._max_messages = max(self._least_messages, max_messages)
        self._queue.deliver()

    @property
    def is_connected(self) -> bool:
        """True if newly published messages arrive here."""
        return self._end is None and not self._is_stopped

    @property
    def has_room(self) -> bool:
        """True if another message may be held."""
        held_bytes = sum(len(held.delivery.data) for held in self._held.values())
        return len(self._held) < self._max_messages and not 0 < self._max_bytes <= held_bytes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedMessage:
        while True:
            while self._received:
                message = self._received.popleft()
                if not message.lost:  # it has been redelivered
                    return message
            if self._end is not None:
                raise self._end
            if self._is_stopped:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()

    def ack(self, message: ReceivedMessage) -> None:
        """See shared.broker.transport.Subscription.

        A second ack, or an ack for a lost message, is ignored.
        """
        held = self._held.pop(message.ack_id, None)
        if held is not None:
            self._free(self._queue.key_of(held.delivery))
            self._queue.deliver()

    def nack(self, message: ReceivedMessage) -> None:
        if message.ack_id in self._held:
            self._hand_back([self._held.pop(message.ack_id)])

    async def stop(self) -> None:
        """Stops receiving: returns unprocessed messages to the queue and ends the iteration.

        Acks still work.
        """
        self._is_stopped = True
        if self in self._queue.pullers:
            self._queue.pullers.remove(self)
        while self._received:
            self.nack(self._received.pop())
        self._arrival.set()

    async def close(self) -> None:
        """Stops, and returns all held messages."""
        await self.stop()
        held, self._held = list(self._held.values()), {}
        self._hand_back(held)

    def fail(self, error: PenstockError) -> None:
        """Ends the iteration with `error`, just as a broker does when a subscription is deleted."""
        self._end = error
        self._arrival.set()

    def take(self, delivery: _Delivery) -> None:
        """Receives a message, which is held until ack or nack."""
        delivery.attempts += 1
        counts = bool(self._queue.settings.dead_letter_topic_id)
        message = ReceivedMessage(
            delivery.data,
            dict(delivery.attributes),
            delivery.message_id,
            self._broker.next_id("ack"),
            publish_time_s=delivery.published_at_s,
            delivery_attempt=delivery.attempts if counts else 0,
            ordering_key=delivery.ordering_key,
            received_at_s=asyncio.get_running_loop().time(),
        )
        self._held[message.ack_id] = _Held(message, delivery)
        self._received.append(message)
        self._arrival.set()

    def expire_leases(self) -> None:
        """Loses all held messages.

        They are marked `lost` and redelivered here or to another subscriber.
        """
        held, self._held = list(self._held.values()), {}
        self._lose(held)
        self._hand_back(held)

    def _hand_back(self, returned: list[_Held]) -> None:
        """Returns messages to the queue, including later ones with the same ordering key."""
        behind = [
            held
            for held in self._held.values()
            if any(self._is_behind(held.delivery, other.delivery) for other in returned)
        ]
        for held in behind:
            del self._held[held.message.ack_id]
        self._lose(behind)
        for held in (*returned, *behind):
            self._broker.hand_back(self._queue, held.delivery)
            self._free(self._queue.key_of(held.delivery))
        self._queue.deliver()

    def _is_behind(self, delivery: _Delivery, other: _Delivery) -> bool:
        key = self._queue.key_of(delivery)
        return bool(key) and key == other.ordering_key and delivery.number > other.number

    def _lose(self, held: list[_Held]) -> None:
        for held_delivery in held:
            held_delivery.message.lost = True
        self.lost += len(held)

    def _free(self, key: str) -> None:
        """Releases an ordering key for other subscribers once none of its messages is held here."""
        if key and all(self._queue.key_of(held.delivery) != key for held in self._held.values()):
            self._queue.holders.pop(key, None)


class InMemoryBroker:
    """A complete broker. All communicating parties share one instance, in one event loop.

    Implements Transport and Admin, and acts as the open connection for both. Its guarantees are
    listed in the module docstring.
    """

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, _Queue]] = {}
        self._queues: dict[str, _Queue] = {}
        self._ids = itertools.count(1)
        self.outage: PenstockError | None = None
        """If set, every publish raises this error, as if the broker were unreachable."""
        self.published = 0
        """Number of published messages, including dead letters."""
        self.round_trip = SmoothedDuration()
        """Always 0 in memory."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def publish(
        self,
        topic_id: str,
        data: bytes,
        attributes: Mapping[str, str],
        *,
        ordering_key: str = "",
        timeout_s: float = 10.0,
    ) -> str:
        """Publishes one message and returns its message_id. See shared.broker.transport.Publisher.

        Raises:
            BadInput: the topic does not exist, the message is empty, or an attribute is invalid.
            InputTooLarge: the message is larger than MAX_MESSAGE_BYTES.
            PenstockError: `outage`, if set.
        """
        await asyncio.sleep(0)
        if self.outage is not None:
            raise self.outage
        _check_message(topic_id, data, attributes, ordering_key)
        if topic_id not in self._topics:
            raise BadInput(f"publish to {topic_id}: the topic does not exist")
        return self._enqueue(topic_id, data, attributes, ordering_key)

    @asynccontextmanager
    async def subscribe(
        self,
        subscription_id: str,
        *,
        max_messages: int,
        max_bytes: int = 0,
        ack_deadline_s: int = 20,
        ack_linger_s: float = 0.0,
    ) -> AsyncIterator[InMemorySubscription]:
        """Opens a subscription. See shared.broker.transport.Subscriber.

        Leases never expire and acks never linger, so `ack_deadline_s` is only validated, and
        `ack_linger_s` has no effect. The iteration raises Unavailable if the subscription does not
        exist, and ConfigurationError if the deadline is out of range.
        """
        queue = self._queues.get(subscription_id)
        subscription = InMemorySubscription(
            self, queue or _Queue(SubscriptionSettings("")), max_messages, max_bytes
        )
        if queue is None:
            subscription.fail(Unavailable(f"{subscription_id}: the subscription does not exist"))
        elif not ACK_DEADLINE_S[0] <= ack_deadline_s <= ACK_DEADLINE_S[1]:
            subscription.fail(
                ConfigurationError(f"ack_deadline_s: {ack_deadline_s} is not a valid ack deadline")
            )
        else:
            queue.pullers.append(subscription)
            queue.deliver()
        try:
            yield subscription
        finally:
            await subscription.close()

    async def ensure_topic(self, topic_id: str) -> bool:
        """Creates a topic if it doesn't exist. Returns whether it was created.

        Raises:
            BadInput: Pub/Sub does not accept the name.
        """
        _check_id(topic_id)
        is_new = topic_id not in self._topics
        self._topics.setdefault(topic_id, {})
        return is_new

    async def ensure_subscription(
        self, subscription_id: str, settings: SubscriptionSettings
    ) -> bool:
        """Creates a subscription if it doesn't exist. Returns whether it was created.

        Raises:
            BadInput: the name, a setting, or the filter is invalid, or the topic does not exist.
            ConfigurationError: a subscription with this name has a different topic or filter, which
                can't be changed.
        """
        _check_id(subscription_id)
        passes = _check_filter(settings)
        for topic_id in filter(None, (settings.topic_id, settings.dead_letter_topic_id)):
            if topic_id not in self._topics:
                raise BadInput(f"create {subscription_id}: topic {topic_id} does not exist")
        if topic_queue := self._queues.get(subscription_id):
            existing, wanted = topic_queue.settings, settings
            if (existing.topic_id, existing.filter) != (wanted.topic_id, wanted.filter):
                raise ConfigurationError(
                    f"{subscription_id} already exists with topic {existing.topic_id!r} and filter "
                    f"{existing.filter!r}, not {wanted.topic_id!r} and {wanted.filter!r}"
                )
            return False
        queue = _Queue(settings, passes)
        self._queues[subscription_id] = self._topics[settings.topic_id][subscription_id] = queue
        return True

    async def delete_topic(self, topic_id: str) -> bool:
        """Deletes a topic. Returns whether it existed. Its subscriptions remain."""
        return self._topics.pop(topic_id, None) is not None

    async def delete_subscription(self, subscription_id: str) -> bool:
        """Deletes a subscription and its backlog. Returns whether it existed."""
        queue = self._queues.pop(subscription_id, None)
        if queue is None:
            return False
        self._topics.get(queue.settings.topic_id, {}).pop(subscription_id, None)
        for puller in queue.pullers:
            puller.fail(Unavailable(f"{subscription_id}: the subscription does not exist"))
        return True

    async def subscription_exists(self, subscription_id: str) -> bool:
        return subscription_id in self._queues

    async def missing_subscriptions(self, subscription_ids: list[str]) -> list[str]:
        """Returns the `subscription_ids` that do not exist, in order."""
        return [name for name in subscription_ids if name not in self._queues]

    def backlog(self, subscription_id: str) -> int:
        """Returns the number of messages in a subscription that are not held by any subscriber.

        Raises:
            KeyError: the subscription does not exist.
        """
        return len(self._queues[subscription_id].waiting)

    def expire_leases(self, subscription_id: str) -> None:
        """Expires the leases of all held messages, as if their holders had stalled.

        Raises:
            KeyError: the subscription does not exist.
        """
        for puller in list(self._queues[subscription_id].pullers):
            puller.expire_leases()

    def next_id(self, kind: str) -> str:
        """Returns an ID not used by any message or delivery."""
        return f"{kind}-{next(self._ids)}"

    def hand_back(self, queue: _Queue, delivery: _Delivery) -> None:
        """Requeues a message, or moves it to the dead letters after too many deliveries."""
        settings = queue.settings
        is_dead = delivery.attempts >= settings.max_delivery_attempts
        if is_dead and settings.dead_letter_topic_id in self._topics:
            self._enqueue(
                settings.dead_letter_topic_id,
                delivery.data,
                delivery.attributes,
                delivery.ordering_key,
            )
            return
        queue.put_back(delivery)

    def _enqueue(
        self, topic_id: str, data: bytes, attributes: Mapping[str, str], ordering_key: str
    ) -> str:
        message_id = self.next_id("message")
        self.published += 1
        for queue in self._topics[topic_id].values():
            if queue.takes(attributes):
                delivery = _Delivery(
                    next(self._ids), data, dict(attributes), message_id, ordering_key, time.time()
                )
                queue.waiting.append(delivery)
                queue.deliver()
        return message_id


def _check_message(
    topic_id: str, data: bytes, attributes: Mapping[str, str], ordering_key: str
) -> None:
    """Rejects messages that Pub/Sub or RabbitMQ would reject."""
    where = f"publish to {topic_id}"
    if not data and not attributes:
        raise BadInput(f"{where}: the message must not be empty")
    size_bytes = len(data) + sum(len(name) + len(value) for name, value in attributes.items())
    if size_bytes > MAX_MESSAGE_BYTES:
        raise InputTooLarge(
            f"{where}: the message is {size_bytes} bytes, which exceeds the broker's maximum "
            f"of {MAX_MESSAGE_BYTES}"
        )
    if len(ordering_key.encode()) > MAX_ORDERING_KEY_BYTES:
        raise BadInput(f"{where}: the ordering key must be at most {MAX_ORDERING_KEY_BYTES} bytes")
    if len(attributes) > MAX_ATTRIBUTES:
        raise BadInput(
            f"{where}: a message must have at most {MAX_ATTRIBUTES} attributes, got "
            f"{len(attributes)}"
        )
    for name, value in attributes.items():
        if not name or _RESERVED.match(name) or len(name.encode()) > MAX_NAME_BYTES:
            raise BadInput(f"{where}: {name[:64]!r} is not a valid attribute name")
        if len(value.encode()) > MAX_VALUE_BYTES:
            raise BadInput(
                f"{where}: attribute {name[:64]!r} must be at most {MAX_VALUE_BYTES} bytes"
            )


def _check_id(name: str) -> None:
    if not _ID.fullmatch(name):
        raise BadInput(
            f"{name[:64]!r} is not a valid topic or subscription name: it must be 3 to 255 "
            "characters (letters, digits and -_.~+%), start with a letter, and not start "
            "with goog"
        )


def _check_filter(settings: SubscriptionSettings) -> AttributeFilter | None:
    """Checks settings and returns the filter."""
    if settings.push_endpoint:
        raise BadInput(
            "the in-memory broker does not support push subscriptions", field="push_endpoint"
        )
    bounded = [
        ("ack_deadline_s", settings.ack_deadline_s, ACK_DEADLINE_S),
        ("retention_s", settings.retention_s, RETENTION_S),
    ]
    if settings.dead_letter_topic_id:
        bounded.append(("max_delivery_attempts", settings.max_delivery_attempts, DELIVERY_ATTEMPTS))
    for name, value, (least, maximum) in bounded:
        if not least <= value <= maximum:
            raise BadInput(f"{name}: must be from {least} to {maximum}, got {value}", field=name)
    if 0 < settings.expires_after_s < MIN_EXPIRES_AFTER_S:
        raise BadInput(
            f"expires_after_s: must be 0 or at least {MIN_EXPIRES_AFTER_S}", field="expires_after_s"
        )
    return parse_filter(settings.filter)
