"""Access to the embedded BigQuery with Google's own client."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud import bigquery

from tests.limits import WAIT_LIMIT_S


@contextmanager
def connected(endpoint: str, project: str) -> Iterator[bigquery.Client]:
    client = bigquery.Client(
        project=project,
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": endpoint},
    )
    with closing(client):
        yield client


def rows_of(client: bigquery.Client, sql: str, **config: Any) -> list[tuple[Any, ...]]:
    """A query's result, run the way users run it."""
    job_config = bigquery.QueryJobConfig(**config) if config else None
    return [
        row.values()
        for row in client.query(sql, job_config=job_config).result(timeout=WAIT_LIMIT_S)
    ]
