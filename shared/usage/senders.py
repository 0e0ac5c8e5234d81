"""Where rows go: to BigQuery, or to the object store, from where BigQuery is filled later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.settings import Settings
from shared.usage.bigquery import BigQuerySender
from shared.usage.object_rows import ObjectSender
from shared.usage.spool import Fields

TABLE = "rows"


class RowSender(Protocol):
    """Takes rows of one table. Calls block, and come from several threads."""

    @property
    def linger_s(self) -> float:
        """How long rows should wait for more rows."""
        ...

    def send(self, rows: Sequence[Fields]) -> list[tuple[Fields, str]]:
        """Returns once the rows are safe. Returns those that are refused for good, with the reason.

        Raises:
            Unavailable: it can't be said that they are. Send them again.
        """
        ...


def sender_of(settings: Settings, table: str = TABLE) -> RowSender:
    """The sender that the settings name.

    Args:
        settings: of this process.
        table: which table.

    Raises:
        ConfigurationError: PENSTOCK_ROWS_URL is no URL of an object store.
    """
    if settings.rows_url:
        return ObjectSender(settings.rows_url, table)
    return BigQuerySender(
        settings.project, f"{settings.dataset}.{table}", settings.bigquery_endpoint
    )
