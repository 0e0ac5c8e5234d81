"""Pulls the functions' messages from RabbitMQ, which doesn't push over HTTP.

Also exports a metric for the number of messages waiting in the queues, which Pub/Sub would provide
itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from prometheus_client import Gauge

from shared.broker.rabbitmq.admin import RabbitAdmin
from shared.broker.rabbitmq.client import RabbitTransport
from shared.broker.rabbitmq.subscriber import QueueSubscription
from shared.broker.rabbitmq.topology import delays_between
from shared.broker.transport import (
    DEAD_LETTER_RETRY_S,
    WEBHOOK_RETRY_S,
    WEBHOOKS_SUBSCRIPTION_ID,
    batch_subscription_id,
    dead_letter_push_subscription_id,
    dead_letter_subscription_id,
    workers_subscription_id,
)
from shared.errors import PenstockError
from shared.models.catalog import Catalog
from workers.functions.handler import Handler, handle_message

EVERY_S = 15.0
MESSAGES = Gauge(
    "penstock_queue_messages",
    "Messages in a RabbitMQ queue that no consumer is processing",
    ["subscription"],
)

MESSAGES_IN_HAND = 128
"""Maximum number of messages held per queue. Webhook receivers are slow and must not delay each
other.
"""
STOP_LIMIT_S = 20.0
"""How long handlers may take to finish once shutdown has started. Unfinished messages are
redelivered.
"""

log = logging.getLogger(__name__)


class QueueDepths:
    """Periodically checks the queues for a catalog's models."""

    def __init__(self, admin: RabbitAdmin, catalog: Catalog) -> None:
        self._admin = admin
        self._subscriptions = [
            WEBHOOKS_SUBSCRIPTION_ID,
            *(
                name_of(model.name)
                for model in catalog.deployed
                for name_of in (
                    workers_subscription_id,
                    batch_subscription_id,
                    dead_letter_subscription_id,
                    dead_letter_push_subscription_id,
                )
            ),
        ]

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Checks once.

        Queues that don't exist or can't be read have no value, because an outdated value would be
        misleading.
        """
        try:
            counts = await asyncio.gather(*map(self._admin.waiting_messages, self._subscriptions))
        except PenstockError as error:
            log.warning("queues could not be inspected", extra={"reason": error.message})
            MESSAGES.clear()
            return
        for subscription, count in zip(self._subscriptions, counts, strict=True):
            if count is None:
                MESSAGES.remove(subscription)
            else:
                MESSAGES.labels(subscription).set(count)


@dataclass(frozen=True)
class MessageSource:
    """A queue, the function that handles its messages, and the backoff before redelivery."""

    subscription_id: str
    function: str
    delays_s: tuple[float, ...]


def sources(catalog: Catalog) -> list[MessageSource]:
    dead_letters = [
        MessageSource(
            dead_letter_push_subscription_id(model.name),
            "dead_letter",
            delays_between(*DEAD_LETTER_RETRY_S),
        )
        for model in catalog.deployed
    ]
    return [
        MessageSource(WEBHOOKS_SUBSCRIPTION_ID, "webhook", delays_between(*WEBHOOK_RETRY_S)),
        *dead_letters,
    ]


class FunctionConsumer:
    """Runs functions for messages from their queues."""

    def __init__(self, transport: RabbitTransport, handlers: Mapping[str, Handler]) -> None:
        self._transport = transport
        self._handlers = handlers
        self._subscriptions: list[QueueSubscription] = []

    @property
    def is_connected(self) -> bool:
        """True if messages from every queue are being delivered."""
        return bool(self._subscriptions) and all(
            subscription.is_connected for subscription in self._subscriptions
        )

    @asynccontextmanager
    async def running(self, wanted: list[MessageSource]) -> AsyncIterator[None]:
        """Receives messages while the context is open. Messages still held at exit are finished."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as taking:
            self._subscriptions = [
                await stack.enter_async_context(
                    self._transport.subscribe(
                        source.subscription_id,
                        max_messages=MESSAGES_IN_HAND,
                        delays_s=source.delays_s,
                    )
                )
                for source in wanted
            ]
            for subscription, source in zip(self._subscriptions, wanted, strict=True):
                taking.create_task(self._take(subscription, source.function))
            try:
                yield
            finally:
                for subscription in self._subscriptions:
                    await subscription.stop()

    async def _take(self, subscription: QueueSubscription, function: str) -> None:
        """Handles messages until the subscription stops, with as much concurrency as it allows."""
        running: set[asyncio.Task[None]] = set()
        async for message in subscription:

            async def handle(message=message) -> None:  # type: ignore[no-untyped-def]
                if await handle_message(message, function, self._handlers[function]):
                    subscription.nack(message)
                else:
                    subscription.ack(message)

            task = asyncio.create_task(handle())
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            _, late = await asyncio.wait(running, timeout=STOP_LIMIT_S)
            for task in late:
                task.cancel()
