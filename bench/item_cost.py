"""CPU of an item in a worker's I/O process, with a model that takes no time and one item per job.

A worker with a model that computes nothing (bench/fairness/timed.py), in a process of its own, and
callers in this one that keep a number of jobs in flight. Broker and Redis are near. On two cores
they share what the worker leaves, so what counts is items per CPU second of the worker: it has one
core. Rows are written to the disk, as a worker does.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from bench.distant_link import distant
from bench.fairness.timed import BrokerSite, Callers, TimedWorker, WorkerCounts, servers
from bench.report import Figure, Outcome
from shared.gc_tuning import settle_heap
from shared.usage.bigquery import Fields
from shared.usage.senders import RowSender
from shared.usage.writer import RowWriter

IN_FLIGHT = 1000
NO_TIME_S = 1e-4
LEAD_S, SECONDS, ROUNDS = 2.0, 5.0, 3
MIN_PER_S = 6000.0


class _Taken(RowSender):
    """A table that takes every row."""

    linger_s = 1.0

    def send(self, rows: Sequence[Fields]) -> list[tuple[Fields, str]]:
        """Refuses none."""
        return []


def run() -> Outcome:
    """Measures with rows and without. The best round counts: other load only adds."""
    figures, details = list[Figure](), dict[str, Any]()
    for has_rows in (False, True):
        rounds = [measure(has_rows=has_rows) for _ in range(ROUNDS)]
        name = "with rows" if has_rows else "without rows"
        details[name] = rounds
        best = max(one["items_per_cpu_s"] for one in rounds)
        figures.append(Figure(f"items per CPU second, {name}", best, "/s", ">=", MIN_PER_S))
        figures.append(Figure(f"items, {name}", max(one["items_per_s"] for one in rounds), "/s"))
    return Outcome(figures, details)


def measure(*, has_rows: bool, redis_delay_ms: float = 0.0) -> dict[str, float]:
    """One round. Returns items/s, items per CPU second, and items of a batch.

    Args:
        has_rows: True if the worker writes rows.
        redis_delay_ms: each way to the worker's Redis.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        rows_dir = str(Path(folder) / "rows") if has_rows else ""
        with ExitStack() as stack:
            endpoint, redis_url = stack.enter_context(servers(Path(folder)))
            port = urlsplit(redis_url).port or 0
            link = stack.enter_context(distant(port, redis_delay_ms, Path(folder)))
            redis_url = redis_url.replace(f":{port}", f":{link}")
            site, project = BrokerSite(redis_url, endpoint), f"cost-{time.time_ns()}"
            uvloop.run(_provision(site, project))
            here, there = context.Pipe()
            child = context.Process(target=_work, args=(site, project, rows_dir, there))
            child.start()
            try:
                return uvloop.run(_call(site, project, here))
            finally:
                child.kill()
                child.join()


async def _provision(site: BrokerSite, project: str) -> None:
    await site.provision(project)


def _work(site: BrokerSite, project: str, rows_dir: str, pipe: Connection) -> None:
    """The process of the worker. Answers each message on the pipe with its counts."""
    uvloop.run(_work_until_killed(site, project, rows_dir, pipe))


async def _work_until_killed(
    site: BrokerSite, project: str, rows_dir: str, pipe: Connection
) -> None:
    async with AsyncExitStack() as stack:
        rows = None
        if rows_dir:
            writer = RowWriter(_Taken(), spool_dir=Path(rows_dir))
            rows = await stack.enter_async_context(writer)
        worker = TimedWorker(site, project, batch_s=NO_TIME_S, rows=rows)
        await stack.enter_async_context(worker)
        settle_heap()
        pipe.send("ready")
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(worker.counts())


async def _call(site: BrokerSite, project: str, worker: Connection) -> dict[str, float]:
    await asyncio.to_thread(worker.recv)
    async with site.transport(project) as transport:
        callers = Callers(transport)

        async def again() -> None:
            while True:
                await callers.ask("one", [1])

        tasks = [asyncio.create_task(again()) for _ in range(IN_FLIGHT)]
        tasks.append(asyncio.create_task(callers.receive()))
        await asyncio.sleep(LEAD_S)
        before = await _counts(worker)
        await asyncio.sleep(SECONDS)
        after = await _counts(worker)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    items = after.items - before.items
    return {
        "items_per_s": items / (after.at_s - before.at_s),
        "items_per_cpu_s": items / (after.cpu_s - before.cpu_s),
        "items_of_a_batch": items / max(1, after.batches - before.batches),
    }


async def _counts(worker: Connection) -> WorkerCounts:
    worker.send("")
    counts: WorkerCounts = await asyncio.to_thread(worker.recv)
    return counts


def main() -> None:
    """One round, with or without rows."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", action="store_true")
    arguments = parser.parse_args()
    print(measure(has_rows=arguments.rows), flush=True)


if __name__ == "__main__":
    main()
