"""The writer of usage rows on one core: its rate, an outage of BigQuery, and the way out of it.

The writer has a core of its own. What stands for BigQuery has another one, where there is one,
and answers after as long as the service (bench/row_sink.py). An outage of ten minutes is
compressed: its rows come as fast as they can be made. Then BigQuery is back, while rows go on for a
while at the usual rate. `python -m bench.rows ROWS` has another backlog.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import httpx
import msgspec
from prometheus_client import REGISTRY

from bench.report import Figure, Outcome
from bench.row_sink import Counts
from infra.local.process import Process, free_port, listens
from shared.catalog import Model
from shared.catalog_entry import Batch, Price
from shared.messages import Envelope, ItemOutcome, Receipt
from shared.settings import SPOOL_MAX_BYTES
from shared.usage.row import Row, row_of
from shared.usage.writer import RowWriter
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S

RATE_PER_S = 5000
OUTAGE_S = 600
BACKLOG = RATE_PER_S * OUTAGE_S
STEADY_S = 20.0
ANSWER_MS = 100
"""How long the service takes for an insertAll."""
MOST_BESIDE = 20_000_000
"""Room for rows before and after the outage."""
CHUNK = 100_000
MOST_UNSAFE = 5000
"""Rows that are not on disk yet. A worker takes no more jobs then, and neither does this."""
BURST = 50
"""Rows that are written in one turn of the event loop."""
DRAIN_LIMIT_S = 1200.0
MIB = 2**20
MODEL = Model(
    name="mini",
    task="embedding",
    source="local:x",
    dimensions=1,
    batch=Batch(max_tokens=64),
    price=Price(per_million_tokens_usd=0.01),
)


def run(backlog: int = BACKLOG) -> Outcome:
    """Writes at the rate, through an outage, and until BigQuery has all of it."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder, port = Path(name), free_port()
        os.sched_setaffinity(0, cores[-1:])  # inherited by the sink
        words = [str(port), str(ANSWER_MS), str(backlog + MOST_BESIDE)]
        try:
            with Process("sink", [sys.executable, "-m", "bench.row_sink", *words], folder) as sink:
                sink.wait_ready(lambda: listens(port), START_LIMIT_S)
                url = f"http://127.0.0.1:{port}"
                return asyncio.run(_Run(url, folder / "spool", backlog, cores).measure())
        finally:
            os.sched_setaffinity(0, cores)


