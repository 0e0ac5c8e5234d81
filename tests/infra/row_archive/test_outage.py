"""A day without BigQuery in which every API instance and every worker is replaced several times.

Rows go through the product's own writer, with the sender from the settings. A pod's row folder
disappears with the pod, as on Cloud Run (memory) and on GKE (emptyDir). The object store is a
folder, and BigQuery is a process that is killed for the day.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from bench.row_traffic import RowTraffic
from infra import bigquery as tables
from infra.local.process import Process, free_port, listens
from infra.row_archive.archive import RowArchiveSettings
from shared.settings import Settings, environment_with
from shared.usage.senders import incoming, sender_of
from shared.usage.writer import RowWriter
from tests.bigquery_client import connected, rows_of
from tests.infra.running_up import wait_until
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=60)]

DAY_S = 86_400
PODS = ("api-1", "api-2", "worker-1", "worker-2", "worker-3")
GENERATIONS = 6
"""How many times each pod is replaced during the day: once every four hours."""
ROWS = 240
"""Rows per pod."""


class BigQueryProcess:
    """An embedded BigQuery that can be taken down, on a fixed port."""

    def __init__(self, undo: ExitStack, folder: Path) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "bigquery_emulator", "--port", str(self.port)]
        self._process = Process("bigquery", [*command, "--data-dir", str(folder / "data")], folder)
        undo.enter_context(self._process)
        self._wait()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        self._process.kill()

    def come_back(self) -> None:
        self._process.stop()
        self._process.start()
        self._wait()

    def _wait(self) -> None:
        self._process.wait_ready(lambda: listens(self.port), START_LIMIT_S)


@pytest.fixture
def bigquery(tmp_path: Path) -> Iterator[BigQueryProcess]:
    with ExitStack() as undo:
        yield BigQueryProcess(undo, tmp_path)


class Day:
    """A day's rows, from pods that come and go."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._began_s = time.time() - DAY_S
        self.traffic = RowTraffic()

    async def live(self) -> None:
        for generation in range(GENERATIONS):
            await asyncio.gather(*(self._pod(name, generation) for name in PODS))

    async def _pod(self, name: str, generation: int) -> None:
        """A pod from its start until its folder is gone. SIGTERM closes its writer."""
        spool_dir = self._folder / f"{name}-{generation}"
        async with RowWriter(sender_of(self._settings), spool_dir=spool_dir) as writer:
            for number in range(ROWS):
                part = (generation + number / ROWS) / GENERATIONS
                row = msgspec.structs.replace(
                    self.traffic.row(), received_at_s=self._began_s + part * DAY_S
                )
                writer.write(row)
            await asyncio.sleep(0)
        shutil.rmtree(spool_dir)


def settings_of(bigquery: BigQueryProcess, project: str, rows_url: str) -> RowArchiveSettings:
    return RowArchiveSettings(
        project=project,
        dataset="penstock",
        bigquery_endpoint=bigquery.endpoint,
        rows_url=rows_url,
    )


def counted(bigquery: BigQueryProcess, project: str) -> tuple[int, int]:
    """The rows that reports see, and their tokens."""
    query = (
        "SELECT COUNT(*), SUM(tokens) FROM penstock.rows_deduplicated"
        " WHERE received_at >= TIMESTAMP '2000-01-01'"
    )
    with connected(bigquery.endpoint, project) as client:
        ((rows, tokens),) = rows_of(client, query)
    return int(str(rows)), int(str(tokens or 0))


async def day_without(
    bigquery: BigQueryProcess, settings: RowArchiveSettings, folder: Path
) -> RowTraffic:
    """Creates the tables, stops BigQuery, and runs through the day."""
    with connected(bigquery.endpoint, settings.project) as client:
        tables.create(client, settings.dataset)
    bigquery.kill()
    day = Day(settings, folder / "pods")
    with pytest.MonkeyPatch.context() as patched:
        # The object store is up all day. On a busy machine, a put may take longer than an exiting
        # pod waits for it.
        patched.setattr("shared.usage.writer.CLOSE_S", WAIT_LIMIT_S)
        await day.live()
    return day.traffic


def archive(settings: RowArchiveSettings, folder: Path) -> Process:
    """The row archive as a process, as a context manager."""
    given = {
        "PENSTOCK_PROJECT": settings.project,
        "PENSTOCK_BIGQUERY_ENDPOINT": settings.bigquery_endpoint,
        "PENSTOCK_ROWS_URL": settings.rows_url,
        "PENSTOCK_HEALTH_PORT": "0",
        "PENSTOCK_ARCHIVE_EVERY_S": "1",
    }
    command = [sys.executable, "-m", "infra.row_archive"]
    return Process("row-archive", command, folder, environment=environment_with(given))


async def test_no_row_is_lost_in_a_day_without_bigquery(
    bigquery: BigQueryProcess, tmp_path: Path
) -> None:
    project = f"p-{uuid.uuid4().hex[:12]}"
    settings = settings_of(bigquery, project, f"file://{tmp_path / 'rows'}")
    traffic = await day_without(bigquery, settings, tmp_path)
    assert traffic.written == len(PODS) * GENERATIONS * ROWS

    # The archive keeps trying and is replaced too. Its rows wait for BigQuery, although they are
    # already in files.
    waiting, files = tmp_path / "rows" / incoming("rows"), tmp_path / "rows/archive/rows"
    with archive(settings, tmp_path):
        await asyncio.to_thread(wait_until, lambda: any(files.glob("*/*")), WAIT_LIMIT_S)
    assert any(waiting.iterdir())
    bigquery.come_back()
    with archive(settings, tmp_path):
        await asyncio.to_thread(wait_until, lambda: not any(waiting.iterdir()), WAIT_LIMIT_S)
    assert counted(bigquery, project) == (traffic.written, traffic.tokens)


async def test_without_the_archive_they_are_gone_with_their_pods(
    bigquery: BigQueryProcess, tmp_path: Path
) -> None:
    """Without the archive, the rows of pods that exited during the day are lost for good."""
    project = f"p-{uuid.uuid4().hex[:12]}"
    settings = settings_of(bigquery, project, "")
    traffic = await day_without(bigquery, settings, tmp_path)
    bigquery.come_back()
    async with RowWriter(sender_of(settings), spool_dir=tmp_path / "pods/last") as writer:
        writer.write(traffic.row())
        assert await writer.flush(WAIT_LIMIT_S)
    assert counted(bigquery, project)[0] == 1
    assert traffic.written == len(PODS) * GENERATIONS * ROWS + 1
