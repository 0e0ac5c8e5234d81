"""Long queries alongside other requests: checks the order of events, not durations."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.api_core.exceptions import GoogleAPICallError
from google.cloud import bigquery

from tests.connecting import rows_of
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from tests.process import Process, free_port, listens

# It would take hours.
LONG = (
    "SELECT COUNT(*) AS n FROM UNNEST(GENERATE_ARRAY(1, 1000000)) AS a,"
    " UNNEST(GENERATE_ARRAY(1, 1000000)) AS b WHERE MOD(a * b, 7) = 3"
)

MAX_QUERIES = 2
"""This test server's limit. Each long query takes up a core that the requests it must not block
could use.
"""
SERVER = f"""
from bigquery_emulator import threads
threads.MAX_QUERIES = {MAX_QUERIES}
from bigquery_emulator.__main__ import main
main()
"""
PAUSE_S = 0.02

pytestmark = pytest.mark.usefixtures("dataset")


@pytest.fixture(scope="module")
def bigquery_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a server that allows MAX_QUERIES queries."""
    port = free_port()
    command = [sys.executable, "-c", SERVER, "--port", str(port)]
    with Process("bigquery", command, tmp_path_factory.mktemp("bigquery")) as process:
        process.wait_ready(lambda: listens(port), START_LIMIT_S)
        yield f"http://127.0.0.1:{port}"


def test_long_queries_keep_nobody_from_tables_and_rows(client: bigquery.Client) -> None:
    _make_table(client)
    # One more than the number of threads, so the last query has to wait.
    running = [client.query(LONG) for _ in range(MAX_QUERIES + 1)]
    try:
        # A job whose byte count is known is reading rows, or waiting for a thread to do so.
        _wait_until(lambda: sum(_is_at_its_rows(client, job) for job in running) == MAX_QUERIES)
        assert not any(job.done() for job in running)
        assert client.insert_rows_json("d.t", [{"a": 1}], timeout=WAIT_LIMIT_S) == []
        assert client.get_table("d.t", timeout=WAIT_LIMIT_S).num_rows == 1
        assert [row["a"] for row in client.list_rows("d.t", timeout=WAIT_LIMIT_S)] == [1]
        assert [item.table_id for item in client.list_tables("d", timeout=WAIT_LIMIT_S)] == ["t"]
        assert not any(job.done() for job in running)
    finally:
        # The waiting job is canceled first, because canceling it must not require a thread.
        for job in reversed(running):
            job.cancel()
    for job in reversed(running):
        with pytest.raises(GoogleAPICallError, match="cancelled"):
            job.result(timeout=WAIT_LIMIT_S)
    assert rows_of(client, "SELECT 1") == [(1,)]


def _is_at_its_rows(client: bigquery.Client, job: bigquery.QueryJob) -> bool:
    return client.get_job(job.job_id).total_bytes_processed is not None


def test_a_query_that_waits_for_a_thread_runs_out_of_time(client: bigquery.Client) -> None:
    running = [client.query(LONG) for _ in range(MAX_QUERIES)]
    try:
        late = client.query(LONG, job_config=bigquery.QueryJobConfig(job_timeout_ms=1))
        with pytest.raises(GoogleAPICallError, match="timed out"):
            late.result(timeout=WAIT_LIMIT_S)
        assert not any(job.done() for job in running)
    finally:
        for job in running:
            job.cancel()


CHANGES = (
    f"INSERT INTO d.t {LONG}",
    f"UPDATE d.t SET a = ({LONG}) WHERE a = 1",
    f"DELETE FROM d.t WHERE a = ({LONG})",
    f"MERGE d.t USING ({LONG}) AS s ON t.a = s.n WHEN NOT MATCHED THEN INSERT (a) VALUES (s.n)",
    f"CREATE OR REPLACE TABLE d.t AS {LONG}",
)


@pytest.mark.parametrize("change", CHANGES)
def test_rows_are_streamed_while_a_statement_changes_their_table(
    client: bigquery.Client, change: str
) -> None:
    _make_table(client)
    assert client.insert_rows_json("d.t", [{"a": 1}]) == []
    job = client.query(change)
    try:
        _wait_until_running(client, job)
        for number in (2, 3):
            assert client.insert_rows_json("d.t", [{"a": number}], timeout=WAIT_LIMIT_S) == []
        assert [row["a"] for row in client.list_rows("d.t")] == [1, 2, 3]
        assert client.get_job(job.job_id).state == "RUNNING"
    finally:
        job.cancel()
    with pytest.raises(GoogleAPICallError, match="cancelled"):
        job.result(timeout=WAIT_LIMIT_S)
    assert [row["a"] for row in client.list_rows("d.t")] == [1, 2, 3]


