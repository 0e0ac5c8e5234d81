"""`python -m infra.row_archive` as a process: invalid settings, shutdown, and restoring."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

import msgspec
import pytest

from infra import bigquery as tables
from infra.local.process import answers, free_port
from infra.row_archive.archive import RowArchive
from shared.settings import environment_with
from shared.stores.objects import ObjectStore
from shared.usage.bigquery import Fields, RowLine
from shared.usage.senders import ObjectSender
from tests.bigquery_client import connected, rows_of
from tests.infra.row_archive.stores import archive_all, row
from tests.infra.running_up import wait_until
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "infra.row_archive"]


def lines(*rows: Fields) -> list[RowLine]:
    """The rows as writers pass them to a sender."""
    return [msgspec.json.encode(row) for row in rows]


def ended(*arguments: str, **settings: str) -> tuple[int, str]:
    """The program's exit status and output."""
    given = {f"PENSTOCK_{name.upper()}": value for name, value in settings.items()}
    done = subprocess.run(
        [*COMMAND, *arguments],
        env=environment_with(given),
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "PENSTOCK_ROWS_URL must be set"),
        ("ftp://x", "PENSTOCK_ROWS_URL: must be file://DIR"),
        ("memory://", "PENSTOCK_ROWS_URL: must not be memory://"),
    ],
)
def test_url_that_is_no_store_is_refused(url: str, said: str) -> None:
    status, reported = ended(rows_url=url)
    assert status == 1
    assert reported.startswith(f"penstock row archive: {said}"), reported


def test_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        status, reported = ended(rows_url=f"file://{tmp_path}", health_port=str(port))
    assert status == 1
    assert f"PENSTOCK_HEALTH_PORT: 127.0.0.1:{port}: " in reported


def test_process_says_what_waits_and_ends_when_asked(tmp_path: Path) -> None:
    port = free_port()
    given = {"PENSTOCK_ROWS_URL": f"file://{tmp_path}", "PENSTOCK_HEALTH_PORT": str(port)}
    given |= {"PENSTOCK_BIGQUERY_ENDPOINT": f"http://127.0.0.1:{free_port()}"}
    ObjectSender(f"file://{tmp_path}", "rows").send(lines(row(0)))
    with subprocess.Popen(COMMAND, env=environment_with(given)) as process:
        try:
            wait_until(lambda: answers(port, "/metrics"), WAIT_LIMIT_S)
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(WAIT_LIMIT_S)
    assert status == 0
    assert list((tmp_path / "incoming/rows").iterdir()), "BigQuery is away, so rows stay"


def test_table_that_fails_keeps_no_other_waiting(tmp_path: Path) -> None:
    """Here, the path for the table's files is a file instead of a folder."""
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive/rows").write_text("in the way")
    port = free_port()
    given = {"PENSTOCK_ROWS_URL": f"file://{tmp_path}", "PENSTOCK_HEALTH_PORT": str(port)}
    given |= {"PENSTOCK_ARCHIVE_LOADS": "0", "PENSTOCK_ARCHIVE_EVERY_S": "1"}
    hours: Fields = {"row_id": "w", "worker": "w", "deployment": "d", "models": "m"}
    hours |= dict.fromkeys(("hour", "since", "reported_at", "started_at"), 1_790_000_000.0)
    hours |= dict.fromkeys(("busy_s", "idle_s", "loading_s"), 1.0)
    hours |= dict.fromkeys(("batches", "items", "cold_starts"), 1)
    ObjectSender(f"file://{tmp_path}", "rows").send(lines(row(0)))
    ObjectSender(f"file://{tmp_path}", "worker_hours").send(lines(hours))
    with subprocess.Popen(COMMAND, env=environment_with(given)) as process:
        try:
            wait_until(lambda: any(tmp_path.glob("archive/worker_hours/*/*")), WAIT_LIMIT_S)
        finally:
            process.send_signal(signal.SIGTERM)
            status = process.wait(WAIT_LIMIT_S)
    assert status == 0
    assert [*(tmp_path / "incoming/rows").iterdir()], "they wait until the place is free"


@pytest.mark.parametrize("day", ["yesterday", "2026-9-1", "2026-09-31"])
def test_day_that_no_folder_can_have_is_refused(tmp_path: Path, day: str) -> None:
    status, reported = ended("restore", "--from", day, rows_url=f"file://{tmp_path}")
    assert status == 2
    assert f"argument --from: invalid _day value: '{day}'" in reported


def test_lost_table_is_restored(bigquery_endpoint: str, tmp_path: Path) -> None:
    url, project = f"file://{tmp_path}", f"p-{uuid.uuid4().hex[:12]}"
    ObjectSender(url, "rows").send(lines(row(0), row(1, 1_790_000_000.0 + 86_400)))
    asyncio.run(archive_all(RowArchive(ObjectStore(url), "rows", None)))
    with connected(bigquery_endpoint, project) as client:
        tables.create(client, "penstock")
        given = {
            "rows_url": url,
            "project": project,
            "bigquery_endpoint": bigquery_endpoint,
        }
        status, reported = ended("restore", "--to", "2026-09-21", **given)
        assert (status, reported.splitlines()[0]) == (
            0,
            "rows: 1 days restored, 2026-09-21 to 2026-09-21",
        )
        assert ended("restore", **given)[1].startswith("rows: 1 days restored, 2026-09-22")
        assert ended("restore", **given)[1].startswith("rows: 0 days restored\n")
        query = "SELECT row_id FROM penstock.rows WHERE received_at >= TIMESTAMP '2000-01-01'"
        assert sorted(rows_of(client, query)) == [("r:0",), ("r:1",)]
