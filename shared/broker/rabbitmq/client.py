"""The RabbitMQ transport: publishes with confirmations and consumes with a prefetch limit.

The transport relies on these guarantees: A message is confirmed once a quorum of the broker's nodes
has it on disk, and deleted only after its ack. When a channel closes, the broker redelivers the
messages held on it. A crash therefore loses nothing, and every consumer must be idempotent. The
prefetch limit serves as flow control.

Decision 67 lists the rejected alternatives: aio-pika's robust connections, exclusive reply queues,
one exchange per topic, and one queue per pause.

If the connection breaks or no response arrives, a message is republished until the broker confirms
it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Self
from uuid import uuid4

import aiormq
from aiormq import spec
from aiormq.abc import DeliveredMessage

from shared.broker.rabbitmq.broker_url import broker_url
from shared.broker.rabbitmq.connection import BROKEN, MAX_PAUSE_S, BrokerConnection, translate
from shared.broker.rabbitmq.properties import build_returned_properties, check_topic, properties_of
from shared.broker.rabbitmq.subscriber import DelayedReturn, QueueSubscription
from shared.broker.rabbitmq.topology import (
    delay_queue,
    exchange_name,
    exists,
    message_keys,
    queue_name,
    topic_name,
)
from shared.broker.rabbitmq.waits import ANSWER_LIMIT_S, ChannelWaits, close_channel, longer
from shared.broker.transport import SmoothedDuration
from shared.errors import (
    BadInput,
    InputTooLarge,
    Overloaded,
    PenstockError,
    Unavailable,
)
from shared.process.concurrency import backoff

MESSAGE_LIMIT_BYTES = 10_000_000
"""Pub/Sub's limit, so that both brokers accept the same messages."""
IN_FLIGHT_LIMIT_MESSAGES = 20_000
IN_FLIGHT_LIMIT_BYTES = 128 * 1024 * 1024
KNOWN_TOPICS = 10_000
"""Number of topics known to exist, so that messages without a queue don't require a query."""

OPEN_S = 5.0
"""How long to wait for a subscription's consumer when opening it.

After that, the subscription retries in the background.
"""
CLOSE_S = 2.0
"""Time limit for sending a subscription's last acks."""