STATEMENTS = (
    "UPDATE d.t SET b = 'x' WHERE a > 0",
    "MERGE d.t USING (SELECT 1 AS a) AS s ON t.a = s.a WHEN MATCHED THEN UPDATE SET b = 'y'",
    "ALTER TABLE d.t ADD COLUMN c{number} INT64",
    "DELETE FROM d.t WHERE a = 0",
    # Both statements rebuild the table.
    "ALTER TABLE d.t ADD COLUMN n{number} STRING(5)",
    "ALTER TABLE d.t DROP COLUMN n{number}",
    "INSERT INTO d.t (a) SELECT 0 FROM UNNEST(GENERATE_ARRAY(1, 10000))",
)


def test_no_row_is_lost_beside_statements_that_change_its_table(client: bigquery.Client) -> None:
    _make_table(client)
    rows_of(client, "ALTER TABLE d.t ADD COLUMN b STRING")
    rows_of(client, STATEMENTS[-1])
    added, is_over = [0], threading.Event()

    def add() -> None:
        while not is_over.is_set():
            added[0] += 1
            assert client.insert_rows_json("d.t", [{"a": added[0]}], timeout=WAIT_LIMIT_S) == []

    with ThreadPoolExecutor(1) as pool:
        adding = pool.submit(add)
        try:
            for number in range(3):
                for statement in STATEMENTS:
                    rows_of(client, statement.format(number=number))
        finally:
            is_over.set()
        adding.result(timeout=WAIT_LIMIT_S)
    counts = rows_of(client, "SELECT COUNT(*), COUNT(DISTINCT a), MAX(a) FROM d.t WHERE a > 0")
    assert counts == [(added[0], added[0], added[0])]


def test_a_statement_that_waits_for_another_is_pending_and_can_be_canceled(
    client: bigquery.Client,
) -> None:
    _make_table(client)
    assert client.insert_rows_json("d.t", [{"a": 1}]) == []
    first = client.query(CHANGES[1])
    late: list[bigquery.QueryJob] = []
    try:
        _wait_until_running(client, first)
        late += [client.query(CHANGES[1]), client.query("UPDATE d.t SET a = 5 WHERE a = 1")]
        for job in late:
            waiting = client.get_job(job.job_id)
            assert (waiting.state, waiting.started) == ("PENDING", None)
        assert [job.job_id for job in client.list_jobs(state_filter="pending")] == [
            job.job_id for job in reversed(late)
        ]
        late[0].cancel()
        with pytest.raises(GoogleAPICallError, match="cancelled"):
            late[0].result(timeout=WAIT_LIMIT_S)
        canceled = client.get_job(late[0].job_id)
        assert (canceled.state, canceled.started) == ("DONE", None)
        assert client.get_job(first.job_id).state == "RUNNING"
    finally:
        first.cancel()
    with pytest.raises(GoogleAPICallError, match="cancelled"):
        first.result(timeout=WAIT_LIMIT_S)
    late[1].result(timeout=WAIT_LIMIT_S)
    done = client.get_job(late[1].job_id)
    assert done.state == "DONE"
    assert done.created <= done.started <= done.ended
    assert [row["a"] for row in client.list_rows("d.t")] == [5]


def _make_table(client: bigquery.Client) -> None:
    fields = [bigquery.SchemaField("a", "INT64")]
    client.create_table(bigquery.Table(f"{client.project}.d.t", fields))


def _wait_until_running(client: bigquery.Client, job: bigquery.QueryJob) -> None:
    _wait_until(lambda: client.get_job(job.job_id).state != "PENDING")
    assert client.get_job(job.job_id).state == "RUNNING"


def _wait_until(holds: Callable[[], bool]) -> None:
    """Returns once the condition holds.

    Pauses between checks, because the checks also use CPU time.
    """
    deadline_s = time.monotonic() + WAIT_LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(PAUSE_S)
