"""Writes a subscription's messages to its BigQuery table, in batches.

The loop is a consumer, just like a stream, so the subscription handles leases, backoff, ordering
and dead letters. If BigQuery does not respond, the batch is nacked; a message that does not fit the
table is nacked too. A missing table does not count as an attempt: messages wait for it and never
become dead letters. Sources:
    https://cloud.google.com/pubsub/docs/bigquery#handle_message_failures and
    https://cloud.google.com/pubsub/docs/bigquery-troubleshooting
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from pubsub_emulator.bigquery.rows import Columns, Row, RowRefused, missing_columns, row_of
from pubsub_emulator.bigquery.table import BigQueryTable, TableUnavailable, TableUnusable
from pubsub_emulator.state.ack_calls import acknowledge, modify_ack_deadline
from pubsub_emulator.state.consumers import Consumer, Delivery
from pubsub_emulator.state.subscription import SubscriptionState

MOST_ROWS = 1000
"""Maximum rows per insertAll."""
LINGER_S = 0.1
"""How long messages wait so that they can share a request. One request per message would put more
load on BigQuery.
"""
# Uses the same backoff as push. The service's documentation compares the two.
SHORTEST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 60.0

_log = logging.getLogger(__name__)


class BigQueryLoop:
    """A subscription's loop.

    Args:
        endpoint: URL of the BigQuery server that has the subscription's table.
    """

    def __init__(self, subscription: SubscriptionState, endpoint: str) -> None:
        self._subscription = subscription
        self._table = BigQueryTable(endpoint, subscription.proto.bigquery_config)
        self._columns: Columns | None = None
        self._failures = 0

    async def run(self) -> None:
        """Write batches and wait for more messages until the task is canceled."""
        woken = asyncio.Event()
        consumer = Consumer(woken.set, self._timeout_s)
        try:
            while True:
                await asyncio.sleep(self._pause_s())
                woken.clear()
                consumer.ack_deadline_s = self._timeout_s
                if not await self._is_usable():
                    continue
                deliveries = self._subscription.backlog.take(consumer, MOST_ROWS)
                if deliveries:
                    await self._write(deliveries)
                else:
                    await woken.wait()
        finally:
            self._table.close()
            self._subscription.leave(consumer)

    @property
    def _timeout_s(self) -> float:
        return self._subscription.settings.ack_deadline_s

    async def _is_usable(self) -> bool:
        """Check the table, unless it was usable the last time. Publishes the result."""
        if self._columns is not None:
            return True
        try:
            async with asyncio.timeout(self._timeout_s):
                columns = await self._table.columns()
            missing = missing_columns(self._subscription.proto.bigquery_config, columns)
            if missing:
                why = f"the table has no column {', '.join(missing)}"
                raise TableUnusable("SCHEMA_MISMATCH", why)
        except TableUnusable as error:
            self._note_unusable(error)
            return False
        except (TableUnavailable, TimeoutError) as error:
            self._note_failure(str(error) or f"no response within {self._timeout_s} s")
            return False
        self._columns = columns
        self._subscription.show_bigquery_state("ACTIVE")
        return True

    async def _write(self, deliveries: Sequence[Delivery]) -> None:
        rows, refused = self._rows_of(deliveries)
        try:
            async with asyncio.timeout(self._timeout_s):
                places = list(rows)
                answered = await self._table.insert(list(rows.values())) if rows else {}
        except TableUnusable as error:
            self._note_unusable(error)
            self._subscription.backlog.return_untried(deliveries)
            return
        except (TableUnavailable, TimeoutError) as error:
            why = str(error) or f"no response within {self._timeout_s} s"
            self._note_failure(why)
            self._nack(deliveries, dict.fromkeys(range(len(deliveries)), why))
            return
        refused |= {places[place]: why for place, why in answered.items()}
        self._settle(deliveries, refused)

    def _rows_of(self, deliveries: Sequence[Delivery]) -> tuple[dict[int, Row], dict[int, str]]:
        """Return the rows, and why some messages yield no row, keyed by index in `deliveries`."""
        rows, refused = dict[int, Row](), dict[int, str]()
        config, path = self._subscription.proto.bigquery_config, self._subscription.path
        for place, delivery in enumerate(deliveries):
            try:
                rows[place] = row_of(path, config, self._columns or {}, delivery.message.proto)
            except RowRefused as error:
                refused[place] = str(error)
        return rows, refused

    def _settle(self, deliveries: Sequence[Delivery], refused: Mapping[int, str]) -> None:
        backlog = self._subscription.backlog
        written = [
            backlog.ack_ids.of(delivery)
            for place, delivery in enumerate(deliveries)
            if place not in refused
        ]
        acknowledge(backlog, written)
        self._subscription.touch()
        has_dead_letters = self._subscription.settings.max_delivery_attempts > 0
        if written or has_dead_letters:
            self._failures = 0
        if not refused:
            return
        self._columns = None  # the schema may have changed
        if not has_dead_letters:
            self._failures += 1
        _log.info(
            "BigQuery refused rows",
            extra={
                "subscription": self._subscription.path,
                "outcome": next(iter(refused.values())),
            },
        )
        self._nack(deliveries, refused)

    def _nack(self, deliveries: Sequence[Delivery], reasons: Mapping[int, str]) -> None:
        backlog = self._subscription.backlog
        for place, why in reasons.items():
            deliveries[place].failure = why
            modify_ack_deadline(backlog, [backlog.ack_ids.of(deliveries[place])], [0])

    def _note_unusable(self, error: TableUnusable) -> None:
        self._columns = None
        self._subscription.show_bigquery_state(error.state)
        self._note_failure(f"{error.state}: {error}")

    def _note_failure(self, why: str) -> None:
        self._failures += 1
        _log.info(
            "BigQuery did not take messages",
            extra={"subscription": self._subscription.path, "outcome": why},
        )

    def _pause_s(self) -> float:
        if self._failures == 0:
            return LINGER_S
        return float(min(SHORTEST_PAUSE_S * 2.0 ** min(self._failures - 1, 30), LONGEST_PAUSE_S))
