"""The usage row writer on one core: its rate, a BigQuery outage, and the recovery.

The writer has a dedicated core. The simulated BigQuery has another core, if available, and responds
as slowly as the service does (bench/row_sink.py). A ten-minute outage is compressed: its rows are
written as fast as they can be created. Then BigQuery comes back, while rows keep arriving at the
usual rate for a while.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx
import msgspec
from prometheus_client import REGISTRY

from bench.report import Figure, Outcome, expect_none
from bench.row_sink import RowCounts
from bench.row_traffic import BURST, RATE_PER_S, RowTraffic
from infra.local.process import Process, free_port, listens
from shared.settings import SPOOL_MAX_BYTES
from shared.usage.bigquery import BigQuerySender
from shared.usage.writer import RowWriter
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

OUTAGE_S = 600
BACKLOG = RATE_PER_S * OUTAGE_S
STEADY_S = 20.0
ANSWER_MS = 100
"""How long the service's insertAll calls take."""
MAX_BESIDE = 20_000_000
"""Capacity for rows before and after the outage."""
CHUNK = 100_000
MAX_UNSAFE = 5000
"""Maximum number of rows not yet on disk. At this point, a worker stops accepting jobs, and so does
this benchmark.
"""
DRAIN_LIMIT_S = 1200.0
MIB = 2**20


def run() -> Outcome:
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder, port = Path(name), free_port()
        os.sched_setaffinity(0, cores[-1:])  # inherited by the sink
        words = [str(port), str(ANSWER_MS), str(BACKLOG + MAX_BESIDE)]
        try:
            with Process("sink", [sys.executable, "-m", "bench.row_sink", *words], folder) as sink:
                sink.wait_ready(lambda: listens(port), START_LIMIT_S)
                url = f"http://127.0.0.1:{port}"
                return asyncio.run(_Run(url, folder / "spool", cores).measure())
        finally:
            os.sched_setaffinity(0, cores)


class _Run:
    def __init__(self, url: str, spool_dir: Path, cores: list[int]) -> None:
        self._url = url
        self._spool_dir = spool_dir
        self._cores = cores
        self._traffic = RowTraffic()
        self._unsafe = 0

    async def measure(self) -> Outcome:
        writer = RowWriter(BigQuerySender("p", "d.rows", self._url), spool_dir=self._spool_dir)
        os.sched_setaffinity(0, self._cores[:1])  # inherited by the writer's threads
        async with writer:
            steady = await self._traffic.at_rate(writer, STEADY_S)
            await writer.flush(DRAIN_LIMIT_S)
            before_mib = resident_mib()
            await self._request("/away")
            outage_s = await self._as_fast_as_possible(writer)
            disk_bytes, held_mib = folder_bytes(self._spool_dir), resident_mib()
            await self._request("/back")
            drained_s, of_drain = await self._drain(writer)
            pending = writer.pending
            counts = await self._request("/counts")
        lost = metric("penstock_rows_lost_total")
        return Outcome(
            [
                expect_none("rows that did not arrive", self._traffic.written - counts.different),
                expect_none("rows that wait at the end, or were given up", pending + lost),
                expect_none("tokens that differ", abs(self._traffic.tokens - counts.tokens)),
                Figure("rows sent twice, for the view", counts.rows - counts.different, ""),
                Figure(f"core at {RATE_PER_S} rows/s", 100 * steady, "%", "<=", 100),
                Figure("writing and compressing in the outage", BACKLOG / outage_s, "rows/s"),
                Figure("a row on disk, compressed", disk_bytes / BACKLOG, "bytes"),
                Figure("disk", disk_bytes / MIB, "MiB", "<=", SPOOL_MAX_BYTES / MIB),
                Figure("memory for the outage", held_mib - before_mib, "MiB", "<=", 256),
                Figure("drained", drained_s, "s"),
                Figure("core while it drains", 100 * of_drain, "%"),
                Figure("memory, most", most_mib(), "MiB"),
            ],
            {
                "backlog": BACKLOG,
                "written": self._traffic.written,
                "outage_s": round(outage_s, 1),
            },
        )

    async def _request(self, path: str) -> RowCounts:
        async with httpx.AsyncClient(base_url=self._url, timeout=WAIT_LIMIT_S) as client:
            answer = await client.get(path)
        return msgspec.json.decode(answer.content, type=RowCounts)

    async def _as_fast_as_possible(self, writer: RowWriter) -> float:
        """Returns the seconds it takes to write the outage's rows, including compression.

        During the outage, the writer's thread has only seconds for work that would normally be
        spread over ten minutes. The rows therefore have to wait for the thread occasionally.
        """
        began_s, until = time.monotonic(), self._traffic.written + BACKLOG
        while self._traffic.written < until:
            for _ in range(CHUNK // BURST):
                for _ in range(BURST):
                    self._unsafe += 1
                    writer.write(self._traffic.row(), on_safe=self._is_safe)
                await asyncio.sleep(0 if self._unsafe < MAX_UNSAFE else 0.05)
            await asyncio.to_thread(self._until_packed)
        return time.monotonic() - began_s

    def _is_safe(self) -> None:
        self._unsafe -= 1

    def _until_packed(self) -> None:
        deadline_s = time.monotonic() + DRAIN_LIMIT_S
        while len(list(self._spool_dir.glob("*.segment"))) > 64 and time.monotonic() < deadline_s:
            time.sleep(0.05)

    async def _drain(self, writer: RowWriter) -> tuple[float, float]:
        """Returns seconds until nothing is pending, with new rows at first, and the core share."""
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        await self._traffic.at_rate(writer, STEADY_S)
        await writer.flush(DRAIN_LIMIT_S)
        took_s = time.monotonic() - began_s
        return took_s, (time.process_time() - began_cpu_s) / took_s


def folder_bytes(folder: Path) -> int:
    """Returns the total size of a folder's files, except files deleted during the count."""
    total_bytes = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):
            total_bytes += path.stat().st_size
    return total_bytes


def metric(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def most_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
