"""Rows reach BigQuery no matter what happens to it; tested with a real embedded server as a process
that can be stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest
from google.cloud.bigquery import SchemaField, Table
from prometheus_client import REGISTRY

from infra.bigquery import create, schema
from shared.errors import Unavailable
from shared.usage.bigquery import BigQuerySender
from shared.usage.row import Row
from shared.usage.worker_hour import WorkerHour
from shared.usage.writer import BATCH_ROWS, fields_of
from tests.limits import WAIT_LIMIT_S
from tests.shared.embedded_bigquery import (
    DATASET,
    PROJECT,
    Server,
    row,
    segments,
    writer,
    writer_to,
)

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
HOUR = WorkerHour(
    row_id="w:1",
    worker="w",
    hour_s=1_790_000_000 // 3600 * 3600.0,
    since_s=1_790_000_000.0,
    reported_at_s=1_790_000_010.0,
    started_at_s=1_790_000_000.0,
    region="here",
    deployment="mini",
    models="mini",
    gpu_type=None,
    spot=None,
    device="cpu",
    device_share=1.0,
    processes=1,
    busy_s=4.0,
    idle_s=5.0,
    loading_s=1.0,
    batches=2,
    items=3,
    cold_starts=1,
)


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


async def test_rows_arrive_with_their_values(server: Server, tmp_path: Path) -> None:
    with server.running():
        async with writer(server, tmp_path / "spool") as rows:
            for number in range(BATCH_ROWS + 7):
                rows.write(row(number, tokens=number, queue_ms=1.25, started_at_s=1_750_000_000.5))
            assert await rows.flush(WAIT_LIMIT_S)
            assert rows.pending == 0
        assert server.row_ids() == [f"req:{number:05}" for number in range(BATCH_ROWS + 7)]
        query = (
            f"SELECT * FROM {DATASET}.rows WHERE received_at > TIMESTAMP '2020-01-01' AND item = 7"
        )
        found = next(iter(server.client().query(query).result()))
        assert (found["tokens"], found["queue_ms"], found["started_at"].timestamp()) == (
            7,
            1.25,
            1_750_000_000.5,
        )
        assert found["cost_usd"] is None


async def test_outage_loses_no_row(server: Server, tmp_path: Path) -> None:
    async with writer(server, tmp_path / "spool") as rows:
        rows.write(row(1))
        assert not await rows.flush(0.3)
        rows.write(row(2))
        assert rows.pending == 2
        with server.running():
            assert await rows.flush(WAIT_LIMIT_S)
            assert server.row_ids("rows_deduplicated") == ["req:00001", "req:00002"]
    assert segments(tmp_path / "spool") == 0


async def test_close_during_an_outage_leaves_rows_to_the_next(
    server: Server, tmp_path: Path
) -> None:
    spool_dir = tmp_path / "spool"
    async with writer(server, spool_dir) as rows:
        for number in range(3):
            rows.write(row(number))
    assert segments(spool_dir) >= 1
    with server.running():
        async with writer(server, spool_dir) as rows:
            assert rows.pending == 3
            rows.write(row(3))
            assert await rows.flush(WAIT_LIMIT_S)
            assert server.row_ids("rows_deduplicated") == [
                f"req:{number:05}" for number in range(4)
            ]
    assert segments(spool_dir) == 0


async def test_close_while_bigquery_hangs_keeps_the_rows(server: Server, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", server.port)):  # accepts connections but never responds
        async with writer(server, tmp_path / "spool") as rows:
            rows.write(row(1))
            assert not await rows.flush(0.3)
            rows.write(row(2))
    kept = [
        json.loads(line)
        for path in (tmp_path / "spool").glob("*.segment")
        for line in path.read_text().splitlines()
    ]
    assert sorted(entry["row_id"] for entry in kept) == ["req:00001", "req:00002"]


async def test_refused_row_is_kept_with_its_reason_and_harms_no_other(
    server: Server, tmp_path: Path
) -> None:
    with server.running():
        async with writer(server, tmp_path / "spool") as rows:
            rows.write(row(1))
            rows.write(row(2, tokens="many"))
            rows.write(row(3))
            assert await rows.flush(WAIT_LIMIT_S)
        assert server.row_ids() == ["req:00001", "req:00003"]
    rejected = [
        json.loads(line)
        for line in (tmp_path / "spool" / "rejected.jsonl").read_text().splitlines()
    ]
    assert [entry["row"]["row_id"] for entry in rejected] == ["req:00002"]
    assert "tokens" in rejected[0]["reason"]


async def test_row_that_spoils_its_request_is_alone_in_its_fate(
    server: Server, tmp_path: Path
) -> None:
    with server.running():
        async with writer(server, tmp_path / "spool") as rows:
            for number in range(9):
                rows.write(row(number, **({"tenant": "x" * 11_000_000} if number == 4 else {})))
            assert await rows.flush(WAIT_LIMIT_S)
        assert server.row_ids() == [f"req:{number:05}" for number in range(9) if number != 4]


async def test_what_exceeds_memory_waits_on_disk(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.usage.writer.MEMORY_ROWS", 50)
    with socket.create_server(("127.0.0.1", server.port)) as hanging:
        async with writer(server, tmp_path / "spool") as rows:
            rows.write(row(0))
            connection, _ = await asyncio.to_thread(hanging.accept)
            with connection:  # the thread hangs in its request
                for number in range(1, 200):
                    rows.write(row(number))
                assert segments(tmp_path / "spool") >= 1
                assert rows.pending == 200
    with server.running():
        async with writer(server, tmp_path / "spool") as rows:
            assert await rows.flush(WAIT_LIMIT_S)
        assert server.row_ids("rows_deduplicated") == [f"req:{number:05}" for number in range(200)]


OF_REPORTS = {
    *("plan", "price_version", "list_price_usd", "input_tokens", "output_tokens"),
    *("cached_tokens", "gpu_type", "spot", "priority", "user_agent_family", "batch_id"),
    *("cold_start", "batch_capacity", "padded_tokens"),
}
"""Columns that were added at the same time."""


@pytest.mark.parametrize("lacking", [{"charged_share"}, {"charged_share"} | OF_REPORTS])
async def test_table_of_an_older_release_takes_rows_without_its_missing_columns(
    server: Server, tmp_path: Path, lacking: set[str]
) -> None:
    """And vice versa: rows from an older writer. An invalid row is sent along with all of them."""
    with server.running():
        with server.client() as client:
            client.delete_table(f"{DATASET}.rows")
            old = [
                SchemaField.from_api_repr(field)
                for field in schema()
                if field["name"] not in lacking
            ]
            client.create_table(Table(f"{PROJECT}.{DATASET}.rows", old))
        async with writer(server, tmp_path / "spool") as rows:
            rows.write(row(1, cost_usd=0.5, charged_share=1.0, plan="team", spot=True))
            rows.write(row(2, cost_usd=0.5))
            rows.write(row(3, tokens="many", charged_share=1.0))
            assert await rows.flush(WAIT_LIMIT_S)
        assert server.row_ids() == ["req:00001", "req:00002"]
        with server.client() as client:
            create(client, DATASET)
        async with writer(server, tmp_path / "spool") as rows:
            rows.write(row(4, cost_usd=0.5, charged_share=1.0))
            assert await rows.flush(WAIT_LIMIT_S)
        query = (
            f"SELECT row_id, cost_usd, charged_share FROM {DATASET}.rows"
            " WHERE received_at > '2020-01-01' ORDER BY 1"
        )
        with server.client() as client:
            found = [tuple(one.values()) for one in client.query(query).result()]
    assert found == [("req:00001", 0.5, None), ("req:00002", 0.5, None), ("req:00004", 0.5, 1.0)]
    rejected = [
        json.loads(line)
        for line in (tmp_path / "spool" / "rejected.jsonl").read_text().splitlines()
    ]
    assert [entry["row"]["row_id"] for entry in rejected] == ["req:00003"]


async def test_table_that_is_missing_keeps_no_other_rows_waiting(
    server: Server, tmp_path: Path
) -> None:
    """A worker from a new release starts before the hours table exists."""
    hours = writer_to(server.endpoint, tmp_path / "hours", "worker_hours")
    with server.running():
        with server.client() as client:
            client.delete_table(f"{DATASET}.worker_hours")
        async with writer(server, tmp_path / "rows") as rows, hours:
            hours.write_report(HOUR)
            rows.write(row(1))
            assert await rows.flush(WAIT_LIMIT_S)
            assert REGISTRY.get_sample_value("penstock_rows_pending") == hours.pending == 1
        assert segments(tmp_path / "hours") == 1
        with server.client() as client:
            create(client, DATASET)
        again = writer_to(server.endpoint, tmp_path / "hours", "worker_hours")
        async with again:
            assert await again.flush(WAIT_LIMIT_S)
        query = f"SELECT row_id FROM {DATASET}.worker_hours WHERE hour > TIMESTAMP '2020-01-01'"
        with server.client() as client:
            assert [one["row_id"] for one in client.query(query).result()] == ["w:1"]


async def test_repeated_row_counts_once(server: Server, tmp_path: Path) -> None:
    with server.running():
        for spool in ("one", "two"):
            async with writer(server, tmp_path / spool) as rows:
                rows.write(row(1))
                assert await rows.flush(WAIT_LIMIT_S)
        assert server.row_ids("rows_deduplicated") == ["req:00001"]


def test_row_and_schema_agree() -> None:
    full = Row(**{name: 1 for name in Row.__struct_fields__})  # type: ignore[arg-type]
    assert set(fields_of(full)) == {field["name"] for field in schema()}
    required = {field["name"] for field in schema() if field["mode"] == "REQUIRED"}
    smallest = fields_of(
        Row(row_id="r:0", request_id="r", item=0, model="m", received_at_s=1.0, status="failed")
    )
    assert required <= set(smallest), "the smallest row that can be made is accepted"
    types = {field["name"]: field["type"] for field in schema()}
    assert {types[name] for name in types if name.endswith("_at")} == {"TIMESTAMP"}
    assert {types[name] for name in types if name.endswith("_ms")} <= {"FLOAT", "FLOAT64"}


class _Interrupted(BaseHTTPRequestHandler):
    """Passes inserts on to the server on `port`, except for the third, which gets a 503."""

    port: int
    inserts = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        type(self).inserts += 1
        status, answer = (503, b"{}") if self.inserts == 3 else self._pass_on(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _pass_on(self, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_LIMIT_S)
        headers = {
            name: value for name, value in self.headers.items() if name.startswith("Content-")
        }
        with contextlib.closing(connection):
            connection.request("POST", self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def log_message(self, *_: object) -> None:
        """Keeps the requests out of the test's output."""


