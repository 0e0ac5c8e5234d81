"""One worker and its callers at a distance from their broker, each in a separate process.

A real worker, with a model that takes a fixed time per batch (bench/timed_worker.py), and callers
that keep a number of jobs in flight are both behind a proxy (bench/distant_link.py). Redis is
nearby. Because the model does no work, any slowdown is time spent waiting for the broker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import uvloop

from bench.child_process import ChildProcess
from bench.distant_link import distant
from bench.load.generator import percentiles
from bench.timed_worker import MODEL, BrokerSite, Callers, DeviceKind, TimedWorker, WorkerCounts
from shared.errors import PenstockError
from shared.process.gc_tuning import settle_heap
from shared.usage.bigquery import RowLine
from shared.usage.senders import RowSender
from shared.usage.writer import RowWriter

Broker = Literal["pubsub", "rabbitmq"]
FULL = MODEL.batch.max_items
START_LIMIT_S = 60.0
SAMPLES = 10
"""How many times per measurement to count the messages held."""


@dataclass(frozen=True, slots=True)
class FarLoad:
    """A model's speed and the load from its callers."""

    name: str
    batch_s: float
    """Time that a batch of any size takes."""
    job_items: int
    jobs: int
    """Jobs in flight."""
    max_items: int = FULL
    device: DeviceKind = "none"


@dataclass(frozen=True, slots=True)
class Link:
    """The link to the broker. See bench/distant_link.py."""

    delay_ms: float = 0.0
    jitter: float = 0.0
    cut_every_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The results of one run."""

    items_per_s: float
    busy: float
    """Fraction of the time that the model was running (0 to 1)."""
    fill: float
    """Items per batch, as a fraction of the maximum."""
    p50_ms: float
    p99_ms: float
    cpu: float
    """Cores used by the worker's process."""
    held: float
    """Average number of messages held by the worker."""
    redelivered: int
    """Number of messages that were redelivered."""
    failed: int
    """Number of publishes that failed and were retried."""


@dataclass(frozen=True, slots=True)
class Killed:
    """The delay and repeated work caused by a worker's death."""

    items_per_s: float
    """Items per second before the kill."""
    held: int
    """Number of messages the worker held when it was killed."""
    redelivered: int
    """Number of messages that the next worker received again."""
    redelivered_s: float
    """The time it takes to process these messages in full batches."""
    healed_s: float
    """Time from the kill to the last response for a job in flight."""


@contextmanager
def far_site(
    broker: Broker, address: str, redis_url: str, link: Link, folder: Path
) -> Iterator[BrokerSite]:
    """Yields the broker at the other end of a link.

    `address` is its endpoint (Pub/Sub) or URL (RabbitMQ).
    """
    port = urlsplit(address if broker == "rabbitmq" else f"//{address}").port or 0
    with distant(
        port, link.delay_ms, folder, jitter=link.jitter, cut_every_s=link.cut_every_s
    ) as far_port:
        far = address.replace(f":{port}", f":{far_port}")
        if broker == "rabbitmq":
            yield BrokerSite(redis_url, rabbitmq_url=far, near=address)
        else:
            yield BrokerSite(redis_url, pubsub_endpoint=far, near=address)


class WorkerProcess(ChildProcess):
    """A worker in a separate process.

    Args:
        hand: how many messages of each priority the worker holds. 0 means the usual number.
        rows_dir: the folder to which the worker writes rows. If empty, no rows are written.
    """

    def __init__(
        self, site: BrokerSite, project: str, load: FarLoad, hand: int = 0, rows_dir: str = ""
    ) -> None:
        super().__init__(_work, site, project, load, hand, rows_dir)

    async def counts(self) -> WorkerCounts:
        """Returns its totals, as soon as it has started."""
        self.send()
        counted: WorkerCounts = await self.receive(START_LIMIT_S)
        return counted


class _Taken(RowSender):
    """A table that accepts every row."""

    linger_s = 1.0

    def send(self, rows: Sequence[RowLine]) -> list[tuple[RowLine, str]]:
        return []


def _work(*arguments: Any) -> None:
    uvloop.run(_work_until_killed(*arguments))


async def _work_until_killed(
    site: BrokerSite, project: str, load: FarLoad, hand: int, rows_dir: str, pipe: Connection
) -> None:
    async with AsyncExitStack() as stack:
        rows = None
        if rows_dir:
            writer = RowWriter(_Taken(), spool_dir=Path(rows_dir))
            rows = await stack.enter_async_context(writer)
        worker = TimedWorker(
            site,
            project,
            batch_s=load.batch_s,
            max_items=load.max_items,
            device=load.device,
            hand=hand,
            rows=rows,
        )
        await stack.enter_async_context(worker)
        settle_heap()
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(worker.counts())


