"""How busy a model stays, by the distance to the broker.

A real worker with a model that takes a fixed time for a batch (bench/fairness/timed.py) and callers
that keep a number of jobs in flight, each in a process of its own, both behind a proxy that delays
each direction (bench/distant_link.py). Redis is near. As the model computes nothing, a difference
to no delay is time in which it waited for the broker. "As before" is a worker that holds two
batches at any distance.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import uvloop

from bench.distant_link import distant
from bench.fairness.timed import JOB_ITEMS, MODEL, BrokerSite, Callers, TimedWorker, servers
from bench.load.generator import percentiles
from bench.report import Figure, Outcome
from infra.local.stack_processes import RabbitServer

Broker = Literal["pubsub", "rabbitmq"]
DELAYS_MS = (0, 10, 25, 50, 100)
LEAD_S, SECONDS = 5.0, 8.0
KEPT = {10: 0.95, 25: 0.95, 50: 0.9, 100: 0.85}
"""At least this share of the busy time without delay, by the delay in ms (50 ms a batch)."""
MIN_SLOW, MIN_FAST = 0.99, 0.9
IN_FLIGHT = 1000
FULL = MODEL.batch.max_items
TWO_BATCHES = 2 * FULL


@dataclass(frozen=True, slots=True)
class FarLoad:
    """A model and its callers."""

    name: str
    batch_s: float
    """Time of a batch, whatever is in it."""
    job_items: int
    jobs: int
    """Jobs in flight."""
    delays_ms: Sequence[int] = DELAYS_MS


LOADS = (
    FarLoad("50 ms a batch, 1 item", 0.05, 1, IN_FLIGHT),
    FarLoad("500 ms a batch, 1 item", 0.5, 1, IN_FLIGHT, (0, 25, 100)),
    FarLoad("5 ms a batch, 16 items", 0.005, JOB_ITEMS, IN_FLIGHT, (0, 10, 25)),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one run showed."""

    items_per_s: float
    busy: float
    """Share of the time in which the model ran, 0 to 1."""
    fill: float
    """Items of a batch, as a share of the most."""
    p50_ms: float
    p99_ms: float
    cpu: float
    """Cores that the worker's process used."""
    held: float
    """Messages that the worker held, on average."""
    redelivered: int


