"""Takes the functions' messages from RabbitMQ, which pushes to nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from shared.catalog import Catalog
from shared.rabbitmq.client import RabbitTransport
from shared.rabbitmq.delays import delays_between
from shared.rabbitmq.subscriber import QueueSubscription
from shared.topics import (
    DEAD_LETTER_RETRY_S,
    WEBHOOK_RETRY_S,
    WEBHOOKS_SUBSCRIPTION_ID,
    dead_letter_push_subscription_id,
)
from workers.functions.handler import Handler, handle_message

MESSAGES_IN_HAND = 128
"""Of each queue. Receivers of webhooks are slow, and must not hold up each other."""
STOP_LIMIT_S = 20.0
"""How long messages in hand may take once the process is to stop. The others come again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MessageSource:
    """A queue, the function for its messages, and the pauses before they come again."""

    subscription_id: str
    function: str
    delays_s: tuple[float, ...]


def sources(catalog: Catalog) -> list[MessageSource]:
    """The queues with the functions' messages."""
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
    """Runs the functions for the messages of their queues.

    Args:
        transport: an open connection.
        handlers: by function.
    """

    def __init__(self, transport: RabbitTransport, handlers: Mapping[str, Handler]) -> None:
        self._transport = transport
        self._handlers = handlers
        self._subscriptions: list[QueueSubscription] = []

    @property
    def is_connected(self) -> bool:
        """Whether messages of every queue come."""
        return bool(self._subscriptions) and all(
            subscription.is_connected for subscription in self._subscriptions
        )

    @asynccontextmanager
    async def running(self, wanted: list[MessageSource]) -> AsyncIterator[None]:
        """Takes messages while the block runs. What is in hand at its end is finished."""
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
        """Handles messages until the subscription stops, as many at once as it gives."""
        running: set[asyncio.Task[None]] = set()
        async for message in subscription:

            async def handled(message=message) -> None:  # type: ignore[no-untyped-def]
                if await handle_message(message, function, self._handlers[function]):
                    subscription.nack(message)
                else:
                    subscription.ack(message)

            task = asyncio.create_task(handled())
            running.add(task)
            task.add_done_callback(running.discard)
        if running:
            _, late = await asyncio.wait(running, timeout=STOP_LIMIT_S)
            for task in late:
                task.cancel()
