"""A query stops within its time limit, in BigQuery too."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from google.api_core.exceptions import BadRequest
from google.cloud.bigquery import Client, QueryJobConfig

from shared.errors import BadInput, Unavailable
from shared.reports.runner import open_runner, translate_errors
from shared.usage.bigquery import open_client, run_query
from tests.limits import WAIT_LIMIT_S

ENDLESS = """
SELECT COUNTIF(MOD(a * b, 7) = 3)
FROM UNNEST(GENERATE_ARRAY(1, 1000000)) AS a
CROSS JOIN UNNEST(GENERATE_ARRAY(1, 1000000)) AS b
"""


@pytest.fixture
def client(bigquery_endpoint: str) -> Iterator[Client]:
    with open_client(f"limit-{uuid4().hex[:8]}", bigquery_endpoint) as opened:
        yield opened


def test_what_a_caller_does_with_a_runner_is_not_the_fault_of_bigquery() -> None:
    with pytest.raises(TimeoutError, match="own"), open_runner("p", "d", "http://127.0.0.1:9"):
        raise TimeoutError("own")


def test_query_that_takes_too_long_is_ended_where_it_runs(client: Client) -> None:
    with pytest.raises(Unavailable) as raised:
        run_query(client, ENDLESS, QueryJobConfig(), 0.3)
    assert raised.value.public_message == ("the query took longer than 0.3 s; use a shorter range")
    (job,) = client.list_jobs()
    # It was stopped either by its own limit or by our cancellation, so nothing keeps running for a
    # caller that has disconnected.
    job.reload()
    if job.state != "DONE":
        with pytest.raises(Exception, match="cancel"):
            job.result(timeout=WAIT_LIMIT_S)
    assert job.error_result["reason"] == "stopped"


def test_query_in_time_says_what_it_found(client: Client) -> None:
    job, rows = run_query(client, "SELECT 7", QueryJobConfig(), WAIT_LIMIT_S)
    assert [tuple(row) for row in rows] == [(7,)]
    assert job.state == "DONE"


def test_zone_that_bigquery_does_not_know_is_the_callers_to_change() -> None:
    with pytest.raises(BadInput, match="Invalid time zone") as raised, translate_errors():
        raise BadRequest("GET http://10.9.8.7/p/jobs/1: Invalid time zone: Mars/Olympus")
    assert raised.value.field == "tz"
    assert raised.value.public_message == "tz: must be a time zone such as Europe/Berlin"
