"""Rows in the usage table for the end-to-end tests, once they are in BigQuery."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.cloud import bigquery

from tests.limits import WAIT_LIMIT_S

T = TypeVar("T")
POLL_S = 0.05


def eventually(find: Callable[[], T], limit_s: float = WAIT_LIMIT_S) -> T:
    """Calls `find` until its result is truthy, then returns the result.

    Raises:
        AssertionError: the result was still falsy after `limit_s` seconds.
    """
    deadline_s = time.monotonic() + limit_s
    while not (found := find()):
        assert time.monotonic() < deadline_s, f"still {found!r} after {limit_s:g} s"
        time.sleep(POLL_S)
    return found


class Rows:
    """The usage table."""

    def __init__(self, client: bigquery.Client, dataset: str) -> None:
        self._client = client
        self._dataset = dataset

    def query(self, sql: str, **values: Any) -> list[dict[str, Any]]:
        """Returns the result of a query with named parameters; `{dataset}` stands for the
        dataset.
        """
        kinds = {str: "STRING", int: "INT64", float: "FLOAT64"}
        parameters: list[Any] = [
            bigquery.ArrayQueryParameter(name, "STRING", value)
            if isinstance(value, list)
            else bigquery.ScalarQueryParameter(name, kinds[type(value)], value)
            for name, value in values.items()
        ]
        config = bigquery.QueryJobConfig(query_parameters=parameters)
        result = self._client.query(
            sql.replace("{dataset}", self._dataset), job_config=config
        ).result(timeout=WAIT_LIMIT_S)
        return [dict(row) for row in result]

    def of(self, request_ids: Sequence[str], count: int | None = None) -> list[dict[str, Any]]:
        """All of these requests' rows that count, oldest first, once there are `count` of them
        (default: one each).
        """
        sql = (
            "SELECT * FROM `{dataset}.rows_deduplicated` "
            "WHERE received_at > TIMESTAMP_SUB(CURRENT_TIMESTAMP(), INTERVAL 1 DAY) "
            "AND request_id IN UNNEST(@request_ids) ORDER BY received_at, item"
        )
        wanted = len(request_ids) if count is None else count
        found: list[dict[str, Any]] = []

        def are_there() -> bool:
            found[:] = self.query(sql, request_ids=list(request_ids))
            return len(found) >= wanted

        eventually(are_there, WAIT_LIMIT_S)
        return found
