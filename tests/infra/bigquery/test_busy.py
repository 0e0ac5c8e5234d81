"""Long queries and what is asked for meanwhile: order of events, not times."""

import pytest
from google.api_core.exceptions import GoogleAPICallError
from google.cloud import bigquery

from tests.infra.bigquery.connecting import rows_of
from tests.limits import WAIT_LIMIT_S

# It would take hours.
LONG = (
    "SELECT COUNT(*) FROM UNNEST(GENERATE_ARRAY(1, 1000000)) AS a,"
    " UNNEST(GENERATE_ARRAY(1, 1000000)) AS b WHERE MOD(a * b, 7) = 3"
)

pytestmark = pytest.mark.usefixtures("dataset")


def test_long_queries_keep_nobody_from_tables_and_rows(client: bigquery.Client) -> None:
    client.create_table(
        bigquery.Table(f"{client.project}.d.t", [bigquery.SchemaField("a", "INT64")])
    )
    # One more than there are threads: the last waits for one.
    running = [client.query(LONG) for _ in range(9)]
    try:
        # A job whose bytes are known is at its rows, or waits for a thread to get at them.
        while sum(_is_at_its_rows(client, job) for job in running) < 8:
            assert not any(job.done() for job in running)
        assert client.insert_rows_json("d.t", [{"a": 1}], timeout=WAIT_LIMIT_S) == []
        assert client.get_table("d.t", timeout=WAIT_LIMIT_S).num_rows == 1
        assert [row["a"] for row in client.list_rows("d.t", timeout=WAIT_LIMIT_S)] == [1]
        assert [item.table_id for item in client.list_tables("d", timeout=WAIT_LIMIT_S)] == ["t"]
        assert not any(job.done() for job in running)
    finally:
        # The one that waits first: it must not need a thread to be canceled.
        for job in reversed(running):
            job.cancel()
    for job in reversed(running):
        with pytest.raises(GoogleAPICallError, match="cancelled"):
            job.result(timeout=WAIT_LIMIT_S)
    assert rows_of(client, "SELECT 1") == [(1,)]


def _is_at_its_rows(client: bigquery.Client, job: bigquery.QueryJob) -> bool:
    return client.get_job(job.job_id).total_bytes_processed is not None


def test_a_query_that_waits_for_a_thread_runs_out_of_time(client: bigquery.Client) -> None:
    running = [client.query(LONG) for _ in range(8)]
    try:
        late = client.query(LONG, job_config=bigquery.QueryJobConfig(job_timeout_ms=1))
        with pytest.raises(GoogleAPICallError, match="timed out"):
            late.result(timeout=WAIT_LIMIT_S)
        assert not any(job.done() for job in running)
    finally:
        for job in running:
            job.cancel()
