"""The asyncio broker client: publishes to Pub/Sub and pulls from it.

The API and the workers use no other client. Messages are published in batches, with one queue per
topic and ordering key.

The client relies on these guarantees: At-least-once delivery: a message is deleted only after its
ack, so a crash loses nothing, and every consumer must be idempotent. Flow control per stream
(`max_outstanding_*`): the broker sends no more than we can hold, and sends the rest to other
subscribers. Leases: a message that is neither acked nor extended is redelivered after the ack
deadline. Order matters only within an ordering key, which has one request in flight at a time. Acks
are best-effort: a lost ack causes a second delivery.

Rejected alternatives:
- Google's own subscriber: it uses several threads per subscription (five each in 2.44.0), a 10 ms
  batch timer for publishing by default, and lease management that shares the GIL with callbacks.
- Its generated asyncio clients: they have no batching, flow control, leases, or reconnects, and use
  proto-plus objects at about 0.1 ms per message.
- Acks on the pulling stream: each is a separate write, and they are lost if the stream is. Unary
  requests on another connection can be retried.
- A timer that collects messages before a publish: it slows down the idle case. Sending whatever is
  queued after each request batches equally well under load.
- Exactly-once delivery: it adds latency and works only within one region. The cache key and
  (request_id, part) make redelivery harmless.

Reasons to reconsider: a Google asyncio subscriber with leases and flow control, or a measured need
for the broker client to use more than one core in a process (which would call for a native client
behind the same interface).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self
from uuid import uuid4

from google.pubsub_v1.types import pubsub
from grpc import StatusCode, aio

from shared.broker.pubsub.channel import (
    MESSAGE_LIMIT_BYTES,
    AckQueue,
    Channels,
    Method,
    PublishRequest,
    PubsubMessage,
    RawMessage,
    StreamingPullRequest,
    subscription_path,
    topic_path,
    translate,
)
from shared.broker.pubsub.subscriber import Leases, PullChannel, StreamSubscription
from shared.broker.transport import SmoothedDuration
from shared.errors import InputTooLarge, Overloaded, Unavailable

REQUEST_LIMIT_MESSAGES = 1000
REQUEST_LIMIT_BYTES = 9_000_000
"""Less than the service's 10 MB limit, which includes request overhead."""
QUEUE_LIMIT_MESSAGES = 20_000
QUEUE_LIMIT_BYTES = 128 * 1024 * 1024
REQUESTS_IN_FLIGHT = 4
"""Maximum number of requests in flight per topic.

With more requests in flight, fewer messages are coalesced. With fewer requests in flight, messages
wait for up to one round trip.
"""

OPEN_S = 5.0
"""How long to wait for a subscription's first stream when opening it.

After that, the subscription retries in the background.
"""
CLOSE_S = 2.0
"""Time limit for sending a subscription's last acks."""


@dataclass(slots=True, eq=False)
class _Pending:
    message: RawMessage
    size_bytes: int
    end_s: float
    message_id: asyncio.Future[str]


