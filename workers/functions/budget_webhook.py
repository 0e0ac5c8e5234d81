"""Tells a tenant that a part of its budget is spent, as an event in the shape of OpenAI's.

The message has all that this needs. The retries are those of the other webhooks.
"""

from __future__ import annotations

import hashlib
import logging

import msgspec

from shared.transport import Message
from shared.webhook_urls import WebhookUrlForbidden
from shared.webhooks import BUDGET_WARNING, BudgetEvent, decode_budget_event
from workers.functions.webhook import WEBHOOKS, end_of, signed_headers
from workers.functions.webhook_client import WebhookClient

log = logging.getLogger(__name__)


class BudgetWebhooks:
    """Delivers warnings about budgets.

    Args:
        secrets: as for shared.webhooks.tenant_secrets.
        allow_private: as for WebhookClient.
    """

    def __init__(self, secrets: str, *, allow_private: bool) -> None:
        self._secrets = secrets
        self._allow_private = allow_private

    async def deliver(self, message: Message) -> None:
        """Delivers the warning of one message.

        Raises:
            UndecodableMessage: it is no warning.
            PenstockError: the delivery failed and is to be retried.
        """
        event = decode_budget_event(message.data)
        end = "failed"
        try:
            end = await self._post(event, message)
        finally:
            WEBHOOKS.labels(BUDGET_WARNING, end).inc()
        log.info("webhook", extra={"tenant": event.tenant, "event": BUDGET_WARNING, "end": end})

    async def _post(self, event: BudgetEvent, message: Message) -> str:
        event_id = _event_id(event)
        body = msgspec.json.encode(
            {
                "id": event_id,
                "object": "event",
                "created_at": int(event.created_at_s),
                "type": BUDGET_WARNING,
                "data": {
                    "tenant": event.tenant,
                    "api_key_id": event.key_id or None,
                    "month": event.month,
                    "share": event.share,
                    "budget_usd": event.budget_usd,
                    "spent_usd": event.spent_usd,
                },
            }
        )
        headers = signed_headers(self._secrets, event.tenant, event_id, body)
        try:
            client = WebhookClient(event.url, allow_private=self._allow_private)
            return end_of(await client.post(headers, body), message)
        except WebhookUrlForbidden as error:
            facts = {"tenant": event.tenant, "reason": error.message}
            log.warning("webhook forbidden", extra=facts)
            return "forbidden"


def _event_id(event: BudgetEvent) -> str:
    """The same whenever the same warning is announced again."""
    words = f"{event.tenant}\n{event.key_id}\n{event.month}\n{event.share}"
    return "evt_" + hashlib.sha256(words.encode()).hexdigest()[:32]
