"""Writes a row for each attempt to deliver an event. A delivery never fails for its row."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from prometheus_client import Counter

from shared.errors import PenstockError, Unavailable
from shared.usage.spool import Fields
from shared.usage.webhook_delivery import WebhookDelivery
from shared.usage.writer import fields_by_name
from shared.webhook_urls import WebhookUrlForbidden

WRITE_LIMIT_S = 3.0
"""A push is answered after the row, and Pub/Sub waits for the answer."""
RETRY_S = 15.0
"""How long nothing is written after a failure, so that an outage holds up one push and not all."""

UNWRITTEN = Counter(
    "penstock_functions_deliveries_unwritten_total",
    "Attempts to deliver an event without a row, because BigQuery did not take it in time",
)

log = logging.getLogger(__name__)


class DeliveryTable(Protocol):
    """Where rows go."""

    async def insert(self, rows: list[Fields]) -> None:
        """Returns once the table has `rows`.

        Raises:
            Unavailable: it can't be said that it has.
        """


class Deliveries:
    """Tells of attempts.

    Args:
        table: takes the rows.
        region: where this runs.
        clock: returns monotonic seconds. Tests replace it.
    """

    def __init__(
        self, table: DeliveryTable, region: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table = table
        self._region = region
        self._clock = clock
        self._silent_until_s = float("-inf")

    @asynccontextmanager
    async def told(self, delivery: WebhookDelivery) -> AsyncIterator[None]:
        """A block that makes the attempt, and sets `status_code` and `outcome` of its row."""
        began_s = time.time()
        try:
            yield
        except WebhookUrlForbidden:
            delivery.outcome = delivery.error = "forbidden"
            raise
        except PenstockError:
            if delivery.status_code is None:
                delivery.error = "unreachable"
            raise
        finally:
            ended_s = time.time()
            delivery.row_id = f"{delivery.delivery_id}:{int(began_s * 1000)}"
            delivery.region = self._region
            delivery.delivered_at_s = ended_s
            delivery.duration_ms = (ended_s - began_s) * 1000
            await self._write(delivery)

    async def _write(self, delivery: WebhookDelivery) -> None:
        if self._clock() < self._silent_until_s:
            UNWRITTEN.inc()
            return
        try:
            async with asyncio.timeout(WRITE_LIMIT_S):
                await self._table.insert([fields_by_name(delivery)])
        except (Unavailable, TimeoutError) as error:
            self._silent_until_s = self._clock() + RETRY_S
            UNWRITTEN.inc()
            log.warning("delivery without a row", extra={"reason": str(error) or "no answer"})
