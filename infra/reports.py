"""Creates the usage table on the configured BigQuery, and runs the shipped reports.

Errors of Google's client are translated here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from rich.console import Console

from infra import bigquery as usage
from infra.text_table import table
from shared.errors import BadInput, Unavailable
from shared.settings import Settings

if TYPE_CHECKING:
    from google.cloud.bigquery import Client

QUERY_LIMIT_S = 60.0
RETRY_LIMIT_S = 5.0
"""The default of the client is ten minutes, too long for a command."""


def list_reports(*, as_json: bool = False) -> None:
    """Prints the shipped reports."""
    rows = [(report.name, report.title) for report in usage.reports().values()]
    print(_json(("report", "shows"), rows) if as_json else table(("report", "shows"), rows))


def show_report(settings: Settings, name: str, days: int, *, as_json: bool = False) -> None:
    """Prints one report over the last `days` days.

    Raises:
        BadInput: the report does not exist.
        Unavailable: BigQuery is out of reach or refused the query.
    """
    with Console(stderr=True).status("waiting for BigQuery"):  # shown on a terminal only
        heads, rows = run_report(settings, name, days)
    if as_json:
        print(_json(heads, rows))
    else:
        print(table(heads, rows) if rows else f"no rows in the last {days} days")


def _json(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The rows as objects. Times and decimals, which JSON lacks, become strings."""
    return json.dumps([dict(zip(heads, row, strict=True)) for row in rows], indent=2, default=str)


def run_report(settings: Settings, name: str, days: int) -> tuple[list[str], list[tuple[Any, ...]]]:
    """Returns the columns and rows of a report on the requests of the last `days` days.

    Raises:
        BadInput: the report does not exist.
        Unavailable: BigQuery is out of reach or refused the query.
    """
    report = usage.reports().get(name)
    if report is None:
        raise BadInput(f"no report {name!r}; there are: {', '.join(usage.reports())}", field="name")
    with _connected(settings) as client:
        from google.cloud.bigquery import DEFAULT_RETRY, QueryJobConfig, ScalarQueryParameter

        since = datetime.now(UTC) - timedelta(days=days)
        config = QueryJobConfig(
            default_dataset=f"{settings.project}.{settings.dataset}",
            query_parameters=[ScalarQueryParameter("since", "TIMESTAMP", since)],
        )
        retry = DEFAULT_RETRY.with_timeout(RETRY_LIMIT_S)
        job = client.query(
            report.sql, job_config=config, retry=retry, job_retry=None, timeout=QUERY_LIMIT_S
        )
        result = job.result(retry=retry, job_retry=None, timeout=QUERY_LIMIT_S)
        return [field.name for field in result.schema], [tuple(row.values()) for row in result]


def create_tables(settings: Settings) -> None:
    """Creates or updates dataset, table and views.

    Raises:
        Unavailable: BigQuery is out of reach or refused.
    """
    with _connected(settings) as client:
        # Fails at once if BigQuery is out of reach. The calls below would retry for ten minutes.
        next(iter(client.list_datasets(max_results=1, retry=None, timeout=RETRY_LIMIT_S)), None)
        usage.create(client, settings.dataset)


def check_bigquery(settings: Settings, timeout_s: float) -> None:
    """Checks that the usage table is there.

    Raises:
        Unavailable: BigQuery is out of reach, or has no such table.
    """
    with _connected(settings) as client:
        client.get_table(f"{settings.dataset}.{usage.TABLE}", retry=None, timeout=timeout_s)


@contextmanager
def _connected(settings: Settings) -> Iterator[Client]:
    """Opens Google's client. An embedded BigQuery needs no credentials."""
    # Imported when needed: Google's client takes half a second, and `penstock report` without a
    # name needs none.
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.credentials import AnonymousCredentials
    from google.auth.exceptions import GoogleAuthError
    from google.cloud.bigquery import Client
    from requests.exceptions import RequestException

    place: dict[str, Any] = {}
    if settings.bigquery_endpoint:
        options = {"api_endpoint": settings.bigquery_endpoint}
        place = {"credentials": AnonymousCredentials(), "client_options": options}
    try:
        client = Client(project=settings.project, **place)
        with closing(client):
            yield client
    except (GoogleAPIError, GoogleAuthError, RequestException) as error:
        # The other lines name the job, which is of no use here.
        raise Unavailable(f"BigQuery: {str(error).splitlines()[0]}") from error