def test_half_of_a_split_batch_is_not_counted_twice(tmp_path: Path) -> None:
    """One row is too large, so the batch is sent in halves, and BigQuery fails in between."""
    server = Server(tmp_path)
    large = row(3, tenant="x" * 11_000_000)
    rows = [msgspec.json.encode(item) for item in (*map(row, range(3)), large)]
    handler = type("Handler", (_Interrupted,), {"port": server.port})
    with server.running(), ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        sender = BigQuerySender(PROJECT, f"{DATASET}.rows", f"http://127.0.0.1:{proxy.server_port}")
        before = REGISTRY.get_sample_value("penstock_rows_written_total") or 0
        with pytest.raises(Unavailable):
            sender.send(rows)
        assert server.row_ids() == ["req:00000", "req:00001"]
        assert [json.loads(refused)["row_id"] for refused, _ in sender.send(rows)] == ["req:00003"]
        proxy.shutdown()
        assert server.row_ids() == ["req:00000", "req:00001", "req:00002"]
        assert REGISTRY.get_sample_value("penstock_rows_written_total") == before + 3


def test_rows_of_one_item_that_differ_are_no_repeats(tmp_path: Path) -> None:
    """BigQuery drops rows with the same insertId.

    A row that corrects another must not be dropped with it.
    """
    server, first = Server(tmp_path), row(1, attempt=1)
    second = msgspec.structs.replace(first, status="canceled", attempt=None)
    with server.running():
        sender = BigQuerySender(PROJECT, f"{DATASET}.rows", server.endpoint)
        for one in (first, second) * 2:  # one response was lost
            assert sender.send([msgspec.json.encode(one)]) == []
        assert server.row_ids() == ["req:00001"] * 2
