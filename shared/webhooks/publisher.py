"""Publishes webhook events, for the API, the workers, and the dead-letter function."""

from __future__ import annotations

import logging
from collections.abc import Collection

from shared.broker.transport import WEBHOOKS_TOPIC_ID, Publisher
from shared.errors import PenstockError
from shared.tracing.spans import current
from shared.webhooks.event import (
    BatchEvent,
    BudgetEvent,
    EventName,
    WebhookEvent,
    encode_batch_event,
    encode_budget_event,
    encode_webhook_event,
)

log = logging.getLogger(__name__)


class WebhookPublisher:
    """Publishes prediction events, batch completions, and budget warnings."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def publish(
        self, record: str, subscribed: Collection[str], event: EventName, sequence: int = 0
    ) -> None:
        """Publishes the prediction `record`'s `event` if it is among the `subscribed` events.

        The event carries the current trace.

        Raises:
            PenstockError: see Publisher.publish.
        """
        if event in subscribed:
            data, attributes = encode_webhook_event(WebhookEvent(record, event, sequence))
            trace = current()
            await self._publisher.publish(
                WEBHOOKS_TOPIC_ID, data, attributes | (trace.attributes() if trace else {})
            )

    async def publish_batch(self, event: BatchEvent) -> None:
        """Announces that a batch has finished.

        Raises:
            PenstockError: see Publisher.publish.
        """
        data, attributes = encode_batch_event(event)
        await self._publisher.publish(WEBHOOKS_TOPIC_ID, data, attributes)

    async def publish_budget(self, event: BudgetEvent) -> None:
        """Announces that a share of a budget has been spent.

        Raises:
            PenstockError: see Publisher.publish.
        """
        data, attributes = encode_budget_event(event)
        await self._publisher.publish(WEBHOOKS_TOPIC_ID, data, attributes)

    async def replay(self, record: str) -> None:
        """Announces again that the prediction `record` has finished.

        Raises:
            PenstockError: see Publisher.publish.
        """
        data, attributes = encode_webhook_event(WebhookEvent(record, "completed", is_replay=True))
        await self._publisher.publish(WEBHOOKS_TOPIC_ID, data, attributes)

    async def try_publish(
        self, record: str, subscribed: Collection[str], event: EventName, sequence: int = 0
    ) -> None:
        """Same as `publish`, but a failure is only logged. In that case, the event is lost."""
        try:
            await self.publish(record, subscribed, event, sequence)
        except PenstockError as error:
            facts = {"record": record, "event": event, "reason": error.message}
            log.warning("webhook event not published", extra=facts)
