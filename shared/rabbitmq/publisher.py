"""Publishes with the broker's confirmation, and again after the connection broke."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from uuid import uuid4

import aiormq
from aiormq import Channel, spec
from aiormq.abc import DeliveredMessage

from shared.backoff import backoff
from shared.errors import BadInput, InputTooLarge, Overloaded, Unavailable
from shared.rabbitmq.connection import BROKEN, LONGEST_PAUSE_S, BrokerConnection, translate
from shared.rabbitmq.properties import check_topic, properties_of
from shared.rabbitmq.routing import message_keys

MESSAGE_LIMIT_BYTES = 10_000_000
"""Pub/Sub's limit, so that what one broker takes the other takes too."""
IN_FLIGHT_LIMIT_MESSAGES = 20_000
IN_FLIGHT_LIMIT_BYTES = 128 * 1024 * 1024
KNOWN_TOPICS = 10_000
"""How many topics are remembered to exist, so that a message without a queue costs no question."""


class ConfirmedPublisher:
    """Publishes on one channel. What waits for the broker's confirmation is bounded.

    Args:
        connection: to publish on. The broker may block it while it is short of memory or disk, so
            no consumer should share it.
        exchange: that carries all messages.
        topic_exists: says whether a topic was made. Asked when no queue takes a message.
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
        self._opening = asyncio.Lock()
        self._channel: Channel | None = None
        self._sender = uuid4().hex[:16]
        self._numbers = itertools.count(1)
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
        """Sends a message and returns its id. See shared.transport.Publisher.

        A message whose confirmation was lost is sent again with the same id.
        """
        if not data and not attributes:
            raise BadInput(f"publish to {topic_id}: an empty message")
        size_bytes = len(data) + sum(len(name) + len(value) for name, value in attributes.items())
        self._check_room(size_bytes)
        check_topic(topic_id)
        keys = message_keys(topic_id, attributes)
        message_id = f"{self._sender}-{next(self._numbers)}"
        properties = properties_of(attributes, keys, message_id, ordering_key)
        self._messages += 1
        self._bytes += size_bytes
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_confirmed(topic_id, data, properties)
        except TimeoutError:
            raise Unavailable(f"publish to {topic_id}: no answer within {timeout_s:g} s") from None
        finally:
            self._messages -= 1
            self._bytes -= size_bytes
        return message_id

    async def send(self, queue: str, data: bytes, properties: spec.Basic.Properties) -> None:
        """Sends to one queue, past the exchange.

        Raises:
            Unavailable: the broker is out of reach, or there is no such queue.
        """
        try:
            channel = await self._open_channel()
            confirmed = await channel.basic_publish(
                data, routing_key=queue, properties=properties, mandatory=True
            )
        except BROKEN as error:
            raise translate(error, f"return to {queue}") from error
        if isinstance(confirmed, DeliveredMessage):
            raise Unavailable(f"return to {queue}: there is no such queue")

    def _check_room(self, size_bytes: int) -> None:
        if size_bytes > MESSAGE_LIMIT_BYTES:
            raise InputTooLarge(
                f"a message of {size_bytes} bytes, the broker takes {MESSAGE_LIMIT_BYTES}"
            )
        if (
            self._messages >= IN_FLIGHT_LIMIT_MESSAGES
            or self._bytes + size_bytes > IN_FLIGHT_LIMIT_BYTES
        ):
            raise Overloaded("too much waits to be published")

    async def _until_confirmed(
        self, topic_id: str, data: bytes, properties: spec.Basic.Properties
    ) -> None:
        """Publishes until the broker confirms."""
        for pause_s in backoff(longest_s=LONGEST_PAUSE_S):
            try:
                channel = await self._open_channel()
                confirmed = await channel.basic_publish(
                    data,
                    exchange=self._exchange,
                    routing_key=topic_id,
                    properties=properties,
                    mandatory=True,
                    # The confirmation is waited for, so the socket need not be.
                    wait=False,
                )
            except aiormq.DeliveryError as error:
                raise Overloaded(f"publish to {topic_id}: the queue takes no more") from error
            except (*BROKEN, Unavailable):
                await asyncio.sleep(pause_s)
                continue
            if isinstance(confirmed, DeliveredMessage):
                await self._check_topic(topic_id)
            return

    async def _open_channel(self) -> Channel:
        channel = self._channel
        if channel is not None and not channel.is_closed:
            return channel
        async with self._opening:
            if self._channel is None or self._channel.is_closed:
                self._channel = await self._new_channel()
            return self._channel

    async def _new_channel(self) -> Channel:
        channel = await self._connection.channel(confirms=True)
        try:
            # A publish to an exchange that is not there would end the channel for all.
            await channel.exchange_declare(self._exchange, exchange_type="direct", durable=True)
        except BROKEN as error:
            raise translate(error, f"declare {self._exchange}") from error
        return channel

    async def _check_topic(self, topic_id: str) -> None:
        """Nobody subscribes to the topic. That is fine if it exists."""
        if topic_id in self._known:
            return
        if not await self._topic_exists(topic_id):
            raise BadInput(f"publish to {topic_id}: there is no such topic")
        if len(self._known) < KNOWN_TOPICS:
            self._known.add(topic_id)
