"""The embedded BigQuery as a process: startup, data across restarts, plain HTTP."""

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest
from google.cloud import bigquery

from bigquery_emulator import serve
from tests.connecting import connected, request, rows_of
from tests.limits import START_LIMIT_S, WAIT_LIMIT_MS
from tests.process import Process, free_port, listens


def command(port: int, data_dir: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "bigquery_emulator",
        "--port",
        str(port),
        "--data-dir",
        str(data_dir),
    ]


def process(port: int, folder: Path, data_dir: Path) -> Process:
    return Process("bigquery", command(port, data_dir), folder)


def test_data_is_there_after_a_restart(tmp_path: Path) -> None:
    port, data_dir = free_port(), tmp_path / "data"
    endpoint = f"http://127.0.0.1:{port}"
    with process(port, tmp_path, data_dir) as running, connected(endpoint, "p") as client:
        line = f"BigQuery listening on 127.0.0.1:{port}\n"
        running.wait_ready(lambda: running.log_path.read_text() == line, START_LIMIT_S)
        client.create_dataset("d")
        table = bigquery.Table(
            "p.d.t", [bigquery.SchemaField("id", "INT64"), bigquery.SchemaField("ts", "TIMESTAMP")]
        )
        table.time_partitioning, table.require_partition_filter = (
            bigquery.TimePartitioning(field="ts"),
            True,
        )
        client.create_table(table)
        view = bigquery.Table("p.d.v")
        view.view_query = "SELECT id FROM d.t WHERE ts > TIMESTAMP '2024-01-01'"
        client.create_table(view)
        client.insert_rows_json("d.t", [{"id": 1, "ts": "2024-05-01"}])
        before = client.get_table("d.t")
    with process(port, tmp_path, data_dir) as running, connected(endpoint, "p") as client:
        running.wait_ready(lambda: listens(port), START_LIMIT_S)
        after = client.get_table("d.t")
        assert (after.etag, after.schema, after.num_rows) == (before.etag, before.schema, 1)
        assert rows_of(client, "SELECT id FROM d.v") == [(1,)]
        client.create_table(bigquery.Table("p.d.new", [bigquery.SchemaField("a", "STRING")]))
        assert [item.table_id for item in client.list_tables("d")] == ["new", "t", "v"]


def test_data_is_there_after_a_kill(tmp_path: Path) -> None:
    port, data_dir = free_port(), tmp_path / "data"
    endpoint = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command(port, data_dir), stdout=subprocess.PIPE) as killed:
        assert killed.stdout is not None
        assert killed.stdout.readline().startswith(b"BigQuery listening")
        with connected(endpoint, "p") as client:
            client.create_dataset("d")
            client.create_table(bigquery.Table("p.d.t", [bigquery.SchemaField("id", "INT64")]))
            client.insert_rows_json("d.t", [{"id": 1}])
        killed.kill()
    with process(port, tmp_path, data_dir) as running, connected(endpoint, "p") as client:
        running.wait_ready(lambda: listens(port), START_LIMIT_S)
        assert rows_of(client, "SELECT id FROM d.t") == [(1,)]


@pytest.mark.anyio
async def test_one_data_directory_has_one_server(tmp_path: Path) -> None:
    port = free_port()
    with process(port, tmp_path, tmp_path / "data") as running:
        await anyio.to_thread.run_sync(running.wait_ready, lambda: listens(port), START_LIMIT_S)
        with pytest.raises(OSError, match="cannot open"):
            async with serve("127.0.0.1", 0, tmp_path / "data"):
                pass
        with pytest.raises(OSError, match="in use"):
            async with serve("127.0.0.1", port, None):
                pass


@pytest.mark.anyio
async def test_a_server_within_a_process_ends_with_its_block() -> None:
    async with serve("127.0.0.1", 0, None) as server:
        with connected(server.endpoint, "p") as client:
            assert await anyio.to_thread.run_sync(rows_of, client, "SELECT 1") == [(1,)]
        assert listens(server.port)
    assert not listens(server.port)


