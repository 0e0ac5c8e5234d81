"""Sends rows to BigQuery, or to the object store for loading into BigQuery later.

The object store receives rows as compressed JSON lines. Each call puts one object into
`incoming/TABLE`, where the row archive (infra/row_archive) picks it up. The object's name starts
with the time, so that the oldest is listed first, and ends with a digest of its data. Rows that are
resent after a lost response may be stored twice. The archive drops the duplicates it sees, and the
`rows_deduplicated` view drops the rest.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Protocol

from shared.settings import Settings
from shared.stores.objects import ObjectStore
from shared.usage.bigquery import LEVEL, WRITTEN, BigQuerySender, RowLine

MEDIA_TYPE = "application/gzip"
SUFFIX = ".jsonl.gz"

TABLE = "rows"


def incoming(table: str) -> str:
    """Returns the folder for the rows of a table that are not in the archive yet."""
    return f"incoming/{table}"


class ObjectSender:
    """Puts one table's rows into the object store.

    Args:
        url: URL of the store: file://, gs://, or s3://.

    Raises:
        ConfigurationError: the URL has a different form, or its folder can't be created.
    """

    linger_s = 10.0
    """Each put costs money, and so does each object that is read later."""

    def __init__(self, url: str, table: str) -> None:
        self._objects = ObjectStore(url, setting="rows_url")
        self._table = table

    def send(self, rows: Sequence[RowLine]) -> list[tuple[RowLine, str]]:
        """Returns once the rows are stored. Never rejects rows.

        Raises:
            Unavailable: the rows may or may not have been stored.
        """
        lines = b"".join(row + b"\n" for row in rows)
        packed = gzip.compress(lines, LEVEL, mtime=0)
        digest = hashlib.blake2b(packed, digest_size=16).hexdigest()
        sent_at = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"
        key = f"{incoming(self._table)}/{sent_at}-{digest}{SUFFIX}"
        asyncio.run(self._objects.put(key, packed, MEDIA_TYPE))
        WRITTEN.inc(len(rows))
        return []


class RowSender(Protocol):
    """Sends one table's rows. Calls block, and may come from several threads."""

    @property
    def linger_s(self) -> float:
        """How long to wait for more rows before sending, in seconds."""
        ...

    def send(self, rows: Sequence[RowLine]) -> list[tuple[RowLine, str]]:
        """Returns any permanently rejected rows, with the reasons, once all other rows are safe.

        Raises:
            Unavailable: the rows may or may not be safe. Send them again.
        """
        ...


def sender_of(settings: Settings, table: str = TABLE) -> RowSender:
    """Returns the sender selected by the settings.

    Raises:
        ConfigurationError: PENSTOCK_ROWS_URL is not an object store URL.
    """
    if settings.rows_url:
        return ObjectSender(settings.rows_url, table)
    return BigQuerySender(
        settings.project, f"{settings.dataset}.{table}", settings.bigquery_endpoint
    )