def run(*, quick: bool = False) -> Outcome:
    """Measures both brokers, or with `quick` Pub/Sub at three distances."""
    figures, details = list[Figure](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        endpoint, redis_url = stack.enter_context(servers(Path(folder)))
        brokers: dict[Broker, str] = {"pubsub": endpoint}
        if not quick:
            rabbit = RabbitServer(Path(folder) / "rabbitmq", Path(folder))
            brokers["rabbitmq"] = stack.enter_context(rabbit).url
        for broker, address in brokers.items():
            for load in LOADS[:1] if quick else LOADS:
                delays_ms = (0, 25, 50) if quick else load.delays_ms
                seen, before = dict[int, Seen](), dict[int, Seen]()
                for delay_ms in delays_ms:
                    with _site(broker, address, redis_url, delay_ms, Path(folder)) as site:
                        before[delay_ms] = measure(site, load, SECONDS, hand=TWO_BATCHES)
                        seen[delay_ms] = measure(site, load, SECONDS)
                    print(f"{broker}, {load.name}, {delay_ms} ms: {seen[delay_ms]}", flush=True)
                name = f"{broker}, {load.name}"
                figures += _figures(name, load, seen, before)
                details[name], details[f"{name}, as before"] = _plain(seen), _plain(before)
    return Outcome(figures, details)


def _plain(seen: dict[int, Seen]) -> dict[int, dict[str, float]]:
    return {
        delay_ms: {name: round(getattr(one, name), 3) for name in Seen.__slots__}
        for delay_ms, one in seen.items()
    }


def _figures(
    name: str, load: FarLoad, seen: dict[int, Seen], before: dict[int, Seen]
) -> Iterator[Figure]:
    near = seen[0]
    for delay_ms, one in seen.items():
        as_before = before[delay_ms].items_per_s
        yield Figure(f"{name}, {delay_ms} ms: rate as before", as_before, "items/s")
        yield Figure(f"{name}, {delay_ms} ms: rate", one.items_per_s, "items/s")
        if delay_ms:
            least = {0.05: KEPT[delay_ms], 0.5: MIN_SLOW}.get(load.batch_s, MIN_FAST)
            kept = one.items_per_s / near.items_per_s
            yield Figure(f"{name}, {delay_ms} ms: of no delay", kept, "", ">=", least)


@contextmanager
def _site(
    broker: Broker, address: str, redis_url: str, delay_ms: float, folder: Path
) -> Iterator[BrokerSite]:
    """The broker at a distance."""
    if broker == "pubsub":
        host, _, port = address.partition(":")
        with distant(int(port), delay_ms, folder) as link:
            yield BrokerSite(redis_url, pubsub_endpoint=f"{host}:{link}", near=address)
        return
    url = urlsplit(address)
    with distant(url.port or 0, delay_ms, folder) as link:
        far = address.replace(f":{url.port}", f":{link}")
        yield BrokerSite(redis_url, rabbitmq_url=far, near=address)


def measure(site: BrokerSite, load: FarLoad, seconds: float, *, hand: int = 0) -> Seen:
    """Runs one worker for LEAD_S and `seconds`. `hand`: as in TimedWorker."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    project = f"far-{time.time_ns()}"
    child = context.Process(
        target=_work, args=(site, project, load.batch_s, hand, there), daemon=True
    )
    uvloop.run(_provision(site, project))
    child.start()
    try:
        if not here.poll(60.0):
            raise TimeoutError("the worker did not start")
        here.recv()
        return uvloop.run(_call(site, project, load, seconds, here))
    finally:
        child.terminate()
        child.join(10.0)


async def _provision(site: BrokerSite, project: str) -> None:
    await site.provision(project)


def _work(site: BrokerSite, project: str, batch_s: float, hand: int, pipe: Connection) -> None:
    """The process of the worker. Answers each message on the pipe with its counts."""
    uvloop.run(_work_until_killed(site, project, batch_s, hand, pipe))


async def _work_until_killed(
    site: BrokerSite, project: str, batch_s: float, hand: int, pipe: Connection
) -> None:
    async with TimedWorker(site, project, batch_s=batch_s, hand=hand) as worker:
        pipe.send("ready")
        while True:
            await asyncio.to_thread(pipe.recv)
            pipe.send(worker.counts())


async def _call(
    site: BrokerSite, project: str, load: FarLoad, seconds: float, worker: Connection
) -> Seen:
    waits_ms = list[float]()
    async with site.transport(project) as transport:
        callers = Callers(transport)
        receiving = asyncio.create_task(callers.receive())

        async def again() -> None:
            while True:
                began_s = time.perf_counter()
                await callers.ask("one", [1] * load.job_items)
                waits_ms.append(1000 * (time.perf_counter() - began_s))

        calling = [asyncio.create_task(again()) for _ in range(load.jobs)]
        await asyncio.sleep(LEAD_S)
        worker.send("")
        before = await asyncio.to_thread(worker.recv)
        waits_ms.clear()
        held = list[int]()
        for _ in range(10):
            await asyncio.sleep(seconds / 10)
            worker.send("")
            after = await asyncio.to_thread(worker.recv)
            held.append(after.held)
        for task in (*calling, receiving):
            task.cancel()
        await asyncio.gather(*calling, receiving, return_exceptions=True)
    spent_s, batches = after.at_s - before.at_s, after.batches - before.batches
    items = after.items - before.items
    waits = percentiles(waits_ms)
    return Seen(
        items_per_s=items / spent_s,
        busy=(after.busy_s - before.busy_s) / spent_s,
        fill=items / max(1, batches) / FULL,
        p50_ms=waits["p50"],
        p99_ms=waits["p99"],
        cpu=(after.cpu_s - before.cpu_s) / spent_s,
        held=sum(held) / len(held),
        redelivered=after.redelivered - before.redelivered,
    )


def main() -> None:
    """Measures one load at one distance, and prints what it showed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("delay_ms", type=float)
    parser.add_argument("--broker", choices=("pubsub", "rabbitmq"), default="pubsub")
    parser.add_argument("--load", type=int, default=0, choices=range(len(LOADS)))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        endpoint, redis_url = stack.enter_context(servers(Path(folder)))
        address = endpoint
        if arguments.broker == "rabbitmq":
            rabbit = RabbitServer(Path(folder) / "rabbitmq", Path(folder))
            address = stack.enter_context(rabbit).url
        with _site(arguments.broker, address, redis_url, arguments.delay_ms, Path(folder)) as site:
            print(measure(site, LOADS[arguments.load], SECONDS))


if __name__ == "__main__":
    main()
