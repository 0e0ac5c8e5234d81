"""The disk fills up for a while: writes are rejected, no data is lost, the server recovers."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import psutil
import pytest
from google.cloud import bigquery

from bigquery_emulator.store import FILE_NAME, Store
from tests.connecting import connected, request, rows_of
from tests.limits import START_LIMIT_S, WAIT_LIMIT_MS
from tests.process import free_port, listens
from tests.test_process import process

MIB = 1024 * 1024
LIMIT_BYTES = 20 * MIB
"""More than the 16 MiB at which DuckDB writes its log back, but less than the file then needs."""


def insert(endpoint: str, number: int) -> int:
    """Inserts an incompressible 1 MiB row. Returns the status."""
    text = random.Random(number).randbytes(MIB // 2).hex()
    body = f'{{"rows": [{{"insertId": "{number}", "json": {{"id": {number}, "text": "{text}"}}}}]}}'
    path = "/bigquery/v2/projects/p/datasets/d/tables/t/insertAll"
    status, _, _ = request(
        endpoint, "POST", path, body.encode(), **{"content-type": "application/json"}
    )
    return status


def test_a_full_disk_is_told_of_and_left_behind(tmp_path: Path) -> None:
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    unlimited = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)
    with process(port, tmp_path, tmp_path / "data") as running, connected(endpoint, "p") as client:
        running.wait_ready(lambda: listens(port), START_LIMIT_S)
        client.create_dataset("d")
        fields = [bigquery.SchemaField("id", "INT64"), bigquery.SchemaField("text", "STRING")]
        client.create_table(bigquery.Table("p.d.t", fields))
        server = psutil.Process(running.pid)
        server.rlimit(psutil.RLIMIT_FSIZE, (LIMIT_BYTES, psutil.RLIM_INFINITY))
        answered = {number: insert(endpoint, number) for number in range(60)}
        assert set(answered.values()) == {200, 503}
        sql = "UPDATE d.t SET text = CONCAT(text, text) WHERE TRUE"
        body = json.dumps(
            {"query": sql, "useLegacySql": False, "timeoutMs": WAIT_LIMIT_MS}
        ).encode()
        _, _, answer = request(endpoint, "POST", "/bigquery/v2/projects/p/queries", body)
        assert "backendError" in json.dumps(answer), answer
        server.rlimit(psutil.RLIMIT_FSIZE, unlimited)
        assert insert(endpoint, 100) == 200
        assert rows_of(client, "SELECT DISTINCT LENGTH(text) FROM d.t") == [(MIB,)]
        stored = {row[0] for row in rows_of(client, "SELECT id FROM d.t")}
        # Rejected rows must not exist, because a client would duplicate them by resending them.
        assert stored == {number for number, status in answered.items() if status == 200} | {100}


def test_session_that_is_open_while_the_database_is_opened_again_is_worth_a_retry(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    store.open()
    with store.transaction() as cursor:
        cursor.execute("CREATE TABLE data.main.t AS SELECT 1 AS x")
    aside, path = tmp_path / "aside", tmp_path / FILE_NAME
    read = "SELECT x FROM data.main.t"

    def read_while_it_is_away() -> None:
        with store.reading() as held:
            with pytest.raises(duckdb.IOException), store.reading():
                raise duckdb.IOException('Database "data" has been invalidated')  # DuckDB's wording
            path.rename(aside)
            path.write_bytes(b"no database" * 1000)
            with pytest.raises(duckdb.IOException, match="being reopened"), store.reading():
                pytest.fail("it can't be opened")
            held.execute(read)

    with pytest.raises(duckdb.IOException, match="reopened in the meantime"):
        read_while_it_is_away()
    aside.rename(path)
    with store.reading() as cursor:
        assert cursor.execute(read).fetchall() == [(1,)]
    store.close()


def test_kills_on_a_disk_that_gets_full_lose_nothing_that_was_answered(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    unshare = ["unshare", "--map-root-user", "--mount"]
    probe = [*unshare, "mount", "-t", "tmpfs", "tmpfs", str(disk)]
    if not shutil.which("unshare") or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("this machine lets no test mount a disk of its own")
    # The disk is full at the third kill.
    story = "tests.full_disk_kills"
    command = [*unshare, sys.executable, "-m", story, str(disk), "3"]
    # Four starts, each with its own time limit.
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=3 * START_LIMIT_S,
        cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
