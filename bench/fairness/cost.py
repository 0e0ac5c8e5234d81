"""What sharing by work costs in throughput, compared with order of arrival.

Two workers of the same model under two names, one with each queue. They run all the time, one with
load and the other idle, in turns, so that what the machine does meanwhile weighs on both. The queue
alone is compared too, without a model.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import cast

import uvloop
import yaml

from bench.fairness.fifo import FifoQueue
from bench.load.generator import LoadOrder, drive, embedding_bodies
from bench.load.texts import Texts
from bench.pipeline import MODEL, Part, Pipeline, another
from bench.report import Figure
from infra.local.process import free_port
from infra.local.provision import provision
from shared.catalog import read_catalog
from shared.messages import Envelope, Item, Job, JobBody
from shared.pubsub.admin import PubSubAdmin
from shared.tasks.embedding import TextInput
from shared.transport import Message, Subscription
from workers.job import PulledJob, QueuedItem
from workers.models.base import PreparedText
from workers.scheduling.batch_queue import BatchQueue

FIFO = "in-order-of-arrival"
TENANTS, IN_FLIGHT = 8, 16
"""Each tenant has so many requests of one text in flight."""
API_KEYS = ",".join(f"tenant-{number}=tenant-{number}" for number in range(TENANTS))
LEAD_S, LIMIT_S = 2.0, 60.0
ROUNDS = 4
MOST_PER_S = 600
"""More than two cores embed."""
QUEUED, TAKEN = 512, 20_000
"""Items that wait and items in all, in the comparison of the queues alone."""
LENGTHS = [12] * 6 + [64] * 3 + [230]
BUDGET, MAX_ITEMS = 2048, 64
NOWHERE = cast(Subscription, None)
"""Where the jobs of that comparison come from."""


@dataclass(frozen=True)
class Turn:
    """A worker under load: answers per second, and CPU ms of the worker for each."""

    rate: float
    cpu_ms: float


def measure(pipeline: Pipeline, seconds: float) -> list[Figure]:
    """Figures of ROUNDS rounds, each with a turn of `seconds` for either queue.

    The backend of `pipeline` must be fixed: each worker would measure its own otherwise.
    """
    with ExitStack() as stack:
        models_file = _both_names(
            pipeline.stack.settings.models_file,
            Path(stack.enter_context(tempfile.TemporaryDirectory())),
        )
        uvloop.run(_provision(pipeline, models_file))
        api = stack.enter_context(pipeline.another_api(models_file=models_file, api_keys=API_KEYS))
        fifo = stack.enter_context(_fifo_worker(pipeline, models_file))
        rounds = list[dict[str, Turn]]()
        for number in range(ROUNDS):
            turns = [(MODEL, pipeline.worker), (FIFO, fifo)]
            rounds.append(
                {
                    name: _turn(pipeline.texts, api.port, name, worker, seconds)
                    for name, worker in (turns if number % 2 else turns[::-1])
                }
            )
    return [*_figures(rounds), *queue_figures()]


def _both_names(models_file: Path, folder: Path) -> Path:
    """The catalog with MODEL under both names, and nothing else."""
    catalog = yaml.safe_load(models_file.read_text(encoding="utf-8"))
    entry = next(entry for entry in catalog["models"] if entry["name"] == MODEL)
    path = folder / "models.yaml"
    models = [entry, entry | {"name": FIFO, "aliases": []}]
    path.write_text(yaml.safe_dump({"models": models}), encoding="utf-8")
    return path


async def _provision(pipeline: Pipeline, models_file: Path) -> None:
    settings = pipeline.stack.settings
    async with PubSubAdmin(settings.project, settings.pubsub_endpoint) as admin:
        await provision(admin, read_catalog(models_file), settings.inbox_pool, settings.reply_slots)


def _fifo_worker(pipeline: Pipeline, models_file: Path) -> AbstractContextManager[Part]:
    port = free_port()
    given = {
        "PENSTOCK_MODELS_FILE": str(models_file),
        "PENSTOCK_MODEL": FIFO,
        "PENSTOCK_HEALTH_PORT": str(port),
    }
    return another(pipeline.stack, "fifo-worker", "bench.fairness.fifo", port, given)


def _turn(texts: Texts, port: int, model: str, worker: Part, seconds: float) -> Turn:
    send_s = LEAD_S + seconds
    orders = [
        LoadOrder(
            port,
            embedding_bodies(model, texts.mixed(int(send_s * MOST_PER_S / TENANTS))),
            IN_FLIGHT,
            headers={"authorization": f"Bearer tenant-{number}", "cache-control": "no-store"},
            send_s=send_s,
            is_cycled=True,
            limit_s=LIMIT_S,
            waits_after_429=True,
        )
        for number in range(TENANTS)
    ]
    before_s = worker.cpu_s() + worker.children_cpu_s()
    with ThreadPoolExecutor(TENANTS) as pool:
        reports = list(pool.map(drive, orders))
    cpu_s = worker.cpu_s() + worker.children_cpu_s() - before_s
    if any(report.failures for report in reports):
        raise RuntimeError(f"not all were answered: {[report.failures for report in reports]}")
    ended_s = [one.ended_s for report in reports for one in report.exchanges]
    counted = sum(LEAD_S < at_s <= send_s for at_s in ended_s)
    return Turn(counted / seconds, 1000 * cpu_s / len(ended_s))


def _figures(rounds: list[dict[str, Turn]]) -> Iterator[Figure]:
    def ratio(of: Callable[[Turn], float]) -> float:
        return statistics.median(of(one[MODEL]) / of(one[FIFO]) for one in rounds)

    for name, words in ((FIFO, "in order of arrival"), (MODEL, "by fair shares")):
        rate = statistics.median(one[name].rate for one in rounds)
        yield Figure(f"{TENANTS} tenants {words}", rate, "/s")
        cpu_ms = statistics.median(one[name].cpu_ms for one in rounds)
        yield Figure(f"{TENANTS} tenants {words}, CPU of the worker", cpu_ms, "ms/request")
    yield Figure("rate over that of order of arrival", 100 * ratio(lambda one: one.rate), "%")
    yield Figure(
        "CPU of the worker over that of order of arrival",
        100 * ratio(lambda one: one.cpu_ms),
        "%",
        "<=",
        102.0,
    )


def queue_figures() -> Iterator[Figure]:
    """Microseconds to add and take an item in either queue, without a model."""
    for tenants in (1, 5, 200):
        best = {"in order of arrival": inf, "by fair shares": inf}
        for _ in range(5):
            for name, queue in (
                ("in order of arrival", FifoQueue(BUDGET, MAX_ITEMS)),
                ("by fair shares", BatchQueue[QueuedItem](BUDGET, MAX_ITEMS)),
            ):
                best[name] = min(best[name], _queue_us(queue, tenants))
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
        request_id="request", part=0, model=MODEL, tenant=tenant, deadline_s=at_s + 30,
        received_at_s=at_s, published_at_s=at_s,
    )  # fmt: skip
    item = Item(0, TextInput("a cat"))
    message = Message(b"", {}, "1", "1")
    pulled = PulledJob(Job(envelope, JobBody([item])), message, NOWHERE, at_s)
    return QueuedItem(PreparedText(key="", length=length, ids=b""), None, at_s, [(pulled, item)])
