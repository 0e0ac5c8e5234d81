"""A dispatcher without HTTP, over an in-memory broker with a fake worker."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from api.dispatch.admission import Admission
from api.dispatch.canary_routing import CanaryRouter
from api.dispatch.dispatcher import Dispatcher
from api.dispatch.job_sender import JobSender
from api.dispatch.model_window import ModelWindow, PublishWindow
from api.dispatch.reply_inbox import ReplyInbox
from api.dispatch.request import InferenceRequest, InferenceResponse, RequestOptions
from api.inputs.codec_pool import CodecPool
from api.inputs.image_codec import ImageCodec
from shared.broker.in_memory import InMemoryBroker
from shared.canary.store import CanaryStore
from shared.flows.engine import FlowEngine
from shared.messages import RequestFacts
from shared.models.catalog import Catalog
from shared.models.service_rate import ServiceRate
from shared.models.tasks.base import FirstGuesses
from shared.models.tasks.embedding import EmbeddingResult, TextInput
from shared.stores.cache import Hit, ResultCache
from shared.stores.objects import ObjectStore
from shared.stores.redis_client import NO_REDIS
from shared.usage.row import Row
from shared.usage.row_list import RowList
from tests.api.fake_worker import FakeWorker, vector_of
from tests.api.harness import TEXT_MODEL, settings_for
from tests.record_stores import RecordStores


class HeldCache(ResultCache):
    """A cache whose responses can be held back."""

    def __init__(self, redis_url: str) -> None:
        super().__init__(redis_url, memory_bytes=1 << 20)
        self.go = asyncio.Event()
        self.go.set()

    async def get_many(self, keys: Iterable[str]) -> dict[str, Hit]:
        await self.go.wait()
        return await super().get_many(keys)


@dataclass
class DispatcherHarness:
    """A dispatcher and its dependencies."""

    dispatcher: Dispatcher
    worker: FakeWorker
    transport: InMemoryBroker
    cache: HeldCache
    stores: RecordStores
    admission: Admission
    rows: list[Row]

    def ask(
        self, *texts: str, deadline_in_s: float = 30.0, **flags: Any
    ) -> asyncio.Task[InferenceResponse]:
        """A request in progress. Its items are coalesced after one event loop iteration."""
        now_s, inputs = time.time(), [TextInput(text) for text in texts]
        request_id = f"req_{random.getrandbits(64):x}"
        given = {name: flags.pop(name) for name in RequestFacts.__struct_fields__ if name in flags}
        facts = {"request_id": request_id, "tenant": "t", "received_at_s": now_s, **given}
        request = InferenceRequest(
            RequestFacts(**facts),
            TEXT_MODEL,
            inputs,
            now_s + deadline_in_s,
            is_repeatable=flags.pop("is_repeatable", True),
            options=RequestOptions(**flags),
        )

        async def answered() -> InferenceResponse:
            with await self.dispatcher.dispatch(request) as response:
                return response

        return asyncio.create_task(answered(), name=request_id)

    def is_idle(self) -> bool:
        return self.dispatcher.in_flight == 0 and self.admission.in_flight == 0


@asynccontextmanager
async def running_dispatcher(
    tmp_path: Path,
    max_in_flight: int = 1000,
    redis_url: str = NO_REDIS,
    window_floor: int | None = None,
    transport: InMemoryBroker | None = None,
) -> AsyncIterator[DispatcherHarness]:
    transport, rows, settings = transport or InMemoryBroker(), RowList(), settings_for(tmp_path)
    async with HeldCache(redis_url) as cache, RecordStores(redis_url, retry_s=0.01) as stores:
        worker = FakeWorker(transport, (TEXT_MODEL,), cache)
        async with (
            worker.running(transport),
            ReplyInbox(settings, transport, transport, "test") as inbox,
        ):
            admission = Admission(max_in_flight)
            window = PublishWindow((TEXT_MODEL,), admission.rate_of, broker_wait_s=0.5)
            if window_floor is not None:
                slow = ServiceRate(FirstGuesses(gap_s=3600.0))
                window.of[TEXT_MODEL.name, "interactive"] = ModelWindow(slow, window_floor, 0.5)
            objects = ObjectStore("memory://")
            catalog = Catalog((TEXT_MODEL,))
            flows = FlowEngine(catalog, stores.records, stores.flow_runs, transport)
            sender = JobSender(
                inbox,
                transport,
                objects,
                stores.records,
                window,
                flows,
                rows,
                api_instance="test",
                region="r",
            )
            canaries = CanaryRouter(catalog, CanaryStore(redis_url))
            async with Dispatcher(
                sender,
                cache,
                stores.records,
                admission,
                rows,
                canaries,
                objects,
                ImageCodec(CodecPool(1, 1 << 20)),
                api_instance="test",
                region="r",
            ) as dispatcher:
                yield DispatcherHarness(
                    dispatcher, worker, transport, cache, stores, admission, rows.rows
                )


def texts_right(answer: InferenceResponse, *texts: str) -> bool:
    results = [outcome.result for outcome in answer.outcomes]
    vectors = [
        np.frombuffer(result.vector, "<f4")
        for result in results
        if isinstance(result, EmbeddingResult)
    ]
    in_order = [outcome.index for outcome in answer.outcomes] == list(range(len(texts)))
    same = [
        np.array_equal(vector, vector_of(TextInput(text)))
        for vector, text in zip(vectors, texts, strict=True)
    ]
    return in_order and all(same)


def origins(answer: InferenceResponse) -> list[str]:
    return [outcome.receipt.cache for outcome in answer.outcomes]


def ends(answer: InferenceResponse) -> list[str | None]:
    return [outcome.error.code if outcome.error else outcome.status for outcome in answer.outcomes]
