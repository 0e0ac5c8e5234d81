"""The broker client: publishes to Pub/Sub and pulls from it, on asyncio.

API and workers use no other.

Guarantees used. At-least-once delivery: a message is gone only after its ack. So a crash loses
nothing, and every consumer must be idempotent. Flow control per stream (`max_outstanding_*`): the
broker sends no more than we can hold, and gives the rest to other subscribers. Leases: a message
that we neither ack nor extend comes again after the ack deadline. Order is used only within an
ordering key, with one request in flight at a time. Acks are best effort. A lost ack causes a second
delivery.

Rejected:
- Google's own subscriber: threads per subscription (five each in 2.44.0), a batch timer of 10 ms
  for publishing by default, and lease management that shares the GIL with callbacks.
- Its generated asyncio clients: no batching, flow control, leases or reconnects, and proto-plus
  objects at about 0.1 ms a message.
- Acks on the pulling stream: one write each, and they are lost with the stream. Unary requests on
  another connection can be retried.
- A timer that collects messages before a publish: it slows down the idle case. Sending the queue
  after each request batches just as well under load.
- Exactly-once delivery: it costs latency and works only within a region. The cache key and
  (request_id, part) make a second delivery harmless.

What would change the choice: an asyncio subscriber by Google with leases and flow control, or a
measured need for more than one core of broker client in a process (then a native client behind the
same interface).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from google.pubsub_v1.types import pubsub
from grpc import aio

from shared.pubsub.channel import Channels, Method, PubsubMessage, StreamingPullRequest
from shared.pubsub.leaser import AckQueue, Leases
from shared.pubsub.paths import subscription_path, topic_path
from shared.pubsub.publisher import PublishQueue
from shared.pubsub.subscriber import StreamSubscription

STREAMS_PER_CHANNEL = 80
"""Stays clear of the 100 streams that fit on one connection (`Channels` says why)."""
OPEN_S = 5.0
"""How long opening a subscription waits for its first stream.

After that it retries in the background.
"""
CLOSE_S = 2.0
"""How long the last acks of a subscription may take."""


class PubSubTransport:
    """A connection to Pub/Sub that publishes and subscribes. Implements shared.transport.Transport.

    Args:
        project: the project of all topics and subscriptions.
        endpoint: empty for Google's, `HOST:PORT` or `unix:///PATH` for an emulator. See
            parse_endpoint.
    """

    def __init__(self, project: str, endpoint: str = "") -> None:
        self._project = project
        self._channels = Channels(endpoint)
        self._client_id = uuid4().hex
        self._pull_channels: list[_PullChannel] = []

    async def __aenter__(self) -> Self:
        await self._channels.load_credentials()
        publishing, leasing = self._channels.open(), self._channels.open()
        self._publishing = PublishQueue(
            Method(publishing, "Publisher/Publish", pubsub.PublishResponse.pb(), "topic")
        )
        self._acknowledge = Method(leasing, "Subscriber/Acknowledge", None, "subscription")
        self._modify = Method(leasing, "Subscriber/ModifyAckDeadline", None, "subscription")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._publishing.close()
        await self._channels.close()

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

        See shared.transport.Publisher and PublishQueue.
        """
        message = PubsubMessage(data=data, attributes=attributes, ordering_key=ordering_key)
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
        """Opens a subscription. See shared.transport.Subscriber."""
        path = subscription_path(self._project, subscription_id)
        first_request = StreamingPullRequest(
            subscription=path,
            stream_ack_deadline_seconds=ack_deadline_s,
            client_id=self._client_id,
            max_outstanding_messages=max_messages,
            max_outstanding_bytes=max_bytes,
        )
        acks = AckQueue(
            path,
            self._acknowledge,
            self._modify,
            linger_s=ack_linger_s,
            linger_messages=max(1, max_messages // 4),
        )
        leases = Leases(path, self._modify, ack_deadline_s)
        with self._pull_channel() as open_stream:
            subscription = StreamSubscription(
                open_stream, first_request, acks, leases, max_messages
            )
            subscription.start()
            try:
                await subscription.wait_open(OPEN_S)
                yield subscription
            finally:
                await _finish(subscription.close(CLOSE_S))

    def _pull_channel(self) -> _PullChannel:
        for channel in self._pull_channels:
            if channel.streams < STREAMS_PER_CHANNEL:
                return channel
        self._pull_channels.append(_PullChannel(self._channels.open()))
        return self._pull_channels[-1]


class _PullChannel:
    """A channel for pulling. `with` counts one stream on it."""

    def __init__(self, channel: aio.Channel) -> None:
        self._open_stream: Any = channel.stream_stream(
            "/google.pubsub.v1.Subscriber/StreamingPull",
            StreamingPullRequest.SerializeToString,
            pubsub.StreamingPullResponse.pb().FromString,
        )
        self.streams = 0

    def __enter__(self) -> Any:
        self.streams += 1
        return self._open_stream

    def __exit__(self, *exc: object) -> None:
        self.streams -= 1


async def _finish(closing: Coroutine[Any, Any, None]) -> None:
    """Waits until `closing` ends, even if canceled, so that all messages are returned."""
    task = asyncio.create_task(closing)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
