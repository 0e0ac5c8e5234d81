"""One worker with two models and room for one: real model processes, an in-memory broker, a real
Redis.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import REGISTRY
from safetensors.numpy import load_file, save_file

from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import (
    BATCH_FILTER,
    SubscriptionSettings,
    batch_subscription_id,
    inbox_topic_id,
    jobs_topic_id,
    slot_subscription_id,
    workers_subscription_id,
)
from shared.messages import Envelope, Item, Job, JobBody, decode_reply, encode_job
from shared.models.catalog import Model
from shared.models.catalog_file import read_catalog
from shared.models.entry import Cache
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from shared.settings import WorkerSettings, read_settings
from shared.stores.cache import ResultCache
from shared.stores.objects import ObjectStore
from tests.limits import WAIT_LIMIT_S
from tests.record_stores import RecordStores
from tests.waiting import until
from tests.workers.worker_harness import RowList
from workers.identity import WorkerInfo
from workers.jobs.completion import Completion
from workers.jobs.consumer import JobConsumer
from workers.models.base import Prepared
from workers.models.client import ModelProcessDied
from workers.models.source import resolve
from workers.runtime.pool import HostedModel, ModelPool
from workers.runtime.pooled_process import PooledProcess
from workers.runtime.resident_models import weights_bytes
from workers.tasks import preparer_for
from workers.worker import Worker

pytestmark = [pytest.mark.slow(about_s=4), pytest.mark.anyio]

LARGE, SMALL = 0, 1
LONG_TEXT = "the mill wheel turns " * 60
"""About ten milliseconds of work for MiniLM."""
FREED_BYTES = 20_000_000
"""Less than the size of MiniLM's layers, which are the weights that every batch reads."""


