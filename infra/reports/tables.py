"""Creates the usage tables in the configured BigQuery and checks that they exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from infra import bigquery as usage
from shared.errors import Unavailable
from shared.reports.runner import RETRY_LIMIT_S, translate_errors
from shared.settings import Settings
from shared.usage.bigquery import open_client

if TYPE_CHECKING:
    from google.cloud.bigquery import Client


def create_tables(settings: Settings) -> None:
    """Creates or updates the dataset, tables and views.

    Raises:
        Unavailable: BigQuery is unreachable or rejected a request.
    """
    with _connect(settings) as client:
        # Fails immediately if BigQuery is unreachable. The calls below would otherwise retry for
        # ten minutes.
        next(iter(client.list_datasets(max_results=1, retry=None, timeout=RETRY_LIMIT_S)), None)
        usage.create(client, settings.dataset)


def check_bigquery(settings: Settings, timeout_s: float) -> None:
    """Checks that the usage tables exist and have all columns that this release needs.

    Raises:
        Unavailable: BigQuery is unreachable, or a table or column is missing.
    """
    with _connect(settings) as client:
        for name in usage.tables():
            table = client.get_table(f"{settings.dataset}.{name}", retry=None, timeout=timeout_s)
            known = {field.name for field in table.schema}
            missing = [field["name"] for field in usage.schema(name) if field["name"] not in known]
            if missing:
                raise Unavailable(
                    f"table {name} is missing {', '.join(missing)}; apply Terraform or run "
                    "penstock provision"
                )


@contextmanager
def _connect(settings: Settings) -> Iterator[Client]:
    with (
        translate_errors(),
        closing(open_client(settings.project, settings.bigquery_endpoint)) as client,
    ):
        yield client
