"""How many messages wait in the queues of RabbitMQ, as a metric. Pub/Sub has one of its own."""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import Gauge

from shared.catalog import Catalog
from shared.errors import PenstockError
from shared.rabbitmq.admin import RabbitAdmin
from shared.topics import (
    WEBHOOKS_SUBSCRIPTION_ID,
    batch_subscription_id,
    dead_letter_push_subscription_id,
    dead_letter_subscription_id,
    workers_subscription_id,
)

EVERY_S = 15.0
MESSAGES = Gauge(
    "penstock_queue_messages",
    "Messages in a queue of RabbitMQ that no consumer has in hand",
    ["subscription"],
)

log = logging.getLogger(__name__)


class QueueDepths:
    """Looks at the queues of a catalog's models now and then.

    Args:
        admin: an open connection.
        catalog: the models.
    """

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
        """Looks until canceled."""
        while True:
            await self.look()
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Looks once. A queue that can't be asked has no value: an old one would mislead."""
        try:
            found = await asyncio.gather(*map(self._admin.waiting_messages, self._subscriptions))
        except PenstockError as error:
            log.warning("queues could not be looked at", extra={"reason": error.message})
            MESSAGES.clear()
            return
        for subscription, count in zip(self._subscriptions, found, strict=True):
            if count is not None:
                MESSAGES.labels(subscription).set(count)
