"""Sends ends of batches and warnings about budgets, as events in the shape of OpenAI's.

The message has all that this needs. The retries are those of the other webhooks.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any, NamedTuple

import msgspec

from shared.transport import Message
from shared.usage.webhook_delivery import WebhookDelivery
from shared.webhook_urls import WebhookUrlForbidden
from shared.webhooks import (
    BUDGET_WARNING,
    BatchEvent,
    BudgetEvent,
    decode_batch_event,
    decode_budget_event,
)
from workers.functions.deliveries import Deliveries
from workers.functions.delivery_state import DeliveryState
from workers.functions.receiver_turns import ReceiverBusy, ReceiverTurns, Turn
from workers.functions.webhook import WEBHOOKS, end_of, signed_headers
from workers.functions.webhook_client import WebhookClient

log = logging.getLogger(__name__)
ATTRIBUTES = frozenset({"batch", "budget"})
"""A message with one of these attributes has such an event."""


class _Notice(NamedTuple):
    """What the receiver is told."""

    kind: str
    identity: str
    """The same whenever the event is announced again, so its id is too."""
    data: dict[str, Any]
    facts: dict[str, str]
    """For logs."""


class EventWebhooks:
    """Delivers these events.

    Args:
        secrets: as for shared.webhooks.tenant_secrets.
        deliveries: tells of each attempt.
        delivery_state: remembers refusals.
        turns: those of all deliveries of this process.
        allow_private: as for WebhookClient.
    """

    def __init__(
        self,
        secrets: str,
        deliveries: Deliveries,
        delivery_state: DeliveryState,
        turns: ReceiverTurns,
        *,
        allow_private: bool,
    ) -> None:
        self._secrets = secrets
        self._delivery_state = delivery_state
        self._turns = turns
        self._deliveries = deliveries
        self._allow_private = allow_private

    async def deliver(self, message: Message) -> None:
        """Delivers the event of one message.

        Raises:
            UndecodableMessage: it has no such event.
            PenstockError: the delivery failed and is to be retried.
        """
        event: BatchEvent | BudgetEvent
        if "batch" in message.attributes:
            event = decode_batch_event(message.data)
            notice = _notice_of_batch(event)
        else:
            event = decode_budget_event(message.data)
            notice = _notice_of_budget(event)
        end = "failed"
        try:
            async with self._turns.taken(event.tenant, event.url) as turn:
                end = await self._post(event, notice, message, turn)
        except ReceiverBusy:
            end = "deferred"
            raise
        finally:
            WEBHOOKS.labels(notice.kind, end).inc()
        log.info("webhook", extra={**notice.facts, "event": notice.kind, "end": end})

    async def _post(
        self, event: BatchEvent | BudgetEvent, notice: _Notice, message: Message, turn: Turn
    ) -> str:
        event_id = "evt_" + hashlib.sha256(notice.identity.encode()).hexdigest()[:32]
        body = msgspec.json.encode(
            {
                "id": event_id,
                "object": "event",
                "created_at": int(event.created_at_s),
                "type": notice.kind,
                "data": notice.data,
            }
        )
        headers = signed_headers(self._secrets, event.tenant, event_id, body)
        delivery = WebhookDelivery(
            delivery_id=event_id,
            batch_id=notice.facts.get("batch"),
            tenant=event.tenant,
            event=notice.kind,
            published_at_s=message.publish_time_s or None,
        )
        try:
            async with self._deliveries.told(delivery):
                client = WebhookClient(event.url, allow_private=self._allow_private)
                with turn.posting():
                    answer = await client.post(headers, body)
                delivery.status_code = answer.status
                end = await end_of(answer, message, event_id, self._delivery_state)
                delivery.outcome = end
            return end
        except WebhookUrlForbidden as error:
            log.warning("webhook forbidden", extra={**notice.facts, "reason": error.message})
            return "forbidden"


def _notice_of_batch(event: BatchEvent) -> _Notice:
    identity = f"{event.batch}\n{event.event}"
    return _Notice(event.event, identity, {"id": event.batch}, {"batch": event.batch})


def _notice_of_budget(event: BudgetEvent) -> _Notice:
    data = {
        "tenant": event.tenant,
        "api_key_id": event.key_id or None,
        "month": event.month,
        "share": event.share,
        "budget_usd": event.budget_usd,
        "spent_usd": event.spent_usd,
    }
    identity = f"{event.tenant}\n{event.key_id}\n{event.month}\n{event.share}"
    return _Notice(BUDGET_WARNING, identity, data, {"tenant": event.tenant})
