"""The cost of sharing by work, compared with order of arrival.

One worker with each queue in turns, in the same process, with a model that takes hardly any time.
What counts is the CPU time of the process, which runs the worker and its callers. The queues are
compared alone too.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice
from math import inf
from typing import cast
from unittest.mock import patch

import uvloop

from bench.fairness import timed
from bench.fairness.fifo import FifoQueue
from bench.fairness.timed import Callers, timed_workers
from bench.report import Figure
from shared.messages import Envelope, Item, Job, JobBody
from shared.tasks.embedding import TextInput
from shared.transport import ReceivedMessage, Subscription
from workers.job import PulledJob, QueuedItem
from workers.models.base import PreparedText
from workers.scheduling.batch_queue import BatchQueue

TENANTS, IN_FLIGHT = 8, 16
"""Requests of one text that each tenant has in flight."""
REQUESTS, ROUNDS = 4000, 6
REQUEST_CPU_MS = 5.9
"""Two cores that serve 339 requests per second, model included (README.md, Measured)."""
QUEUED, TAKEN = 512, 20_000
"""Items that wait and items in all, in the comparison of the queues alone."""
LENGTHS = [12] * 6 + [64] * 3 + [230]
BUDGET, MAX_ITEMS = timed.MODEL.budget, timed.MODEL.batch.max_items
NOWHERE = cast(Subscription, None)
"""The source of the jobs in that comparison."""
QUEUES: dict[str, Callable[[int, int], FifoQueue | BatchQueue[QueuedItem]]] = {
    "in order of arrival": FifoQueue,
    "by fair shares": BatchQueue[QueuedItem],
}


def measure(where: tuple[str, str]) -> list[Figure]:
    """`where`: the endpoint of a Pub/Sub and the URL of a Redis."""
    rounds: dict[str, list[float]] = {name: [] for name in QUEUES}
    for number in range(ROUNDS):
        for name in sorted(QUEUES, reverse=bool(number % 2)):
            with (
                patch("workers.scheduling.priority_queue.BatchQueue", QUEUES[name]),
                patch.object(timed, "TOKENS_PER_S", 1e7),
                patch.object(timed, "BATCH_S", 0.0),
            ):
                rounds[name].append(uvloop.run(_request_cpu_ms(where)))
    fifo, fair = (rounds[name] for name in QUEUES)
    more_ms = statistics.median(b - a for a, b in zip(fifo, fair, strict=True))
    figures = [
        Figure(f"CPU of worker and callers, {name}", statistics.median(seconds_), "ms/request")
        for name, seconds_ in rounds.items()
    ]
    share = 100 * more_ms / REQUEST_CPU_MS
    figures.append(Figure("CPU that fair shares cost, of a request's", share, "%", "<=", 2.0))
    return [*figures, *queue_figures()]


async def _request_cpu_ms(where: tuple[str, str]) -> float:
    async with timed_workers(*where) as callers:
        await _requests(callers, REQUESTS // 10)
        began_s = time.process_time()
        await _requests(callers, REQUESTS)
        return 1000 * (time.process_time() - began_s) / REQUESTS


async def _requests(callers: Callers, requests: int) -> None:
    numbers, chance = iter(range(requests)), random.Random(1)

    async def one_after_another(tenant: str) -> None:
        for _ in numbers:
            await callers.ask(tenant, [chance.choice(LENGTHS)])

    async with asyncio.TaskGroup() as group:
        for number in range(TENANTS * IN_FLIGHT):
            group.create_task(one_after_another(f"tenant {number % TENANTS}"))


def queue_figures() -> Iterator[Figure]:
    """Microseconds to add and take an item in either queue, without a model."""
    for tenants in (1, 5, 200):
        best = dict.fromkeys(QUEUES, inf)
        for _ in range(5):
            for name, queue in QUEUES.items():
                best[name] = min(best[name], _queue_us(queue(BUDGET, MAX_ITEMS), tenants))
        for name, item_us in best.items():
            yield Figure(f"queue {name}, {tenants} tenants", item_us, "us/item")


def _queue_us(queue: FifoQueue | BatchQueue[QueuedItem], tenants: int) -> float:
    chance = random.Random(1)
    items = [
        _queued(f"tenant {chance.randrange(tenants)}", chance.choice(LENGTHS), float(number))
        for number in range(TAKEN)
    ]
    began_s, arriving = time.perf_counter(), iter(items)
    for item in islice(arriving, QUEUED):
        queue.add(item)
    while batch := queue.take(MAX_ITEMS):
        for item in islice(arriving, len(batch)):
            queue.add(item)
    return (time.perf_counter() - began_s) / TAKEN * 1e6


def _queued(tenant: str, length: int, at_s: float) -> QueuedItem:
    envelope = Envelope(
        request_id="request", part=0, model=timed.MODEL.name, tenant=tenant, deadline_s=at_s + 30,
        received_at_s=at_s, published_at_s=at_s,
    )  # fmt: skip
    item = Item(0, TextInput("a cat"))
    message = ReceivedMessage(b"", {}, "1", "1")
    pulled = PulledJob(Job(envelope, JobBody([item])), message, NOWHERE, at_s)
    return QueuedItem(PreparedText(key="", length=length, ids=b""), None, at_s, [(pulled, item)])
