"""Writes a row for each attempt to deliver an event.

Problems with rows never cause a delivery to fail.

Redis holds the delivery state: when output was last sent, and which predictions have finished. This
is only for ordering and rate limiting. Without Redis, events are still delivered, possibly more
than once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Literal, Protocol

from prometheus_client import Counter, Gauge

from shared.errors import PenstockError, Unavailable
from shared.stores.redis_client import KEY_PREFIX, RedisLink, RedisStore, load_script
from shared.usage.bigquery import Fields
from shared.usage.webhook_delivery import WebhookDelivery
from shared.usage.writer import fields_by_name
from shared.webhooks.event import WebhookUrlForbidden

THROTTLE_MS = 500
"""Minimum interval between output or log events (https://replicate.com/docs/topics/webhooks)."""
KEEP_S = 2 * 24 * 3600
"""How long delivery state is kept, which is longer than an event can wait in its topic."""
THROTTLED = frozenset({"output", "logs"})

ERRORS = Counter(
    "penstock_functions_notes_errors_total",
    "Failed round trips to Redis about webhooks.",
    ["operation"],
)
UP = Gauge("penstock_functions_notes_redis_up", "1 while Redis is being asked about webhooks.")

_ADMIT = load_script("workers/functions/admit_event.lua")

DeliveryDecision = Literal["due", "throttled", "late"]

WRITE_LIMIT_S = 3.0
"""Time limit for writing a row. A push is acknowledged only after its row is written, and Pub/Sub
waits for that.
"""
RETRY_S = 15.0
"""After a failure, no rows are written for this long, so an outage delays only one push."""

UNWRITTEN = Counter(
    "penstock_functions_deliveries_unwritten_total",
    "Attempts to deliver an event whose row is missing, because BigQuery did not accept it in time",
)

log = logging.getLogger(__name__)


class DeliveryState(RedisStore):
    """Predictions' delivery state.

    An async context manager that can be entered even if Redis is unavailable.
    """

    def __init__(self, redis_url: str) -> None:
        super().__init__(RedisLink("webhooks", redis_url, timeout_s=0.25, up=UP, errors=ERRORS))
        self._commands = self._link.commands("the webhook delivery state")

    async def admit(self, record: str, event: str) -> DeliveryDecision:
        """Returns whether an event is due, late, or too soon after the previous one of its kind."""
        sent_key, spare_ms = self._key(record, event), THROTTLE_MS if event in THROTTLED else 0
        answer = None
        with contextlib.suppress(Unavailable):  # better to send an event twice than not at all
            answer = await self._commands.run_script(
                _ADMIT, [self._key(record, "done"), sent_key], spare_ms
            )
        decisions: dict[bytes | None, DeliveryDecision] = {
            b"throttled": "throttled",
            b"late": "late",
        }
        return decisions.get(answer, "due")

    async def close(self, record: str) -> None:
        """Ends deliveries for this prediction. No event is due after this."""
        with contextlib.suppress(Unavailable):
            await self._commands.run("SET", self._key(record, "done"), 1, "EX", KEEP_S)

    async def read_refused_since(self, delivery_id: str, now_s: float) -> float | None:
        """Returns when an event was first rejected, in Unix seconds.

        Returns `now_s` if this is its first rejection, or None if it is unknown.
        """
        key = self._key(delivery_id, "refused")
        with contextlib.suppress(Unavailable):
            await self._commands.run("SET", key, now_s, "NX", "EX", KEEP_S)
            value = await self._commands.run("GET", key)
            return None if value is None else float(value)
        return None

    def _key(self, record: str, kind: str) -> str:
        return f"{KEY_PREFIX}webhook:{record}:{kind}"


class DeliveryTable(Protocol):
    """The destination of rows."""

    async def insert(self, rows: list[Fields]) -> None:
        """Returns once `rows` are in the table.

        Raises:
            Unavailable: it is unknown whether the rows were inserted.
        """


class Deliveries:
    """Records attempts."""

    def __init__(
        self, table: DeliveryTable, region: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._table = table
        self._region = region
        self._clock = clock
        self._silent_until_s = float("-inf")

    @asynccontextmanager
    async def record(self, delivery: WebhookDelivery) -> AsyncIterator[None]:
        """A context for an attempt, which sets the `status_code` and `outcome` of its row."""
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