def make_tiny(folder: Path, minilm: Path) -> None:
    """A BERT with one layer and 32 dimensions, seeded weights, and MiniLM's tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json"):
        shutil.copy(minilm / name, folder / name)
    config = json.loads((minilm / "config.json").read_text())
    config |= {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    random, narrow = np.random.default_rng(1), {384: 32, 1536: 64}
    tensors = {}
    for name, given in load_file(minilm / "model.safetensors").items():
        if ".layer." not in name or ".layer.0." in name:
            shape: list[int] = [narrow.get(size, int(size)) for size in given.shape]
            is_scale = name.endswith("LayerNorm.weight")
            tensors[name] = (
                np.ones(shape, "f4") if is_scale else random.normal(0, 0.1, shape).astype("f4")
            )
            tensors[name] = given if given.dtype.kind == "i" else tensors[name]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def hosted(tmp_path_factory: pytest.TempPathFactory) -> list[HostedModel]:
    minilm = read_catalog(Path("models.yaml")).find("all-MiniLM-L6-v2")
    minilm = minilm.model_copy(update={"cache": Cache(ttl_s=0)})
    folder = resolve(minilm.source, minilm.revision, Path("unused"))
    tiny_folder = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny(tiny_folder, folder)
    tiny = minilm.model_copy(update={"name": "tiny", "aliases": (), "dimensions": 32})
    return [HostedModel(minilm, folder), HostedModel(tiny, tiny_folder)]


@pytest.fixture(scope="module")
async def pool(anyio_backend: str, hosted: list[HostedModel]) -> AsyncIterator[ModelPool]:
    budget_bytes = weights_bytes(hosted[LARGE].folder)
    async with ModelPool(
        hosted, device="cpu", processes=1, memory_budget_bytes=budget_bytes
    ) as pool:
        yield pool


def prepared(hosted: HostedModel, *texts: str) -> list[Prepared]:
    found = preparer_for(hosted.entry, hosted.folder).prepare([TextInput(text) for text in texts])
    return [item for item in found if isinstance(item, Prepared)]


async def embed(
    process: PooledProcess, hosted: list[HostedModel], number: int, *texts: str
) -> np.ndarray:
    done = await process.run(prepared(hosted[number], *texts), timeout_s=WAIT_LIMIT_S, model=number)
    vectors = [result.vector for result in done.results if isinstance(result, EmbeddingResult)]
    return np.array([np.frombuffer(vector, "<f4") for vector in vectors])


async def test_several_names_are_given_in_one_setting() -> None:
    assert read_settings(WorkerSettings, model="large, tiny,large").model_names == ["large", "tiny"]
    assert read_settings(WorkerSettings, model="large").memory_budget_bytes == 0


async def test_both_answer_rightly_in_turn_and_the_memory_of_one_is_freed(
    process: PooledProcess, hosted: list[HostedModel]
) -> None:
    large = await embed(process, hosted, LARGE, "a cat", "a mill wheel")
    assert process.residency.resident == [LARGE]
    with_large = process.memory_bytes
    small = await embed(process, hosted, SMALL, "a cat", "a mill wheel")
    assert process.residency.resident == [SMALL]
    assert process.memory_bytes < with_large - FREED_BYTES
    assert (large.shape, small.shape) == ((2, 384), (2, 32))
    assert np.allclose(
        await embed(process, hosted, LARGE, "a cat", "a mill wheel"), large, atol=1e-6
    )
    assert np.allclose(
        await embed(process, hosted, SMALL, "a cat", "a mill wheel"), small, atol=1e-6
    )


async def test_a_batch_tells_what_was_switched_for_it(
    process: PooledProcess, hosted: list[HostedModel]
) -> None:
    await embed(process, hosted, LARGE, "a cat")
    stayed = await process.run(
        prepared(hosted[LARGE], "a dog"), timeout_s=WAIT_LIMIT_S, model=LARGE
    )
    assert stayed.switched is None
    went = await process.run(prepared(hosted[SMALL], "a dog"), timeout_s=WAIT_LIMIT_S, model=SMALL)
    assert went.switched is not None
    assert (went.switched.resident, went.switched.loads, went.switched.evictions) == ([SMALL], 1, 1)
    assert went.switched.switch_s > 0
    assert went.finished_at_s - went.started_at_s < WAIT_LIMIT_S


async def test_both_models_recover_from_a_killed_process(
    process: PooledProcess, hosted: list[HostedModel]
) -> None:
    before = [await embed(process, hosted, number, "a cat") for number in (LARGE, SMALL)]
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ModelProcessDied):
        await embed(process, hosted, LARGE, *[LONG_TEXT] * 40)
    await process.ready()
    assert process.residency.resident == [LARGE]
    for number in (SMALL, LARGE):
        assert np.allclose(await embed(process, hosted, number, "a cat"), before[number], atol=1e-6)


@asynccontextmanager
async def serving(
    redis_url: str, folder: Path, hosted: list[HostedModel], pool: ModelPool
) -> AsyncIterator[WorkerHarness]:
    broker = InMemoryBroker()
    topics = {
        jobs_topic_id(one.entry.name): workers_subscription_id(one.entry.name) for one in hosted
    }
    for topic_id, subscription_id in (
        topics | {inbox_topic_id("1"): slot_subscription_id("1", 0)}
    ).items():
        await broker.ensure_topic(topic_id)
        await broker.ensure_subscription(subscription_id, SubscriptionSettings(topic_id))
    for one in hosted:
        for_batch = SubscriptionSettings(jobs_topic_id(one.entry.name), filter=BATCH_FILTER)
        await broker.ensure_subscription(batch_subscription_id(one.entry.name), for_batch)
    objects, facts, stop = (
        ObjectStore(f"file://{folder}"),
        WorkerInfo("w", "here", "cpu"),
        asyncio.Event(),
    )
    async with AsyncExitStack() as stack:
        cache = await stack.enter_async_context(ResultCache(redis_url, 1_000_000))
        stores = await stack.enter_async_context(RecordStores(redis_url))
        consumers = []
        for model, model_folder, _ in hosted:
            completion = Completion(
                model, broker, cache, stores.records, stores.tokens, objects, RowList(), facts
            )
            consumers.append(
                JobConsumer(
                    model,
                    preparer_for(model, model_folder),
                    cache,
                    stores.records,
                    stores.tokens,
                    stores.previews,
                    objects,
                    completion,
                )
            )
        worker = Worker(consumers, broker, stores.records, pool)
        running = asyncio.create_task(worker.run(stop))
        harness = WorkerHarness(broker, worker)
        receiving = asyncio.create_task(harness.receive())
        try:
            yield harness
        finally:
            stop.set()
            await asyncio.wait_for(running, WAIT_LIMIT_S)
            receiving.cancel()
    assert not worker.is_ready
    assert [broker.backlog(subscription_id) for subscription_id in topics.values()] == [0, 0]


class WorkerHarness:
    """The caller's side: sends jobs to either model and collects the replies, keyed by request."""

    def __init__(self, broker: InMemoryBroker, worker: Worker) -> None:
        self.broker, self.worker = broker, worker
        self.vectors: dict[str, np.ndarray] = {}
        self.statuses: dict[str, str] = {}
        self._came = asyncio.Event()

    async def send(self, model: Model, request_id: str, text: str, left_s: float = 60.0) -> None:
        now_s = time.time()
        envelope = Envelope(
            request_id=request_id,
            part=0,
            model=model.name,
            tenant="t",
            inbox=inbox_topic_id("1"),
            slot="0",
            deadline_s=now_s + left_s,
            received_at_s=now_s,
            published_at_s=now_s,
        )
        data, attributes = encode_job(
            Job(envelope, JobBody([Item(0, TextInput(text), cache_key=request_id)]))
        )
        await self.broker.publish(jobs_topic_id(model.name), data, attributes)

    async def receive(self) -> None:
        async with self.broker.subscribe(slot_subscription_id("1", 0), max_messages=100) as replies:
            async for message in replies:
                replies.ack(message)
                reply = decode_reply(message.data, message.attributes)
                outcome = reply.body.outcomes[0]
                self.statuses[reply.request_id] = outcome.status
                if isinstance(outcome.result, EmbeddingResult):
                    self.vectors[reply.request_id] = np.frombuffer(outcome.result.vector, "<f4")
                self._came.set()

    async def answers(self, count: int) -> None:
        async with asyncio.timeout(WAIT_LIMIT_S):
            while len(self.statuses) < count:
                self._came.clear()
                await self._came.wait()


