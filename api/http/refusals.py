"""Writes a row for each rejected request, because rejected requests have no items yet.

Requests without a valid key do not produce rows, so that they can't fill up the table. Metrics
count both kinds of rejected requests. The row contains nothing sent by the caller except the
`x-request-id`.
"""

from __future__ import annotations

import time

from api.http.middleware import RequestContext
from shared.usage.row import Row, RowSink


class Refusals:
    """Writes rows for rejected requests."""

    def __init__(self, rows: RowSink, *, api_instance: str, region: str) -> None:
        self._rows = rows
        self._api_instance = api_instance
        self._region = region

    def write_row(self, context: RequestContext) -> None:
        """Writes the row for a request that was just rejected."""
        columns = context.facts.row_columns()
        if context.options is None:  # rejected before its priority was read
            columns["priority"] = None
        self._rows.write(
            Row(
                row_id=f"{context.facts.request_id}:refused",
                item=0,
                model=context.model,
                status="refused",
                region=self._region,
                api_instance=self._api_instance,
                replied_at_s=time.time(),
                total_ms=context.total_ms,
                error_code=context.error_code or None,
                cost_usd=0.0,
                charged_share=0.0,
                **columns,
            )
        )
