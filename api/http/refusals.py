"""Writes the row of a refused request: one per request, since it has no items yet.

Callers without a valid key leave no row, so that they can't fill the table. Metrics count both. The
row holds nothing from the caller except its `x-request-id`.
"""

from __future__ import annotations

import time

from api.http.middleware import RequestContext
from shared.usage.row import Row, RowSink


class Refusals:
    """Writes the rows of refused requests."""

    def __init__(self, rows: RowSink, *, api_instance: str, region: str) -> None:
        self._rows = rows
        self._api_instance = api_instance
        self._region = region

    def write_row(self, context: RequestContext) -> None:
        """Writes the row of a request that was just refused."""
        options = context.options
        self._rows.write(
            Row(
                row_id=f"{context.request_id}:refused",
                request_id=context.request_id,
                item=0,
                model=context.model,
                received_at_s=context.received_at_s,
                status="refused",
                tenant=context.tenant,
                region=self._region,
                api_instance=self._api_instance,
                replied_at_s=time.time(),
                total_ms=context.total_ms,
                error_code=context.error_code or None,
                cost_usd=0.0,
                client_request_id=context.client_request_id or None,
                charged_share=0.0,
                key_id=context.key_id or None,
                plan=context.plan or None,
                priority=(options.lane or "interactive") if options else None,
                user_agent_family=(options.user_agent_family or None) if options else None,
            )
        )
