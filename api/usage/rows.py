"""Queries usage in BigQuery, with one parameterized query and a limit on how much it reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from typing import Any, NamedTuple

from shared.errors import BadInput, Unavailable
from shared.usage.bigquery import open_client, public_reason, run_query

QUERY_LIMIT_S = 20.0
MAX_LINES = 10_000


class UsageQuery(NamedTuple):
    """A usage query. A filter of None matches everything."""

    start_s: int
    """Start of the first bucket, Unix time."""
    end_s: int
    """Only requests received before this Unix time are included."""
    width_s: int
    """Bucket width."""
    tenants: tuple[str, ...] | None
    """Tenants to include. None means all tenants, which is only for administrators."""
    models: tuple[str, ...] | None = None
    keys: tuple[str, ...] | None = None
    tasks: tuple[str, ...] | None = None
    by_tenant: bool = False
    by_model: bool = False
    by_key: bool = False


class UsageLine(NamedTuple):
    """One group in one bucket. Fields that the query does not group by are None."""

    bucket: int
    """Bucket number, from 0."""
    tenant: str | None
    model: str | None
    key_id: str | None
    model_requests: int
    """Requests that ran the model, excluding rejected ones. A flow run counts once per model."""
    requests: int
    """Requests, including rejected ones, as in the reports. A flow run counts once."""
    refused: int
    """The number of `requests` that were rejected as a whole."""
    items: int
    succeeded: int
    cached: int
    """Successful items that came from the cache or joined another item."""
    tokens: int
    """Tokens in delivered results."""
    charged_tokens: float
    pixel_steps: int
    charged_pixel_steps: float
    device_s: float
    cost_usd: float


class UsageRows:
    """The usage table. Its calls block, so they run in threads.

    Args:
        project: the dataset's project, which is billed for the queries.
        endpoint: URL of an embedded BigQuery, or empty to use Google's.
        most_bytes: maximum number of bytes that a query may read; larger queries are rejected.
    """

    def __init__(self, project: str, dataset: str, endpoint: str, most_bytes: int) -> None:
        self._project = project
        self._dataset = dataset
        self._endpoint = endpoint
        self._most_bytes = most_bytes
        self._client: Any = None

    def read(self, query: UsageQuery) -> list[UsageLine]:
        """Returns the lines for all nonempty buckets, in order.

        Raises:
            BadInput: there are more than MAX_LINES lines.
            Unavailable: BigQuery is unreachable or rejected the query.
        """
        from google.api_core.exceptions import GoogleAPIError
        from google.auth.exceptions import GoogleAuthError
        from google.cloud.bigquery import QueryJobConfig
        from requests.exceptions import RequestException

        sql = resources.files("api.usage").joinpath("usage.sql").read_text(encoding="utf-8")
        config = QueryJobConfig(
            default_dataset=f"{self._project}.{self._dataset}",
            maximum_bytes_billed=self._most_bytes,
            query_parameters=_parameters(query),
        )
        try:
            if self._client is None:
                self._client = open_client(self._project, self._endpoint)
            _, result = run_query(self._client, sql, config, QUERY_LIMIT_S)
            lines = [UsageLine(*row.values()) for row in result]
        except (GoogleAPIError, GoogleAuthError, RequestException, TimeoutError) as error:
            reason = (str(error).splitlines() or [repr(error)])[0]
            raise Unavailable(
                f"usage data can't be read right now: {reason}",
                public=public_reason(reason, "usage data can't be read right now; try again"),
            ) from error
        if len(lines) > MAX_LINES:
            raise BadInput(
                f"group_by: produces more than {MAX_LINES} groups; request fewer buckets",
                field="group_by",
            )
        return lines


def _parameters(query: UsageQuery) -> list[Any]:
    from google.cloud.bigquery import ArrayQueryParameter, ScalarQueryParameter

    def scalar(name: str, kind: str, value: object) -> Any:
        return ScalarQueryParameter(name, kind, value)

    groups = [
        scalar("since", "TIMESTAMP", datetime.fromtimestamp(query.start_s, UTC)),
        scalar("until", "TIMESTAMP", datetime.fromtimestamp(query.end_s, UTC)),
        scalar("start", "INT64", query.start_s),
        scalar("width", "INT64", query.width_s),
        scalar("most", "INT64", MAX_LINES + 1),
        *(
            scalar(name, "BOOL", getattr(query, name))
            for name in ("by_tenant", "by_model", "by_key")
        ),
    ]
    filters: dict[str, Sequence[str] | None] = {
        "tenants": query.tenants,
        "models": query.models,
        "keys": query.keys,
        "tasks": query.tasks,
    }
    for name, chosen in filters.items():
        groups.append(scalar(f"all_{name}", "BOOL", chosen is None))
        groups.append(ArrayQueryParameter(name, "STRING", list(chosen or ())))
    return groups