async def test_interleaved_jobs_of_both_are_answered_by_their_own_model(
    redis_url: str,
    tmp_path: Path,
    hosted: list[HostedModel],
    pool: ModelPool,
    process: PooledProcess,
) -> None:
    texts = [f"text number {number}" for number in range(20)]
    expected = [await embed(process, hosted, number, *texts) for number in (LARGE, SMALL)]
    async with serving(redis_url, tmp_path, hosted, pool) as harness:
        for index, text in enumerate(texts):
            for number in (LARGE, SMALL):
                await harness.send(hosted[number].entry, f"{number}-{index}", text)
        await harness.answers(2 * len(texts))
        assert harness.worker.is_ready
    for number in (LARGE, SMALL):
        given = np.array([harness.vectors[f"{number}-{index}"] for index in range(len(texts))])
        assert np.allclose(given, expected[number], atol=1e-5)


async def test_no_switch_for_those_who_do_not_wait_any_more(
    redis_url: str,
    tmp_path: Path,
    hosted: list[HostedModel],
    pool: ModelPool,
    process: PooledProcess,
) -> None:
    """Its deadline passes while the process runs a batch of the other model."""
    await embed(process, hosted, LARGE, "a cat")
    async with serving(redis_url, tmp_path, hosted, pool) as harness:
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            for number in range(12):
                await harness.send(hosted[LARGE].entry, f"long-{number}", f"{number} {LONG_TEXT}")
            await harness.send(hosted[SMALL].entry, "late", "nobody waits", left_s=0.5)
            await harness.answers(1)
            assert harness.statuses == {"late": "expired"}
        finally:
            os.kill(process.pid, signal.SIGCONT)
        await harness.answers(13)
        # If it still waited in the queue, it would leave the queue only after a switch.
        await until(lambda: REGISTRY.get_sample_value("penstock_worker_items_waiting") == 0)
    assert process.residency.resident == [LARGE]
