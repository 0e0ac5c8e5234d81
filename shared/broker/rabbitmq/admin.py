"""Creates and deletes queues and exchanges for topics and subscriptions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self, TypeVar

from aiormq import Channel

from shared.broker.rabbitmq.broker_url import broker_url
from shared.broker.rabbitmq.connection import BROKEN, BrokerConnection, translate
from shared.broker.rabbitmq.topology import (
    binding_key,
    delay_queue,
    delays_between,
    exchange_name,
    exists,
    queue_name,
    topic_name,
    waiting,
)
from shared.broker.rabbitmq.waits import ChannelWaits, close_channel
from shared.broker.transport import SubscriptionSettings
from shared.errors import BadInput, Unavailable
from shared.process.concurrency import backoff

CALLS_IN_FLIGHT = 8
ATTEMPTS = 3
"""Minimum number of attempts per call when the broker does not respond."""
UNLIMITED = 1_000_000
"""Maximum number of times to deliver a message whose subscription has no dead-letter topic.

RabbitMQ 4 uses 20 by default.
"""

T = TypeVar("T")


class RabbitAdmin:
    """A connection for admin calls. Each call is retried after transient failures.

    Every method raises BadInput if a name or setting is invalid, ConfigurationError if we do not
    have permission or the name is already used for something else, and Unavailable if the call did
    not succeed in time. Implements shared.broker.transport.Admin.
    """

    def __init__(self, project: str, broker: str, *, timeout_s: float = 30.0) -> None:
        self._project = project
        self._connection = BrokerConnection(
            broker_url(broker), f"{project} admin", timeout_s / ATTEMPTS
        )
        self._timeout_s = timeout_s
        self._in_flight = asyncio.Semaphore(CALLS_IN_FLIGHT)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._connection.close()

    async def ensure_topic(self, topic_id: str) -> bool:
        """Creates a topic if it doesn't exist. Returns whether it was created."""
        name = topic_name(self._project, topic_id)
        if await self._exists(exchange=name):
            return False

        async def declare(channel: Channel) -> None:
            for exchange in (exchange_name(self._project), name):
                await channel.exchange_declare(exchange, exchange_type="direct", durable=True)

        await self._run(declare, f"create {name}")
        return True

    async def ensure_subscription(
        self, subscription_id: str, settings: SubscriptionSettings
    ) -> bool:
        """Creates a subscription if it doesn't exist. Returns whether it was created."""
        queue = queue_name(self._project, subscription_id)
        key = binding_key(settings.topic_id, settings.filter)
        if not await self._exists(exchange=topic_name(self._project, settings.topic_id)):
            raise BadInput(f"create {queue}: topic {settings.topic_id} does not exist")

        async def bind(channel: Channel) -> None:
            await channel.queue_bind(queue, exchange_name(self._project), key)

        if await self._exists(queue=queue):
            # Its creator may have died before binding it.
            await self._run(bind, f"create {queue}")
            return False

        async def declare(channel: Channel) -> None:
            if settings.push_endpoint and settings.retry_min_s is not None:
                for delay_s in delays_between(settings.retry_min_s, settings.retry_max_s):
                    await channel.queue_declare(
                        delay_queue(queue, delay_s), durable=True, arguments=_delay(queue, delay_s)
                    )
            await channel.queue_declare(queue, durable=True, arguments=self._arguments(settings))
            await bind(channel)

        await self._run(declare, f"create {queue}")
        return True

    async def delete_topic(self, topic_id: str) -> bool:
        """Deletes a topic. Returns whether it existed. Its subscriptions remain."""
        name = topic_name(self._project, topic_id)
        if not await self._exists(exchange=name):
            return False
        await self._run(lambda channel: channel.exchange_delete(name), f"delete {name}")
        return True

    async def delete_subscription(self, subscription_id: str) -> bool:
        """Deletes a subscription and its backlog. Returns whether it existed."""
        queue = queue_name(self._project, subscription_id)
        if not await self._exists(queue=queue):
            return False
        await self._run(lambda channel: channel.queue_delete(queue), f"delete {queue}")
        return True

    async def subscription_exists(self, subscription_id: str) -> bool:
        return await self._exists(queue=queue_name(self._project, subscription_id))

    async def waiting_messages(self, subscription_id: str) -> int | None:
        """Returns the number of messages not held by any consumer.

        None if the subscription does not exist.

        Pub/Sub has a metric for this but no equivalent call.
        """
        queue = queue_name(self._project, subscription_id)
        return await self._until(lambda: waiting(self._connection, queue), f"look at {queue}")

    async def missing_subscriptions(self, subscription_ids: list[str]) -> list[str]:
        """Returns the `subscription_ids` that do not exist, in order."""
        exist = await asyncio.gather(*map(self.subscription_exists, subscription_ids))
        return [
            name for name, is_there in zip(subscription_ids, exist, strict=True) if not is_there
        ]

    def _arguments(self, settings: SubscriptionSettings) -> dict[str, Any]:
        """Returns the queue's arguments.

        See https://www.rabbitmq.com/docs/quorum-queues for quorum queues.
        """
        arguments: dict[str, Any] = {"x-message-ttl": settings.retention_s * 1000}
        if settings.is_reply:
            if settings.expires_after_s:
                arguments["x-expires"] = settings.expires_after_s * 1000
            return arguments
        arguments |= {"x-queue-type": "quorum", "x-delivery-limit": UNLIMITED}
        if settings.dead_letter_topic_id:
            arguments |= {
                "x-dead-letter-exchange": exchange_name(self._project),
                "x-dead-letter-routing-key": settings.dead_letter_topic_id,
                "x-delivery-limit": settings.max_delivery_attempts - 1,
                # A dead letter leaves this queue only after the other queue has received it.
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            }
        return arguments

    async def _exists(self, *, queue: str = "", exchange: str = "") -> bool:
        return await self._until(
            lambda: exists(self._connection, queue=queue, exchange=exchange),
            f"look at {queue or exchange}",
        )

    async def _run(self, call: Callable[[Channel], Awaitable[object]], action: str) -> None:
        async def on_own_channel() -> None:
            channel = await self._connection.channel()
            try:
                await ChannelWaits(channel).within(self._connection.answer_limit_s, call(channel))
            except ValueError as error:  # a name or a key is too long
                raise BadInput(f"{action}: {error}") from error
            except BROKEN as error:
                raise translate(error, action) from error
            finally:
                await close_channel(channel)

        await self._until(on_own_channel, action)

    async def _until(self, call: Callable[[], Awaitable[T]], action: str) -> T:
        """Retries `call` while the broker is unreachable."""
        failure: Unavailable | None = None
        try:
            async with asyncio.timeout(self._timeout_s), self._in_flight:
                for pause_s in backoff():
                    try:
                        return await call()
                    except Unavailable as error:
                        failure = error
                    await asyncio.sleep(pause_s)
        except TimeoutError:
            pass
        raise failure or Unavailable(f"{action}: no response within {self._timeout_s:g} s")


def _delay(queue: str, delay_s: float) -> dict[str, Any]:
    """Returns the arguments for a delay queue, whose messages return via the default exchange."""
    return {
        "x-queue-type": "quorum",
        "x-message-ttl": round(delay_s * 1000),
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": queue,
        "x-dead-letter-strategy": "at-least-once",
        "x-overflow": "reject-publish",
    }