class _Run:
    def __init__(self, url: str, spool_dir: Path, backlog: int, cores: list[int]) -> None:
        self._url = url
        self._spool_dir = spool_dir
        self._backlog = backlog
        self._cores = cores
        self._written = 0
        self._tokens = 0
        self._unsafe = 0

    async def measure(self) -> Outcome:
        writer = RowWriter(project="p", dataset="d", endpoint=self._url, spool_dir=self._spool_dir)
        os.sched_setaffinity(0, self._cores[:1])  # inherited by the writer's threads
        async with writer:
            steady = await self._at_rate(writer, STEADY_S)
            await writer.flush(DRAIN_LIMIT_S)
            before_mib = _resident_mib()
            await self._told("/away")
            outage_s = await self._as_fast_as_possible(writer)
            disk_bytes, held_mib = self._disk_bytes(), _resident_mib()
            await self._told("/back")
            drained_s, of_drain = await self._drain(writer)
            pending = writer.pending
            found = await self._told("/counts")
        lost = _metric("penstock_rows_lost_total")
        return Outcome(
            [
                Figure("rows that did not arrive", self._written - found.different, "", "<=", 0),
                Figure("rows that wait at the end, or were given up", pending + lost, "", "<=", 0),
                Figure("tokens that differ", abs(self._tokens - found.tokens), "", "<=", 0),
                Figure("rows sent twice, for the view", found.rows - found.different, ""),
                Figure(f"core at {RATE_PER_S} rows/s", 100 * steady, "%", "<=", 100),
                Figure("writing and compressing in the outage", self._backlog / outage_s, "rows/s"),
                Figure("a row on disk, compressed", disk_bytes / self._backlog, "bytes"),
                Figure("disk", disk_bytes / MIB, "MiB", "<=", SPOOL_MAX_BYTES / MIB),
                Figure("memory for the outage", held_mib - before_mib, "MiB", "<=", 256),
                Figure("drained", drained_s, "s"),
                Figure("core while it drains", 100 * of_drain, "%"),
                Figure("memory, most", _most_mib(), "MiB"),
            ],
            {"backlog": self._backlog, "written": self._written, "outage_s": round(outage_s, 1)},
        )

    async def _told(self, path: str) -> Counts:
        async with httpx.AsyncClient(base_url=self._url, timeout=WAIT_LIMIT_S) as client:
            answer = await client.get(path)
        return msgspec.json.decode(answer.content, type=Counts)

    async def _at_rate(self, writer: RowWriter, seconds: float) -> float:
        """The part of the core that it takes, the making of the rows left out."""
        began_s, began_cpu_s, made_cpu_s = time.monotonic(), time.process_time(), 0.0
        while (elapsed_s := time.monotonic() - began_s) < seconds:
            due = int(elapsed_s * RATE_PER_S)
            written = 0
            while due > 0 and written < min(BURST, due):
                thread_s = time.thread_time()
                row = self._row()
                made_cpu_s += time.thread_time() - thread_s
                writer.write(row)
                written += 1
            began_s += written / RATE_PER_S
            seconds -= written / RATE_PER_S
            await asyncio.sleep(0 if due > BURST else 0.002)
        return (time.process_time() - began_cpu_s - made_cpu_s) / STEADY_S

    async def _as_fast_as_possible(self, writer: RowWriter) -> float:
        """The seconds that the rows of the outage take, compressing them included.

        The writer's thread has an outage of seconds to do what it has ten minutes for. So the rows
        wait for it now and then.
        """
        began_s, until = time.monotonic(), self._written + self._backlog
        while self._written < until:
            for _ in range(CHUNK // BURST):
                for _ in range(BURST):
                    self._unsafe += 1
                    writer.write(self._row(), self._is_safe)
                await asyncio.sleep(0 if self._unsafe < MOST_UNSAFE else 0.05)
            await asyncio.to_thread(self._until_packed)
        return time.monotonic() - began_s

    def _is_safe(self) -> None:
        self._unsafe -= 1

    def _until_packed(self) -> None:
        """Waits until little lies on disk as it came beside what is in memory too."""
        deadline_s = time.monotonic() + DRAIN_LIMIT_S
        while len(list(self._spool_dir.glob("*.segment"))) > 64 and time.monotonic() < deadline_s:
            time.sleep(0.05)

    async def _drain(self, writer: RowWriter) -> tuple[float, float]:
        """Seconds until nothing waits, at first with new rows beside, and the part of the core."""
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        await self._at_rate(writer, STEADY_S)
        await writer.flush(DRAIN_LIMIT_S)
        took_s = time.monotonic() - began_s
        return took_s, (time.process_time() - began_cpu_s) / took_s

    def _disk_bytes(self) -> int:
        return sum(path.stat().st_size for path in self._spool_dir.iterdir())

    def _row(self) -> Row:
        """A row as a worker writes it, with all columns that it knows."""
        number, now_s = self._written, time.time()
        self._written += 1
        tokens = 3 + number % 250
        self._tokens += tokens
        envelope = Envelope(
            request_id=f"req_{number * 2654435761 % 2**64:032x}{number:08x}",
            part=0,
            model=MODEL.name,
            tenant=f"tenant-{number % 20}",
            deadline_s=now_s + 30,
            received_at_s=now_s,
            published_at_s=now_s,
            api_instance="api-3f",
            key_id="4fJ0aQz81LmN",
            plan="team",
            user_agent_family="openai-python",
        )
        ms = number * 7919 % 100_003 / 1009
        receipt = Receipt("miss", now_s, now_s, now_s, ms, 2 * ms, 1 + number % 64, tokens)
        facts = {"worker": "worker-" + "0" * 24, "device": "NVIDIA L4", "region": "europe-west4"}
        outcome = ItemOutcome(0, "succeeded", receipt)
        return row_of(envelope, outcome, MODEL, replied_at_s=now_s, device_share=0.25, **facts)


def _metric(name: str) -> float:
    return REGISTRY.get_sample_value(name) or 0.0


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def _most_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    for figure in run(int(sys.argv[1]) if sys.argv[1:] else BACKLOG).figures:
        print(f"{figure.name}: {figure.value:,.1f} {figure.unit}{'' if figure.is_met else ' !'}")