class PublishQueue:
    """Publishes on one channel. The total queue size across all topics is bounded."""

    def __init__(self, method: Method) -> None:
        self._method = method
        self._queues: dict[tuple[str, str], _TopicQueue] = {}
        self._messages = 0
        self._bytes = 0
        self._is_closed = False
        self.round_trip = SmoothedDuration()
        """See shared.broker.transport.Publisher."""

    async def publish(self, topic_path: str, message: RawMessage, timeout_s: float) -> str:
        """Sends `message` and returns its ID.

        Raises:
            InputTooLarge: the message is larger than the service accepts.
            Overloaded: the queue is full, or the broker was overloaded for `timeout_s`.
            BadInput: the broker rejected the message.
            ConfigurationError: the broker rejected our credentials.
            Unavailable: the broker did not respond within `timeout_s`, but may have accepted the
                message.
        """
        if self._is_closed:
            raise Unavailable("the connection to the broker is closed")
        size_bytes = message.ByteSize()
        self._check_room(size_bytes)
        loop = asyncio.get_running_loop()
        pending = _Pending(message, size_bytes, loop.time() + timeout_s, loop.create_future())
        timer = loop.call_at(pending.end_s, _give_up, pending, topic_path, timeout_s)
        self._messages += 1
        self._bytes += size_bytes
        try:
            self._queue_of(topic_path, message.ordering_key).put(pending)
            return await pending.message_id
        finally:
            timer.cancel()
            self._messages -= 1
            self._bytes -= size_bytes

    async def close(self) -> None:
        """Cancels requests in flight. All callers get an error."""
        self._is_closed = True
        tasks = [task for queue in self._queues.values() for task in queue.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)
        self._queues.clear()

    def _check_room(self, size_bytes: int) -> None:
        if size_bytes > MESSAGE_LIMIT_BYTES:
            raise InputTooLarge(
                f"the message is {size_bytes} bytes, which exceeds the broker's maximum of "
                f"{MESSAGE_LIMIT_BYTES}"
            )
        if self._messages >= QUEUE_LIMIT_MESSAGES or self._bytes + size_bytes > QUEUE_LIMIT_BYTES:
            raise Overloaded(f"{self._messages} messages are already waiting to be published")

    def _queue_of(self, topic_path: str, ordering_key: str) -> _TopicQueue:
        name = (topic_path, ordering_key)
        queue = self._queues.get(name)
        if queue is None:
            # Queues are removed when empty, because inboxes and ordering keys come and go without
            # limit.
            queue = self._queues[name] = _TopicQueue(
                self._method, topic_path, ordering_key, self._forget, self.round_trip
            )
        return queue

    def _forget(self, queue: _TopicQueue) -> None:
        if self._queues.get(queue.name) is queue:
            del self._queues[queue.name]


class _TopicQueue:
    """The queue for one topic and ordering key, and its requests in flight.

    A message is sent immediately if another request may start. Otherwise, it waits until a request
    returns, and is sent along with all messages queued by then. There is no timer. Messages with an
    ordering key have one request in flight at a time, so they stay in order.
    """

    def __init__(
        self,
        method: Method,
        topic_path: str,
        ordering_key: str,
        on_empty: Callable[[_TopicQueue], None],
        round_trip: SmoothedDuration,
    ) -> None:
        self.name = (topic_path, ordering_key)
        self._method = method
        self._topic_path = topic_path
        self._requests_in_flight = 1 if ordering_key else REQUESTS_IN_FLIGHT
        self._on_empty = on_empty
        self._round_trip = round_trip
        self._waiting: deque[_Pending] = deque()
        self._is_flush_due = False
        self._batches: dict[asyncio.Task[None], list[_Pending]] = {}
        """The requests in flight, each with its messages."""

    def put(self, pending: _Pending) -> None:
        self._waiting.append(pending)
        if not self._is_flush_due and len(self._batches) < self._requests_in_flight:
            # Sent in the next event loop iteration, so that messages from this iteration share a
            # request.
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def cancel(self) -> list[asyncio.Task[None]]:
        """Fails all messages, and cancels the requests in flight. Returns their tasks."""
        for batch in (self._waiting, *self._batches.values()):
            for pending in batch:
                _resolve(pending, Unavailable("the connection to the broker is closed"))
        self._waiting.clear()
        for task in self._batches:
            task.cancel()
        return list(self._batches)

    def _flush(self) -> None:
        self._is_flush_due = False
        while self._waiting and len(self._batches) < self._requests_in_flight:
            batch = self._next_batch()
            if batch:
                sending = asyncio.create_task(self._send(batch))
                self._batches[sending] = batch
                sending.add_done_callback(self._finish_task)
        if not self._batches:
            self._on_empty(self)

    def _finish_task(self, task: asyncio.Task[None]) -> None:
        self._batches.pop(task, None)
        self._flush()

    def _next_batch(self) -> list[_Pending]:
        batch: list[_Pending] = []
        size_bytes = 0
        while self._waiting and len(batch) < REQUEST_LIMIT_MESSAGES:
            size_bytes += self._waiting[0].size_bytes
            if batch and size_bytes > REQUEST_LIMIT_BYTES:
                break
            pending = self._waiting.popleft()
            if pending.message_id.done():  # its caller gave up
                size_bytes -= pending.size_bytes
            else:
                batch.append(pending)
        return batch

    async def _send(self, batch: list[_Pending]) -> None:
        request = PublishRequest(
            topic=self._topic_path, messages=[pending.message for pending in batch]
        )
        began_s = asyncio.get_running_loop().time()
        try:
            response = await self._method.until(request, max(pending.end_s for pending in batch))
            self._round_trip.record(asyncio.get_running_loop().time() - began_s)
        except aio.AioRpcError as error:
            if error.code() is StatusCode.INVALID_ARGUMENT and len(batch) > 1:
                # One bad message makes the whole request fail. When messages are sent individually,
                # only the bad one fails.
                for pending in batch:
                    await self._send([pending])
                return
            for pending in batch:
                _resolve(pending, translate(error, f"publish to {self._topic_path}"))
        else:
            for pending, message_id in zip(batch, response.message_ids, strict=True):
                _resolve(pending, message_id)


