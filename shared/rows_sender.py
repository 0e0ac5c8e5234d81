"""Rows to BigQuery by Google's client: its errors translated, and refused rows told from those to be tried again.

The client is imported by the first send, in the thread that sends: that takes longer than the rest of an API's start.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from prometheus_client import Counter

from shared.errors import Unavailable
from shared.rows_spool import Fields

SEND_TIMEOUT_S = 10.0
REFUSED = frozenset({400, 413})
"""Statuses that say the rows are wrong; all others (a missing table, a right, a quota) may be mended by somebody."""

WRITTEN = Counter("penstock_rows_written_total", "Rows that BigQuery has")


class Sender:
    """insertAll by Google's client, its errors translated."""

    def __init__(self, project: str, table: str, endpoint: str) -> None:
        self._project = project
        self._table = table
        self._endpoint = endpoint
        self._client: Any = None

    def send(self, rows: Sequence[Fields]) -> list[tuple[Fields, str]]:
        """Inserts `rows` and returns those that BigQuery refused for good, with its reason.

        Raises:
            Unavailable: nothing was inserted as far as we know; try again.
        """
        from google.api_core.exceptions import GoogleAPICallError, GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from requests.exceptions import RequestException

        try:
            errors = self._open().insert_rows_json(
                self._table,
                list(rows),
                row_ids=[row["row_id"] for row in rows],
                skip_invalid_rows=True,
                retry=None,
                timeout=SEND_TIMEOUT_S,
            )
        except GoogleAPICallError as error:
            if error.code not in REFUSED:
                raise Unavailable(f"BigQuery: {error}") from error
            if len(rows) == 1:
                return [(rows[0], str(error))]
            half = len(rows) // 2  # one row spoils the request: the others must not go with it
            return self.send(rows[:half]) + self.send(rows[half:])
        except (GoogleAPIError, GoogleAuthError, RequestException) as error:
            raise Unavailable(f"BigQuery: {error}") from error
        refused = [(rows[error["index"]], json.dumps(error["errors"])) for error in errors]
        WRITTEN.inc(len(rows) - len(refused))
        return refused

    def _open(self) -> Any:
        if self._client is None:
            from google.auth.credentials import AnonymousCredentials
            from google.cloud import bigquery

            given: dict[str, Any] = {"project": self._project}
            if self._endpoint:
                given |= {"credentials": AnonymousCredentials(), "client_options": {"api_endpoint": self._endpoint}}
            self._client = bigquery.Client(**given)
        return self._client
