"""The transport over RabbitMQ: publishes with confirmations, consumes with a prefetch.

Guarantees used. A message is confirmed once a quorum of the broker's nodes has it on disk, and gone
only after its ack. The broker redelivers what a channel held when the channel ends. So a crash
loses nothing, and every consumer must be idempotent. The prefetch is the flow control.

Decision 67 has what was rejected: aio-pika's robust connections, exclusive reply queues, one
exchange for each topic, a queue for each pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

from aiormq.abc import DeliveredMessage

from shared.rabbitmq.connection import BrokerConnection
from shared.rabbitmq.delays import delay_queue
from shared.rabbitmq.properties import returned_properties
from shared.rabbitmq.publisher import ConfirmedPublisher
from shared.rabbitmq.routing import exchange_name, queue_name, topic_name
from shared.rabbitmq.subscriber import DelayedReturn, QueueSubscription
from shared.rabbitmq.topology import exists
from shared.rabbitmq.url import broker_url
from shared.rabbitmq.waits import ANSWER_LIMIT_S

OPEN_S = 5.0
"""How long opening a subscription waits for its consumer. After that it retries in the background.
"""
CLOSE_S = 2.0
"""How long the last acks of a subscription may take."""


class RabbitTransport:
    """A connection to RabbitMQ that publishes and subscribes.

    Implements shared.transport.Transport.

    Args:
        project: the prefix of all names, so that several deployments may share a vhost.
        broker: the URL. See broker_url.
        answer_limit_s: how long the broker may take to answer before it is asked again. The second
            time it has twice as long, and so on.

    Raises:
        ConfigurationError: the URL is none.
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

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._publishing.close()
        await self._consuming.close()

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

        See shared.transport.Publisher and ConfirmedPublisher.
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
        """Opens a subscription. See shared.transport.Subscriber.

        AMQP has no bound by bytes, no lease to extend and no request of acks to share, so
        `max_bytes`, `ack_deadline_s` and `ack_linger_s` have no use here.

        Args:
            subscription_id: as in shared.transport.Subscriber.
            max_messages: the prefetch.
            max_bytes: no use.
            ack_deadline_s: no use.
            ack_linger_s: no use.
            delays_s: with these, a message that is handed back waits on the broker and not in hand:
                the first time for the first of these seconds, and so on, then always for the last.
                The subscription must have been made with them (see delay_queue).
        """
        queue = queue_name(self.project, subscription_id)
        subscription = QueueSubscription(
            self._consuming.channel,
            queue,
            max_messages,
            self._delayed_return(queue, delays_s) if delays_s else None,
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

    def _delayed_return(self, queue: str, delays_s: tuple[float, ...]) -> DelayedReturn:
        async def put_back(delivered: DeliveredMessage, attempt: int) -> None:
            delay_s = delays_s[min(attempt, len(delays_s)) - 1]
            properties = returned_properties(delivered, attempt)
            await self._publisher.send(delay_queue(queue, delay_s), delivered.body, properties)

        return put_back

    async def _topic_exists(self, topic_id: str) -> bool:
        return await exists(self._publishing, exchange=topic_name(self.project, topic_id))
