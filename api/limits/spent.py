"""Reads budget spending from the rows in BigQuery."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any, NamedTuple, Protocol

from shared.errors import Unavailable
from shared.tenants.directory import BudgetHolder
from shared.usage.bigquery import open_client, run_query

QUERY_LIMIT_S = 20.0
"""Time limit per query. On exit, a process waits for its query to finish."""


class SpentQuestion(NamedTuple):
    """A query for the charges of all requests completed before a given time."""

    holder: BudgetHolder
    before_s: float
    """Unix time."""


class SpentReader(Protocol):
    """Adds up rows. Calls block, so they run in threads."""

    def read(self, month: int, questions: Sequence[SpentQuestion]) -> list[tuple[float, float]]:
        """Returns each question's totals in US dollars for the given month and the previous one.

        Args:
            month: months since January of year 0, as counted by `month_of`.

        Raises:
            Unavailable: the rows can't be read right now.
        """
        ...


class SpentRows:
    """Reads the usage table.

    Args:
        project: the dataset's project, which pays for the queries.
        endpoint: URL of an embedded BigQuery, or empty for Google's.
        most_bytes: maximum bytes that a query may read; larger queries are rejected.
        limit_s: maximum seconds per query.
    """

    def __init__(
        self,
        project: str,
        dataset: str,
        endpoint: str,
        most_bytes: int,
        limit_s: float = QUERY_LIMIT_S,
    ) -> None:
        self._project = project
        self._dataset = dataset
        self._endpoint = endpoint
        self._most_bytes = most_bytes
        self._limit_s = limit_s
        self._client: Any = None

    def read(self, month: int, questions: Sequence[SpentQuestion]) -> list[tuple[float, float]]:
        """See `SpentReader.read`.

        Raises:
            Unavailable: BigQuery is unreachable or rejected the query.
        """
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.bigquery import QueryJobConfig
        from requests.exceptions import RequestException

        sql = resources.files("api.limits").joinpath("spent.sql").read_text(encoding="utf-8")
        config = QueryJobConfig(
            default_dataset=f"{self._project}.{self._dataset}",
            maximum_bytes_billed=self._most_bytes,
            query_parameters=_parameters(month, questions),
        )
        spent = [[0.0, 0.0] for _ in questions]
        try:
            if self._client is None:
                self._client = open_client(self._project, self._endpoint)
            _, result = run_query(self._client, sql, config, self._limit_s)
            for place, of_month, usd in (row.values() for row in result):
                if of_month in (month, month - 1):
                    spent[place][month - of_month] = usd
        except (GoogleAPIError, GoogleAuthError, RequestException, TimeoutError) as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise Unavailable(f"the rows can't be read right now: {reason}") from error
        return [(usd, before) for usd, before in spent]


def _parameters(month: int, questions: Sequence[SpentQuestion]) -> list[Any]:
    from google.cloud.bigquery import ArrayQueryParameter, ScalarQueryParameter

    since = datetime((month - 1) // 12, (month - 1) % 12 + 1, 1, tzinfo=UTC)
    holders = [question.holder for question in questions]
    end_times = [datetime.fromtimestamp(question.before_s, UTC) for question in questions]
    return [
        ScalarQueryParameter("since", "TIMESTAMP", since),
        ArrayQueryParameter("tenants", "STRING", sorted({holder.tenant for holder in holders})),
        ArrayQueryParameter("budget_tenants", "STRING", [holder.tenant for holder in holders]),
        ArrayQueryParameter("keys", "STRING", [holder.key_id for holder in holders]),
        ArrayQueryParameter("end_times", "TIMESTAMP", end_times),
    ]
