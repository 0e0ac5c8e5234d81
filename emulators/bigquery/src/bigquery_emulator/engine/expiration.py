"""Removes expired tables and partitions once a minute."""

import logging
import time

import anyio
import duckdb

from bigquery_emulator.engine.service import BigQueryService
from bigquery_emulator.errors import ServiceError
from bigquery_emulator.store import Store
from bigquery_emulator.tables.catalog import TableCatalog
from bigquery_emulator.tables.resources import TableResource
from bigquery_emulator.tables.schema import quoted

_EVERY_S = 60.0
log = logging.getLogger(__name__)


async def expire_forever(service: BigQueryService) -> None:
    """Runs as a task of the server until it is canceled."""
    while True:
        await service.threads.write_in_job(
            expire, service.store, service.catalog, time.time_ns() // 1_000_000
        )
        await anyio.sleep(_EVERY_S)


def expire(store: Store, catalog: TableCatalog, now_ms: int) -> None:
    """Removes everything that has expired by `now_ms` (Unix milliseconds).

    Runs in the server's writer thread.
    """
    for table in list(catalog.tables.values()):
        try:
            _expire_table(store, catalog, table, now_ms)
        except (ServiceError, ValueError, TypeError, KeyError, ArithmeticError, duckdb.Error):
            # An unreadable table must not affect other tables or the server.
            log.exception("the expiration of %s can't be applied", table.key)


def _expire_table(store: Store, catalog: TableCatalog, table: TableResource, now_ms: int) -> None:
    expiration_ms = table.settings.get("expirationTime")
    if expiration_ms is not None and int(expiration_ms) <= now_ms:
        catalog.delete_table(table.key)
    elif table.partitioning is not None and table.partitioning.expiration_ms is not None:
        _expire_partitions(store, table, now_ms)


def _expire_partitions(store: Store, table: TableResource, now_ms: int) -> None:
    partitioning = table.partitioning
    assert partitioning is not None
    # A partition's expiration is relative to its start, no matter what times its rows have.
    column = quoted(partitioning.column)
    start = f"date_trunc('{partitioning.unit.lower()}', CAST({column} AS TIMESTAMP))"
    with store.transaction() as cursor:
        cursor.execute(
            f"DELETE FROM {table.physical} WHERE {start} <="
            " make_timestamp(CAST(? AS BIGINT) * 1000)",
            [now_ms - (partitioning.expiration_ms or 0)],
        )
