"""Sends the end of a batch to its webhook, as an event in the shape of OpenAI's.

The message has all that this needs. The retries are those of the other webhooks.
"""

from __future__ import annotations

import hashlib
import logging

import msgspec

from shared.transport import Message
from shared.webhook_urls import WebhookUrlForbidden
from shared.webhooks import BatchEvent, decode_batch_event
from workers.functions.webhook import WEBHOOKS, end_of, signed_headers
from workers.functions.webhook_client import WebhookClient

log = logging.getLogger(__name__)


class BatchWebhooks:
    """Delivers the ends of batches.

    Args:
        secrets: as for shared.webhooks.tenant_secrets.
        allow_private: as for WebhookClient.
    """

    def __init__(self, secrets: str, *, allow_private: bool) -> None:
        self._secrets = secrets
        self._allow_private = allow_private

    async def deliver(self, message: Message) -> None:
        """Delivers the event of one message.

        Raises:
            UndecodableMessage: it is no end of a batch.
            PenstockError: the delivery failed and is to be retried.
        """
        event = decode_batch_event(message.data)
        end = "failed"
        try:
            end = await self._post(event, message)
        finally:
            WEBHOOKS.labels(event.event, end).inc()
        log.info("webhook", extra={"batch": event.batch, "event": event.event, "end": end})

    async def _post(self, event: BatchEvent, message: Message) -> str:
        event_id = _event_id(event)
        body = msgspec.json.encode(
            {
                "id": event_id,
                "object": "event",
                "created_at": int(event.created_at_s),
                "type": event.event,
                "data": {"id": event.batch},
            }
        )
        headers = signed_headers(self._secrets, event.tenant, event_id, body)
        try:
            client = WebhookClient(event.url, allow_private=self._allow_private)
            return end_of(await client.post(headers, body), message)
        except WebhookUrlForbidden as error:
            facts = {"batch": event.batch, "reason": error.message}
            log.warning("webhook forbidden", extra=facts)
            return "forbidden"


def _event_id(event: BatchEvent) -> str:
    """The same whenever the end is announced again."""
    return "evt_" + hashlib.sha256(f"{event.batch}\n{event.event}".encode()).hexdigest()[:32]
