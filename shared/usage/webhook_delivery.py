"""The row for one attempt to deliver an event, in the `webhook_deliveries` table."""

from __future__ import annotations

import msgspec

TABLE = "webhook_deliveries"


class WebhookDelivery(msgspec.Struct, kw_only=True):
    """One attempt. infra/bigquery/webhook_deliveries.schema.json describes each column.

    Times are Unix seconds.
    """

    row_id: str = ""
    delivery_id: str
    request_id: str | None = None
    batch_id: str | None = None
    tenant: str
    model: str | None = None
    event: str
    attempt: int | None = None
    outcome: str = "failed"
    status_code: int | None = None
    error: str | None = None
    duration_ms: float = 0.0
    published_at_s: float | None = msgspec.field(name="published_at", default=None)
    delivered_at_s: float = msgspec.field(name="delivered_at", default=0.0)
    region: str | None = None

    def note_answer(self, status: int) -> None:
        """Records the status of the receiver's response, and an error if it was a redirect."""
        self.status_code = status
        if 300 <= status < 400:
            self.error = "redirected"