class _Calling:
    """Callers that keep jobs in flight until `finish`."""

    def __init__(self, callers: Callers, load: FarLoad) -> None:
        self._callers = callers
        self._load = load
        self._is_over = False
        self.waits_ms = list[float]()
        self.failed = 0
        self._tasks = [asyncio.create_task(self._again()) for _ in range(load.jobs)]

    async def _again(self) -> None:
        while not self._is_over:
            began_s = time.perf_counter()
            await self._until_sent()
            self.waits_ms.append(1000 * (time.perf_counter() - began_s))

    async def _until_sent(self) -> None:
        while True:
            try:
                await self._callers.ask(self._load.job_items)
            except PenstockError:  # the link was cut, and the job may or may not have been sent
                self.failed += 1
            else:
                return

    async def finish(self, limit_s: float) -> None:
        """Stops sending requests, and waits for the remaining responses.

        Raises:
            TimeoutError: some responses did not arrive.
        """
        self._is_over = True
        async with asyncio.timeout(limit_s):
            await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def _calling(site: BrokerSite, project: str, load: FarLoad) -> AsyncIterator[_Calling]:
    async with site.transport(project) as transport:
        callers = Callers(transport)
        receiving = asyncio.create_task(callers.receive())
        calling = _Calling(callers, load)
        try:
            yield calling
        finally:
            await calling.cancel()
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)


def provisioned(site: BrokerSite) -> str:
    """Creates a separate project and returns its name."""
    project = f"far-{time.time_ns()}"
    uvloop.run(site.provision(project))
    return project


def measure(
    site: BrokerSite,
    load: FarLoad,
    *,
    lead_s: float,
    seconds: float,
    hand: int = 0,
    rows_dir: str = "",
) -> Seen:
    """Runs one worker for `lead_s` plus `seconds`. See WorkerProcess for `hand` and `rows_dir`."""
    project = provisioned(site)
    with WorkerProcess(site, project, load, hand, rows_dir) as worker:
        return uvloop.run(_measure(site, project, load, lead_s, seconds, worker))


async def _measure(
    site: BrokerSite,
    project: str,
    load: FarLoad,
    lead_s: float,
    seconds: float,
    worker: WorkerProcess,
) -> Seen:
    await worker.counts()
    async with _calling(site, project, load) as calling:
        await asyncio.sleep(lead_s)
        before = await worker.counts()
        calling.waits_ms.clear()
        held = list[int]()
        for _ in range(SAMPLES):
            await asyncio.sleep(seconds / SAMPLES)
            after = await worker.counts()
            held.append(after.held)
        waits = percentiles(calling.waits_ms) if calling.waits_ms else {"p50": 0.0, "p99": 0.0}
    spent_s, batches = after.at_s - before.at_s, after.batches - before.batches
    items = after.items - before.items
    return Seen(
        items_per_s=items / spent_s,
        busy=(after.busy_s - before.busy_s) / spent_s,
        fill=items / max(1, batches) / load.max_items,
        p50_ms=waits["p50"],
        p99_ms=waits["p99"],
        cpu=(after.cpu_s - before.cpu_s) / spent_s,
        held=sum(held) / len(held),
        redelivered=after.redelivered - before.redelivered,
        failed=calling.failed,
    )


def kill_with_full_hand(
    site: BrokerSite, load: FarLoad, *, lead_s: float, limit_s: float
) -> Killed:
    """Kills a worker after `lead_s` under a load heavy enough to fill it. Another worker continues.

    Raises:
        TimeoutError: some responses did not arrive within `limit_s`.
    """
    project = provisioned(site)
    with (
        WorkerProcess(site, project, load) as first,
        WorkerProcess(site, project, load) as second,
    ):
        return uvloop.run(_kill(site, project, load, lead_s, limit_s, first, second))


async def _full_hand(worker: WorkerProcess, load: FarLoad, limit_s: float) -> WorkerCounts:
    """Waits until a worker holds more than two batches of messages.

    If the broker stalls, the worker stays empty.
    """
    async with asyncio.timeout(limit_s):
        while True:
            counts = await worker.counts()
            if counts.held > 2 * load.max_items:
                return counts
            await asyncio.sleep(0.005)


async def _kill(
    site: BrokerSite,
    project: str,
    load: FarLoad,
    lead_s: float,
    limit_s: float,
    first: WorkerProcess,
    second: WorkerProcess,
) -> Killed:
    await asyncio.gather(first.counts(), second.counts())
    async with _calling(site, project, load) as calling:
        await asyncio.sleep(lead_s / 2)
        before = await first.counts()
        await asyncio.sleep(lead_s / 2)
        then, already = await asyncio.gather(_full_hand(first, load, limit_s), second.counts())
        first.kill()
        killed_s = time.perf_counter()
        await calling.finish(limit_s)
        healed_s = time.perf_counter() - killed_s
        after = await second.counts()
    rate = (then.items - before.items) / (then.at_s - before.at_s)
    redelivered = after.redelivered - already.redelivered
    return Killed(
        items_per_s=rate,
        held=then.held,
        redelivered=redelivered,
        redelivered_s=redelivered * load.job_items / load.max_items * load.batch_s,
        healed_s=healed_s,
    )