def test_an_error_has_the_service_s_body(bigquery_endpoint: str) -> None:
    status, _, body = request(bigquery_endpoint, "GET", "/bigquery/v2/projects/p/datasets/none")
    assert (status, body) == (
        404,
        {
            "error": {
                "code": 404,
                "message": "Not found: Dataset p:none",
                "errors": [
                    {
                        "message": "Not found: Dataset p:none",
                        "domain": "global",
                        "reason": "notFound",
                    }
                ],
                "status": "NOT_FOUND",
            }
        },
    )


@pytest.mark.parametrize(
    ("verb", "path", "sent", "status"),
    [
        ("GET", "/bigquery/v2/nothing", b"", 404),
        ("POST", "/bigquery/v2/projects/p/queries", b"{", 400),
        ("POST", "/bigquery/v2/projects/p/queries", b"[]", 400),
        ("POST", "/bigquery/v2/projects/p/queries", b"{}", 400),
        ("POST", "/bigquery/v2/projects/p/jobs", b"{}", 400),
        ("POST", "/bigquery/v2/projects/p/datasets", b"{}", 400),
        ("POST", "/upload/bigquery/v2/projects/p/jobs?uploadType=odd", b"{}", 400),
        (
            "PUT",
            "/upload/bigquery/v2/projects/p/jobs?uploadType=resumable&upload_id=none",
            b"",
            404,
        ),
        ("GET", "/bigquery/v2/projects/p/datasets?maxResults=-1", b"", 400),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(
    bigquery_endpoint: str, verb: str, path: str, sent: bytes, status: int
) -> None:
    answered, _, body = request(bigquery_endpoint, verb, path, sent)
    assert answered == status
    assert body["error"]["code"] == status


def test_bodies_travel_packed_both_ways(bigquery_endpoint: str) -> None:
    sql = "SELECT REPEAT('x', 10000) AS a"
    request_body = {"query": sql, "useLegacySql": False, "timeoutMs": WAIT_LIMIT_MS}
    packed = gzip.compress(json.dumps(request_body).encode())
    headers = {
        "Content-Encoding": "gzip",
        "Accept-Encoding": "gzip",
        "Content-Type": "application/json",
    }
    status, names, body = request(
        bigquery_endpoint, "POST", "/bigquery/v2/projects/p/queries", packed, **headers
    )
    assert (status, names["content-encoding"]) == (200, "gzip")
    assert body["rows"] == [{"f": [{"v": "x" * 10000}]}]


def test_a_query_sent_twice_runs_once(bigquery_endpoint: str) -> None:
    sent = json.dumps(
        {
            "query": "SELECT GENERATE_UUID()",
            "useLegacySql": False,
            "timeoutMs": WAIT_LIMIT_MS,
            "requestId": f"r{time.time_ns()}",
        }
    )
    answers = [
        request(bigquery_endpoint, "POST", "/bigquery/v2/projects/p/queries", sent.encode())
        for _ in range(2)
    ]
    assert answers[0][2]["rows"] == answers[1][2]["rows"]
    assert answers[0][2]["jobReference"] == answers[1][2]["jobReference"]


def test_timestamps_are_seconds_unless_micros_are_asked_for(bigquery_endpoint: str) -> None:
    query = "SELECT TIMESTAMP_MICROS(1700000000123456)"
    sql = {"query": query, "useLegacySql": False, "timeoutMs": WAIT_LIMIT_MS}
    path = "/bigquery/v2/projects/p/queries"
    _, _, plain = request(bigquery_endpoint, "POST", path, json.dumps(sql).encode())
    assert plain["rows"] == [{"f": [{"v": "1.700000000123456E9"}]}]
    micros = {**sql, "formatOptions": {"useInt64Timestamp": True}}
    _, _, exact = request(bigquery_endpoint, "POST", path, json.dumps(micros).encode())
    assert exact["rows"] == [{"f": [{"v": "1700000000123456"}]}]
