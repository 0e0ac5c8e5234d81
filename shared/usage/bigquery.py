"""Writes rows to BigQuery with Google's client.

It translates errors, and separates refused rows from those to retry. The sending thread imports the
client with the first rows, because the import takes longer than the API's startup.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from prometheus_client import Counter

from shared.errors import Unavailable
from shared.usage.spool import Fields

SEND_TIMEOUT_S = 10.0
CANCEL_LIMIT_S = 2.0
TOO_LARGE = "bytes billed"
"""The text by which BigQuery says that a query would read more than `maximum_bytes_billed`."""
TIMED_OUT = "timed out"
"""The text by which BigQuery says that it ended a job after `job_timeout_ms`."""
REFUSED = frozenset({400, 413})
"""Statuses for wrong rows.

Others (a missing table, permission or quota) can be fixed, so they are retried.
"""

NO_FIELD = "no such field"
"""BigQuery's reason for a row with a column that the table does not have."""

WRITTEN = Counter("penstock_rows_written_total", "Rows that BigQuery has")
TRIMMED = Counter(
    "penstock_rows_trimmed_total", "Rows written without the columns that an older table lacks"
)

log = logging.getLogger(__name__)


class BigQuerySender:
    """insertAll by Google's client, its errors translated.

    Args:
        project: the project of the dataset.
        table: `DATASET.TABLE`.
        endpoint: URL of an embedded BigQuery. Empty for Google's.
    """

    linger_s = 1.0
    """One insertAll costs as much CPU as a request, and rows are not urgent."""

    def __init__(self, project: str, table: str, endpoint: str) -> None:
        self._project = project
        self._table = f"{project}.{table}"
        self._endpoint = endpoint
        self._client: Any = None

    def send(self, rows: Sequence[Fields]) -> list[tuple[Fields, str]]:
        """Inserts `rows`. Returns those that BigQuery refused for good, with its reason.

        A table of an older release does not have the newest columns. Rows are then written without
        them, and counted.

        Raises:
            Unavailable: nothing was inserted, as far as we know. Try again.
        """
        refused = self._insert(rows)
        older = [row for row, reason in refused if NO_FIELD in reason]
        if not older:
            return refused
        log.warning(
            "the table is missing columns", extra={"rows": len(older), "reason": refused[0][1]}
        )
        wrong = [(row, reason) for row, reason in refused if NO_FIELD not in reason]
        still_wrong = self._insert(older, ignore_unknown_values=True)
        TRIMMED.inc(len(older) - len(still_wrong))
        return wrong + still_wrong

    def _insert(self, rows: Sequence[Fields], **options: bool) -> list[tuple[Fields, str]]:
        from google.api_core.exceptions import GoogleAPICallError, GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException

        try:
            errors = self._open().insert_rows_json(
                self._table,
                list(rows),
                row_ids=[_insert_id(row) for row in rows],
                skip_invalid_rows=True,
                retry=None,
                timeout=SEND_TIMEOUT_S,
                **options,
            )
        except GoogleAPICallError as error:
            if error.code not in REFUSED:
                raise Unavailable(f"BigQuery: {error}") from error
            if len(rows) == 1:
                return [(rows[0], str(error))]
            half = len(rows) // 2  # one row spoils the request: the others must not go with it
            return self._insert(rows[:half], **options) + self._insert(rows[half:], **options)
        except (GoogleAPIError, GoogleAuthError, RequestException) as error:
            raise Unavailable(f"BigQuery: {error}") from error
        refused = [(rows[error["index"]], json.dumps(error["errors"])) for error in errors]
        WRITTEN.inc(len(rows) - len(refused))
        return refused

    def _open(self) -> Any:
        if self._client is None:
            self._client = open_client(self._project, self._endpoint)
        return self._client


def run_query(
    client: Any,
    sql: str,
    config: Any,
    limit_s: float,
    *,
    retry: Any = None,
    max_results: int | None = None,
) -> tuple[Any, Any]:
    """Runs a query that ends within a time, at BigQuery too. Returns its job and its rows.

    Args:
        client: of `open_client`.
        sql: the query.
        config: a QueryJobConfig, which gets the limit.
        limit_s: how long the query may take.
        retry: of single calls.
        max_results: rows at most.

    Raises:
        Unavailable: it took longer.
        google.api_core.exceptions.GoogleAPIError: BigQuery refused, or is out of reach.
    """
    from google.api_core.exceptions import GoogleAPICallError

    config.job_timeout_ms = int(limit_s * 1000)
    job = client.query(sql, job_config=config, retry=retry, job_retry=None, timeout=limit_s)
    try:
        rows = job.result(retry=retry, job_retry=None, timeout=limit_s, max_results=max_results)
    except TimeoutError as error:
        _cancel(job)
        raise _too_slow(limit_s, error) from error
    except GoogleAPICallError as error:
        if TIMED_OUT in str(error):
            raise _too_slow(limit_s, error) from error
        raise
    return job, rows


def public_reason(reason: str, otherwise: str) -> str:
    """Returns the part of BigQuery's refusal of a query that callers may read.

    Args:
        reason: in BigQuery's words.
        otherwise: the answer if nothing better is known.
    """
    if TOO_LARGE in reason:
        return "the question reads too many bytes; ask for a shorter range"
    return otherwise


def _cancel(job: Any) -> None:
    """Asks BigQuery to end a job that nobody waits for. Its own limit ends it in any case."""
    from google.api_core.exceptions import GoogleAPIError
    from requests.exceptions import RequestException

    with suppress(GoogleAPIError, RequestException, TimeoutError):
        job.cancel(retry=None, timeout=CANCEL_LIMIT_S)


def _too_slow(limit_s: float, error: Exception) -> Unavailable:
    return Unavailable(
        f"BigQuery: not done within {limit_s:g} s: {error}",
        public=f"the question took longer than {limit_s:g} s; ask for a shorter range",
    )


def _insert_id(row: Fields) -> str:
    """Returns the id by which BigQuery drops repeats, best effort. Differing rows are kept."""
    return ":".join(str(row[name]) for name in ("row_id", "status", "attempt") if name in row)


def open_client(project: str, endpoint: str) -> Any:
    """Google's client for a project. With an endpoint, of an embedded BigQuery."""
    from google.auth.credentials import AnonymousCredentials
    from google.cloud import bigquery

    options: dict[str, Any] = {"project": project}
    if endpoint:
        options |= {
            "credentials": AnonymousCredentials(),
            "client_options": {"api_endpoint": endpoint},
        }
    return bigquery.Client(**options)