def _give_up(pending: _Pending, topic_path: str, timeout_s: float) -> None:
    _resolve(pending, Unavailable(f"publish to {topic_path}: no response within {timeout_s} s"))


def _resolve(pending: _Pending, outcome: Any) -> None:
    if pending.message_id.done():
        return
    if isinstance(outcome, Exception):
        pending.message_id.set_exception(outcome)
    else:
        pending.message_id.set_result(outcome)


class PubSubTransport:
    """A connection to Pub/Sub that publishes and subscribes. Implements Transport.

    Args:
        endpoint: empty for Google's endpoint, or `HOST:PORT` or `unix:///PATH` for an emulator. See
            parse_endpoint.
    """

    def __init__(self, project: str, endpoint: str = "") -> None:
        self._project = project
        self._channels = Channels(endpoint)
        self._client_id = uuid4().hex
        self._pull_channels: list[PullChannel] = []

    async def __aenter__(self) -> Self:
        await self._channels.load_credentials()
        publishing, leasing = self._channels.open(), self._channels.open()
        self._publishing = PublishQueue(
            Method(publishing, "Publisher/Publish", pubsub.PublishResponse.pb(), "topic")
        )
        self._acknowledge = Method(leasing, "Subscriber/Acknowledge", None, "subscription")
        self._modify = Method(leasing, "Subscriber/ModifyAckDeadline", None, "subscription")
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._publishing.close()
        await self._channels.close()

    @property
    def round_trip(self) -> SmoothedDuration:
        return self._publishing.round_trip

    async def publish(
        self,
        topic_id: str,
        data: bytes,
        attributes: Mapping[str, str],
        *,
        ordering_key: str = "",
        timeout_s: float = 10.0,
    ) -> str:
        """Publishes one message and returns its message_id.

        See shared.broker.transport.Publisher and PublishQueue.
        """
        message = PubsubMessage(data=data, ordering_key=ordering_key)
        carried = message.attributes
        for name, value in attributes.items():  # faster than passing them to the class
            carried[name] = value
        return await self._publishing.publish(
            topic_path(self._project, topic_id), message, timeout_s
        )

    @asynccontextmanager
    async def subscribe(
        self,
        subscription_id: str,
        *,
        max_messages: int,
        max_bytes: int = 0,
        ack_deadline_s: int = 20,
        ack_linger_s: float = 0.0,
    ) -> AsyncIterator[StreamSubscription]:
        path = subscription_path(self._project, subscription_id)
        first_request = StreamingPullRequest(
            subscription=path,
            stream_ack_deadline_seconds=ack_deadline_s,
            client_id=self._client_id,
        )
        acks = AckQueue(
            path,
            self._acknowledge,
            self._modify,
            linger_s=ack_linger_s,
            linger_messages=max(1, max_messages // 4),
        )
        leases = Leases(path, self._modify, ack_deadline_s)
        subscription = StreamSubscription(
            self._pull_channel, first_request, acks, leases, max_messages, max_bytes
        )
        subscription.start()
        try:
            await subscription.wait_open(OPEN_S)
            yield subscription
        finally:
            await _finish(subscription.close(CLOSE_S))

    def _pull_channel(self) -> PullChannel:
        """Returns a channel with room for another stream."""
        for channel in self._pull_channels:
            if channel.has_room:
                return channel
        self._pull_channels.append(PullChannel(self._channels.open()))
        return self._pull_channels[-1]


async def _finish(closing: Coroutine[Any, Any, None]) -> None:
    """Waits until `closing` finishes, even if canceled, so that all messages are returned."""
    task = asyncio.create_task(closing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
