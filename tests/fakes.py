"""A broker in memory: implements shared.transport.Transport and Admin; held to the real one by the
contract tests.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pubsub_emulator import Filter, parse_filter
from shared.errors import BadInput, PenstockError, Unavailable
from shared.transport import ReceivedMessage, SmoothedDuration, SubscriptionSettings


@dataclass(eq=False)
class _Stored:
    data: bytes
    attributes: dict[str, str]
    message_id: str
    ordering_key: str
    published_at_s: float
    attempts: int = 0


@dataclass(eq=False)
class _Queue:
    """One subscription: what waits, and who pulls."""

    settings: SubscriptionSettings
    matching: Filter | None
    waiting: deque[_Stored] = field(default_factory=deque)
    pullers: deque[InMemorySubscription] = field(default_factory=deque)

    def takes(self, attributes: Mapping[str, str]) -> bool:
        return self.matching is None or self.matching.matches(attributes)

    def deliver(self) -> None:
        """Hands out what waits to pullers with room, in turn."""
        idle = 0
        while self.waiting and idle < len(self.pullers):
            puller = self.pullers[0]
            self.pullers.rotate(-1)
            idle = 0 if puller.offer(self.waiting) else idle + 1


class InMemorySubscription:
    """An open subscription, as shared.transport.Subscription says; leases never run out."""

    def __init__(
        self, transport: InMemoryTransport, queue: _Queue, max_messages: int, max_bytes: int
    ) -> None:
        self._transport = transport
        self._queue = queue
        self._max_messages = self._least = max_messages
        self._max_bytes = max_bytes
        self._received: deque[ReceivedMessage] = deque()
        self._held: dict[str, _Stored] = {}
        self._arrival = asyncio.Event()
        self._end: PenstockError | None = None
        self._is_stopped = False
        self.lost = 0
        self.round_trip = SmoothedDuration()

    def hold(self, max_messages: int) -> None:
        self._max_messages = max(self._least, max_messages)
        self._queue.deliver()

    @property
    def is_connected(self) -> bool:
        return self._end is None and not self._is_stopped

    def __aiter__(self) -> InMemorySubscription:
        return self

    async def __anext__(self) -> ReceivedMessage:
        while not self._received:
            if self._end is not None:
                raise self._end
            if self._is_stopped:
                raise StopAsyncIteration
            self._arrival.clear()
            await self._arrival.wait()
        return self._received.popleft()

    def ack(self, message: ReceivedMessage) -> None:
        if self._held.pop(message.ack_id, None) is not None:
            self._queue.deliver()

    def nack(self, message: ReceivedMessage) -> None:
        stored = self._held.pop(message.ack_id, None)
        if stored is not None:
            self._transport.hand_back(self._queue, stored)

    async def stop(self) -> None:
        self._is_stopped = True
        if self in self._queue.pullers:
            self._queue.pullers.remove(self)
        while self._received:
            self.nack(self._received.pop())
        self._arrival.set()

    async def close(self) -> None:
        await self.stop()
        held, self._held = self._held, {}
        for stored in held.values():
            self._transport.hand_back(self._queue, stored)

    def fail(self, error: PenstockError) -> None:
        """Ends the iteration with `error`, as a broker does whose subscription is gone."""
        self._end = error
        self._arrival.set()

    def offer(self, waiting: deque[_Stored]) -> bool:
        """Takes the first that waits if there is room for it."""
        held_bytes = sum(len(stored.data) for stored in self._held.values())
        if len(self._held) >= self._max_messages or (
            self._max_bytes and held_bytes >= self._max_bytes
        ):
            return False
        stored = waiting.popleft()
        stored.attempts += 1
        ack_id = self._transport.next_id("ack")
        self._held[ack_id] = stored
        self._received.append(
            ReceivedMessage(
                stored.data,
                dict(stored.attributes),
                stored.message_id,
                ack_id,
                publish_time_s=stored.published_at_s,
                delivery_attempt=stored.attempts
                if self._queue.settings.dead_letter_topic_id
                else 0,
                ordering_key=stored.ordering_key,
                received_at_s=asyncio.get_running_loop().time(),
            )
        )
        self._arrival.set()
        return True


class InMemoryTransport:
    """A whole broker; several users in one process share one instance.

    `outage` set to an error makes every publish raise it until it is None again. `published` counts
    what was taken.
    """

    def __init__(self) -> None:
        self._topics: dict[str, dict[str, _Queue]] = {}
        self._queues: dict[str, _Queue] = {}
        self._ids = itertools.count(1)
        self.outage: PenstockError | None = None
        self.published = 0
        self.round_trip = SmoothedDuration()

    async def __aenter__(self) -> InMemoryTransport:
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
        await asyncio.sleep(0)
        if self.outage is not None:
            raise self.outage
        if topic_id not in self._topics:
            raise BadInput(f"publish to {topic_id}: NOT_FOUND")
        if not data and not attributes:
            raise BadInput(f"publish to {topic_id}: INVALID_ARGUMENT: an empty message")
        if any(
            len(name.encode()) > 256 or len(value.encode()) > 1024
            for name, value in attributes.items()
        ):
            raise BadInput(f"publish to {topic_id}: INVALID_ARGUMENT: an attribute is too long")
        return self._store(topic_id, data, attributes, ordering_key)

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
        queue = self._queues.get(subscription_id)
        subscription = InMemorySubscription(
            self, queue or _Queue(SubscriptionSettings(""), None), max_messages, max_bytes
        )
        if queue is None:
            subscription.fail(Unavailable(f"{subscription_id}: NOT_FOUND"))
        else:
            queue.pullers.append(subscription)
            queue.deliver()
        try:
            yield subscription
        finally:
            await subscription.close()

    async def ensure_topic(self, topic_id: str) -> bool:
        is_new = topic_id not in self._topics
        self._topics.setdefault(topic_id, {})
        return is_new

    async def ensure_subscription(
        self, subscription_id: str, settings: SubscriptionSettings
    ) -> bool:
        if settings.topic_id not in self._topics:
            raise BadInput(f"create {subscription_id}: NOT_FOUND: {settings.topic_id}")
        if subscription_id in self._queues:
            return False
        self._queues[subscription_id] = self._topics[settings.topic_id][subscription_id] = _Queue(
            settings, parse_filter(settings.filter)
        )
        return True

    async def delete_topic(self, topic_id: str) -> bool:
        return self._topics.pop(topic_id, None) is not None

    async def delete_subscription(self, subscription_id: str) -> bool:
        queue = self._queues.pop(subscription_id, None)
        if queue is None:
            return False
        self._topics.get(queue.settings.topic_id, {}).pop(subscription_id, None)
        for puller in queue.pullers:
            puller.fail(Unavailable(f"{subscription_id}: NOT_FOUND"))
        return True

    async def subscription_exists(self, subscription_id: str) -> bool:
        return subscription_id in self._queues

    async def missing_subscriptions(self, subscription_ids: list[str]) -> list[str]:
        return [name for name in subscription_ids if name not in self._queues]

    def backlog(self, subscription_id: str) -> int:
        """Messages that nobody holds."""
        return len(self._queues[subscription_id].waiting)

    def next_id(self, kind: str) -> str:
        return f"{kind}-{next(self._ids)}"

    def hand_back(self, queue: _Queue, stored: _Stored) -> None:
        """Delivers again, or dead-letters what was delivered often enough."""
        settings = queue.settings
        if settings.dead_letter_topic_id and stored.attempts >= settings.max_delivery_attempts:
            self._store(
                settings.dead_letter_topic_id, stored.data, stored.attributes, stored.ordering_key
            )
            return
        queue.waiting.appendleft(stored)
        queue.deliver()

    def _store(
        self, topic_id: str, data: bytes, attributes: Mapping[str, str], ordering_key: str
    ) -> str:
        message_id = self.next_id("message")
        self.published += 1
        for queue in self._topics[topic_id].values():
            if queue.takes(attributes):
                queue.waiting.append(
                    _Stored(data, dict(attributes), message_id, ordering_key, time.time())
                )
                queue.deliver()
        return message_id