class ConfirmedPublisher:
    """Publishes on one channel at a time. The number of unconfirmed messages is bounded.

    Args:
        connection: connection to publish on. The broker may block this connection while it is low
            on memory or disk space, so consumers should not share it.
        topic_exists: returns whether a topic exists. Called if no queue receives a message.
    """

    def __init__(
        self,
        connection: BrokerConnection,
        exchange: str,
        topic_exists: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._connection = connection
        self._exchange = exchange
        self._topic_exists = topic_exists
        self._known: set[str] = set()
        self._open_lock = asyncio.Lock()
        self._waits: ChannelWaits | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._sender = uuid4().hex[:16]
        self._numbers = itertools.count(1)
        self.round_trip = SmoothedDuration()
        """See shared.broker.transport.Publisher."""
        self._messages = 0
        self._bytes = 0

    async def publish(
        self,
        topic_id: str,
        data: bytes,
        attributes: Mapping[str, str],
        ordering_key: str,
        timeout_s: float,
    ) -> str:
        """Sends a message and returns its ID. See shared.broker.transport.Publisher.

        A message that was not confirmed, or was rejected by its queue, is resent with the same ID.
        """
        if not data and not attributes:
            raise BadInput(f"publish to {topic_id}: the message must not be empty")
        size_bytes = len(data) + sum(len(name) + len(value) for name, value in attributes.items())
        self._check_room(size_bytes)
        check_topic(topic_id)
        keys = message_keys(topic_id, attributes)
        message_id = f"{self._sender}-{next(self._numbers)}"
        properties = properties_of(attributes, keys, message_id, ordering_key)
        self._messages += 1
        self._bytes += size_bytes
        try:
            await self._until_confirmed(topic_id, data, properties, timeout_s)
        finally:
            self._messages -= 1
            self._bytes -= size_bytes
        return message_id

    async def send(self, queue: str, data: bytes, properties: spec.Basic.Properties) -> None:
        """Sends directly to one queue, once.

        Raises:
            Unavailable: the broker is unreachable or did not respond, or the queue does not exist.
        """
        try:
            confirmed = await self._send_once(
                "", queue, data, properties, self._connection.answer_limit_s
            )
        except BROKEN as error:
            raise translate(error, f"return to {queue}") from error
        if isinstance(confirmed, DeliveredMessage):
            raise Unavailable(f"return to {queue}: the queue does not exist")

    def _check_room(self, size_bytes: int) -> None:
        if size_bytes > MESSAGE_LIMIT_BYTES:
            raise InputTooLarge(
                f"the message is {size_bytes} bytes, which exceeds the broker's maximum of "
                f"{MESSAGE_LIMIT_BYTES}"
            )
        if (
            self._messages >= IN_FLIGHT_LIMIT_MESSAGES
            or self._bytes + size_bytes > IN_FLIGHT_LIMIT_BYTES
        ):
            raise Overloaded("too many messages are waiting to be published")

    async def _until_confirmed(
        self, topic_id: str, data: bytes, properties: spec.Basic.Properties, timeout_s: float
    ) -> None:
        """Sends a message until a queue confirms it.

        Raises:
            BadInput: the topic does not exist.
            ConfigurationError: we may not publish.
            Overloaded: a queue was full on the last try within `timeout_s`.
            Unavailable: the broker did not confirm the message within `timeout_s`.
        """
        action = f"publish to {topic_id}"
        # Callers with little time left must not all wait on a channel that isn't confirming
        # messages.
        limit_s = min(self._connection.answer_limit_s, timeout_s / 2)
        failure: PenstockError = Unavailable(f"{action}: no response within {timeout_s:g} s")
        try:
            async with asyncio.timeout(timeout_s):
                for pause_s in backoff(longest_s=MAX_PAUSE_S):
                    try:
                        confirmed = await self._send_once(
                            self._exchange, topic_id, data, properties, limit_s
                        )
                        if isinstance(confirmed, DeliveredMessage):
                            await self._check_topic(topic_id)
                        return
                    except aiormq.DeliveryError:
                        # The broker also reports this error for a queue whose node is temporarily
                        # down.
                        failure = Overloaded(f"{action}: the queue is full")
                    except TimeoutError:
                        limit_s = longer(limit_s)
                    except Unavailable as error:
                        failure = error
                    except aiormq.ChannelAccessRefused as error:
                        raise translate(error, action) from error
                    except BROKEN as error:
                        # It may be about another message on this channel.
                        failure = Unavailable(translate(error, action).message)
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            raise failure from None

    async def _send_once(
        self,
        exchange: str,
        routing_key: str,
        data: bytes,
        properties: spec.Basic.Properties,
        limit_s: float,
    ) -> object:
        """Returns the confirmation, or the message itself if no queue received it."""
        waits = await self._open_channel()
        began_s = asyncio.get_running_loop().time()
        try:
            confirmed = await waits.within(
                limit_s,
                waits.channel.basic_publish(
                    data,
                    exchange=exchange,
                    routing_key=routing_key,
                    properties=properties,
                    mandatory=True,
                    # The confirmation is awaited anyway, so there is no need to wait for the
                    # socket.
                    wait=False,
                ),
            )
            self.round_trip.record(asyncio.get_running_loop().time() - began_s)
            return confirmed
        except TimeoutError:
            # Confirmations from other queues may still arrive on this channel, so it stays open for
            # them.
            if self._waits is waits:
                self._waits = None
            raise
        finally:
            if waits is not self._waits and waits.is_idle:
                self._close_later(waits)

    def _close_later(self, waits: ChannelWaits) -> None:
        if not waits.channel.is_closed:
            closing = asyncio.create_task(close_channel(waits.channel))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def _open_channel(self) -> ChannelWaits:
        waits = self._waits
        if waits is not None and not waits.channel.is_closed:
            return waits
        async with self._open_lock:
            if self._waits is None or self._waits.channel.is_closed:
                self._waits = await self._new_channel()
            return self._waits

    async def _new_channel(self) -> ChannelWaits:
        waits = ChannelWaits(await self._connection.channel(confirms=True))
        # Publishing to a nonexistent exchange would close the channel for everyone.
        declared = waits.channel.exchange_declare(
            self._exchange, exchange_type="direct", durable=True
        )
        try:
            await waits.within(self._connection.answer_limit_s, declared)
        except BaseException as error:
            self._close_later(waits)
            if isinstance(error, BROKEN):
                raise translate(error, f"declare {self._exchange}") from error
            raise
        return waits

    async def _check_topic(self, topic_id: str) -> None:
        """Checks a topic that has no subscribers, which is valid as long as it exists."""
        if topic_id in self._known:
            return
        if not await self._topic_exists(topic_id):
            raise BadInput(f"publish to {topic_id}: the topic does not exist")
        if len(self._known) < KNOWN_TOPICS:
            self._known.add(topic_id)


class RabbitTransport:
    """A connection to RabbitMQ that publishes and subscribes.

    Implements shared.broker.transport.Transport.

    Args:
        project: prefix for all names, so that several deployments can share a vhost.
        broker: broker URL. See broker_url.
        answer_limit_s: maximum number of seconds to wait for a response before retrying. Increases
            with each attempt.

    Raises:
        ConfigurationError: the URL is invalid.
    """

    def __init__(
        self, project: str, broker: str, *, answer_limit_s: float = ANSWER_LIMIT_S
    ) -> None:
        self.project = project
        url = broker_url(broker)
        self._publishing = BrokerConnection(url, f"{project} publishes", answer_limit_s)
        self._consuming = BrokerConnection(url, f"{project} consumes", answer_limit_s)

    async def __aenter__(self) -> Self:
        self._publisher = ConfirmedPublisher(
            self._publishing, exchange_name(self.project), self._topic_exists
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._publishing.close()
        await self._consuming.close()

    @property
    def round_trip(self) -> SmoothedDuration:
        return self._publisher.round_trip

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

        See shared.broker.transport.Publisher and ConfirmedPublisher.
        """
        return await self._publisher.publish(topic_id, data, attributes, ordering_key, timeout_s)

    @asynccontextmanager
    async def subscribe(
        self,
        subscription_id: str,
        *,
        max_messages: int,
        max_bytes: int = 0,
        ack_deadline_s: int = 20,
        ack_linger_s: float = 0.0,
        delays_s: tuple[float, ...] = (),
    ) -> AsyncIterator[QueueSubscription]:
        """Opens a subscription. See shared.broker.transport.Subscriber.

        AMQP does not support byte limits, lease extensions, or combined acks, so `max_bytes`,
        `ack_deadline_s`, and `ack_linger_s` have no effect here.

        Args:
            delays_s: seconds that a returned message waits in the broker without being held: the
                first value applies after the first attempt, and so on; once the values run out, the
                last one applies. The subscription must have been created with these delays (see
                delay_queue).
        """
        queue = queue_name(self.project, subscription_id)
        subscription = QueueSubscription(
            self._consuming.channel,
            queue,
            max_messages,
            self._make_delayed_return(queue, delays_s) if delays_s else None,
            self._consuming.answer_limit_s,
        )
        subscription.start()
        try:
            await subscription.wait_open(OPEN_S)
            yield subscription
        finally:
            closing = asyncio.create_task(subscription.close(CLOSE_S))
            try:
                await asyncio.shield(closing)
            except asyncio.CancelledError:
                await closing
                raise

    def _make_delayed_return(self, queue: str, delays_s: tuple[float, ...]) -> DelayedReturn:
        async def put_back(delivered: DeliveredMessage, attempt: int) -> None:
            delay_s = delays_s[min(attempt, len(delays_s)) - 1]
            properties = build_returned_properties(delivered, attempt)
            await self._publisher.send(delay_queue(queue, delay_s), delivered.body, properties)

        return put_back

    async def _topic_exists(self, topic_id: str) -> bool:
        return await exists(self._publishing, exchange=topic_name(self.project, topic_id))
