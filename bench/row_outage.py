"""The usage row writer during an outage of an embedded BigQuery, in real time.

The writer has one core and writes 5,000 rows per second throughout. BigQuery, a process on the
other core, is stopped (SIGSTOP) for the first half of the outage, is then killed (SIGKILL), and is
restarted at its end. BENCH_OUTAGE_S sets its length. `python -m bench rows` compresses ten minutes
into one.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path

from bench.pipeline import emulator
from bench.report import Figure, Outcome, expect_none
from bench.row_traffic import RATE_PER_S, RowTraffic
from bench.rows import DRAIN_LIMIT_S, MIB, folder_bytes, metric, most_mib, resident_mib
from infra import bigquery as tables
from infra.local.process import Process, listens
from shared.settings import SPOOL_MAX_BYTES
from shared.usage.bigquery import BigQuerySender, open_client
from shared.usage.writer import RowWriter
from tests.limits import START_LIMIT_S

OUTAGE_S = float(os.environ.get("BENCH_OUTAGE_S", "60"))
BEFORE_S = 20.0
AFTER_S = 60.0
"""How long rows keep arriving at the same rate after the outage, while the backlog is being
sent.
"""
LOOK_S = 5.0
PROJECT, DATASET = "outage", "penstock"
FOUND = f"""
SELECT COUNT(*), COUNT(DISTINCT row_id), SUM(tokens)
FROM {DATASET}.rows WHERE received_at >= TIMESTAMP '2020-01-01'
"""
FOUND_BY_VIEW = FOUND.replace(".rows", ".rows_deduplicated")


def run() -> Outcome:
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        os.sched_setaffinity(0, cores[-1:])  # inherited by BigQuery
        try:
            with emulator("bigquery", Path(name), "--data-dir", f"{name}/data") as (server, port):
                return asyncio.run(_Run(server, port, Path(name, "spool"), cores).measure())
        finally:
            os.sched_setaffinity(0, cores)


class _Run:
    def __init__(self, server: Process, port: int, spool_dir: Path, cores: list[int]) -> None:
        self._server = server
        self._port = port
        self._endpoint = f"http://127.0.0.1:{port}"
        self._spool_dir = spool_dir
        self._cores = cores
        self._traffic = RowTraffic()
        self._most_disk_bytes = 0

    async def measure(self) -> Outcome:
        with closing(open_client(PROJECT, self._endpoint)) as client:
            tables.create(client, DATASET)
        os.sched_setaffinity(0, self._cores[:1])  # inherited by the writer's threads
        sender = BigQuerySender(PROJECT, f"{DATASET}.rows", self._endpoint)
        async with RowWriter(sender, spool_dir=self._spool_dir) as writer:
            before = await self._traffic.at_rate(writer, BEFORE_S)
            await writer.flush(DRAIN_LIMIT_S)
            before_mib = resident_mib()
            rate_per_s, during = await self._outage(writer)
            held_mib, waiting = resident_mib(), writer.pending
            began_s, sent = time.monotonic(), waiting - self._traffic.written
            after = await self._traffic.at_rate(writer, AFTER_S)
            await writer.flush(DRAIN_LIMIT_S)
            drained_s, pending = time.monotonic() - began_s, writer.pending
            sent += self._traffic.written
        counted, different, tokens = self._asked(FOUND)
        in_view, _, tokens_in_view = self._asked(FOUND_BY_VIEW)
        disk_mib = self._most_disk_bytes / MIB
        written, lost = self._traffic.written, metric("penstock_rows_lost_total")
        return Outcome(
            [
                Figure("outage", OUTAGE_S, "s"),
                expect_none("rows that did not arrive", written - different),
                expect_none("rows that wait at the end, or were given up", pending + lost),
                expect_none("rows in the view too many", in_view - written),
                expect_none(
                    "tokens in the view that differ", abs(tokens_in_view - self._traffic.tokens)
                ),
                Figure("rows sent twice, for the view", counted - different, ""),
                Figure("rows/s in the outage", rate_per_s, "rows/s", ">=", 0.99 * RATE_PER_S),
                Figure("core before", 100 * before, "%", "<=", 100),
                Figure("core in the outage", 100 * during, "%", "<=", 100),
                Figure("core in the minute after it", 100 * after, "%", "<=", 100),
                Figure("disk, most", disk_mib, "MiB", "<=", SPOOL_MAX_BYTES / MIB),
                Figure("memory for the outage", held_mib - before_mib, "MiB", "<=", 256),
                Figure("memory, most", most_mib(), "MiB"),
                Figure("sent after it, new rows included", sent / drained_s, "rows/s"),
                Figure("drained", drained_s, "s"),
            ],
            {"written": written, "waiting at its end": waiting, "tokens": int(tokens)},
        )

    async def _outage(self, writer: RowWriter) -> tuple[float, float]:
        began_s, began = time.monotonic(), self._traffic.written
        self._server.pause()
        first = await self._half(writer)
        self._server.kill()
        second = await self._half(writer)
        rate_per_s = (self._traffic.written - began) / (time.monotonic() - began_s)
        self._server.stop()
        os.sched_setaffinity(0, self._cores[-1:])
        self._server.start()
        os.sched_setaffinity(0, self._cores[:1])
        await asyncio.to_thread(self._server.wait_ready, lambda: listens(self._port), START_LIMIT_S)
        return rate_per_s, (first + second) / 2

    async def _half(self, writer: RowWriter) -> float:
        looks = max(1, round(OUTAGE_S / 2 / LOOK_S))
        taken_s = 0.0
        for _ in range(looks):
            taken_s += await self._traffic.at_rate(writer, OUTAGE_S / 2 / looks)
            self._most_disk_bytes = max(self._most_disk_bytes, folder_bytes(self._spool_dir))
        return taken_s / looks

    def _asked(self, sql: str) -> tuple[int, int, int]:
        with closing(open_client(PROJECT, self._endpoint)) as client:
            (row,) = client.query(sql).result()
            return row[0], row[1], row[2]
