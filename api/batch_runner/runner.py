"""The batch runner: leases open batches, runs several at a time, and announces when they finish.

Tenants take turns. A runner runs at most one batch per tenant: the oldest one that can run. If more
tenants are waiting than it can serve at once, it puts a batch back after each segment and moves on
to the tenant that has waited longest.

A batch whose lines can't run now, for example because a budget is spent, yields to another batch.
It is checked again after increasingly long pauses, up to MAX_PAUSE_S, and runs before the tenant's
newer batches. The number of items in flight is limited per runner and shared equally among the
runner's batches.

Leases keep runners from running the same lines (api/batch_runner/leases.py).

`open_runner` composes a runner from parts of the API.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import Gauge

from api.batch_runner.execution import LineExecutor
from api.batch_runner.leases import LEASE_S, BatchLeases
from api.batch_runner.outputs import Outputs
from api.batch_runner.run import BatchRun
from api.batch_runner.segments import Paused, RunTools, Stop, WaitingBatches
from api.batch_runner.terms import CurrentTerms
from api.batch_runner.window import ItemWindow
from api.batches.documents import BatchCreated, BatchEnded
from api.batches.files import BatchFiles
from api.batches.names import parse_created_at_s
from api.batches.store import BatchStore, OpenBatch
from api.dispatch.pipeline import open_pipeline
from api.inputs.codec_pool import CodecPool
from api.inputs.files import MAX_BYTES, Files
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import SourceImages
from api.inputs.storage import Storage, sweep
from api.inputs.url_fetcher import UrlFetcher
from api.limits.limiter import open_limiter
from api.predictions.service import Predictions
from shared.broker.transport import Admin, Transport
from shared.errors import PenstockError
from shared.models.catalog import Catalog
from shared.process.concurrency import backoff
from shared.settings import ApiSettings
from shared.stores.fetched_urls import FetchedUrls
from shared.stores.key_stores import key_store
from shared.stores.objects import ObjectStore, UrlSigner
from shared.stores.webhook_log import WebhookLog
from shared.usage.row import RowSink
from shared.webhooks.event import BatchEvent
from shared.webhooks.publisher import WebhookPublisher

POLL_S = 2.0
"""Interval between listings of open batches, because object stores charge for each listing."""
MAX_AT_ONCE = 8
ELSEWHERE_S = 5.0
"""How long to leave a batch alone while another runner holds it."""
NEVER_CREATED_S = 120.0
"""How long to keep a marker that has no batch because its creation was interrupted."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0

OPEN = Gauge("penstock_batches_open", "Unfinished batches of all tenants.")
RUNNING = Gauge("penstock_batches_running", "Batches that this runner is running.")
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Held:
    """A batch held by this runner."""

    id: str
    is_cancelled: bool
    stop: Stop | None = None
    task: asyncio.Task[None] | None = None
    others: WaitingBatches = field(default_factory=WaitingBatches)

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.stop is not None:
            self.stop.cancel()


@dataclass(slots=True)
class _Patience:
    """When to retry a batch that is held elsewhere, failed here, or yielded."""

    pauses: Iterator[float] = field(default_factory=lambda: backoff(FIRST_PAUSE_S, MAX_PAUSE_S))
    until_s: float = 0.0
    is_aside: bool = False
    """True if the batch yielded. The batch can then be ended immediately if it is canceled."""

    def wait(self, *, is_aside: bool) -> None:
        """Sets the next retry to at least FIRST_PAUSE_S from now, longer each time."""
        self.until_s = time.monotonic() + max(FIRST_PAUSE_S, next(self.pauses))
        self.is_aside = is_aside


class BatchRunner:
    """Runs batches until its task is canceled.

    Args:
        window: limits the items in flight.
    """

    def __init__(
        self, tools: RunTools, leases: BatchLeases, webhooks: WebhookPublisher, window: ItemWindow
    ) -> None:
        self._tools = tools
        self._leases = leases
        self._webhooks = webhooks
        self._window = window
        self._held: dict[str, _Held] = {}
        self._served_s: dict[str, float] = {}
        self._patience: dict[str, _Patience] = {}
        self._attempts: dict[str, dict[int, int]] = {}
        self._wake_event = asyncio.Event()

    async def run(self) -> None:
        """Runs until canceled.

        When canceled, releases its batches so that other runners can take over.
        """
        try:
            while True:
                try:
                    await self._take_turns()
                except PenstockError as error:
                    log.warning("could not read open batches", extra={"reason": error.message})
                self._wake_event.clear()
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._wake_event.wait()
                except TimeoutError:
                    continue
        finally:
            tasks = [held.task for held in self._held.values() if held.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_turns(self) -> None:
        batches = await self._tools.store.open()
        OPEN.set(len(batches))
        self._forget({batch.id for batch in batches}, {batch.owner for batch in batches})
        for batch in batches:
            held = self._held.get(batch.owner)
            if batch.is_cancelled and held is not None and held.id == batch.id:
                held.cancel()
        due = [batch for batch in batches if self._is_due(batch)]
        waiting = _oldest_of_each(batch for batch in due if batch.owner not in self._held)
        waiting.sort(key=lambda batch: self._served_s.get(batch.owner, 0.0))
        free = MAX_AT_ONCE - len(self._held)
        for batch in waiting[:free]:
            self._start(batch)
        self._report_waiting(due, is_contended=len(waiting) > free)

    def _is_due(self, batch: OpenBatch) -> bool:
        patience = self._patience.get(batch.id)
        if patience is None or (patience.is_aside and batch.is_cancelled):
            return True
        return patience.until_s <= time.monotonic()

    def _report_waiting(self, due: list[OpenBatch], *, is_contended: bool) -> None:
        """Informs running batches about other batches that are waiting for a turn."""
        others: dict[str, list[str]] = {}
        for batch in due:
            held = self._held.get(batch.owner)
            if held is not None and held.id != batch.id:
                others.setdefault(batch.owner, []).append(batch.id)
        for owner, held in self._held.items():
            # IDs count down, so the ID of the oldest batch is the largest.
            held.others.is_next_due = is_contended or any(
                batch_id > held.id for batch_id in others.get(owner, ())
            )
            held.others.is_any_waiting = is_contended or owner in others

    def _start(self, batch: OpenBatch) -> None:
        held = self._held[batch.owner] = _Held(batch.id, batch.is_cancelled)
        self._served_s[batch.owner] = time.monotonic()
        held.task = asyncio.create_task(self._serve(batch, held))
        held.task.add_done_callback(lambda _: self._put_down(batch.owner))
        RUNNING.set(len(self._held))

    def _put_down(self, owner: str) -> None:
        del self._held[owner]
        RUNNING.set(len(self._held))
        self._wake_event.set()

    async def _serve(self, batch: OpenBatch, held: _Held) -> None:
        """Runs a batch for one turn. After any failure, the batch is retried later."""
        patience = self._patience.setdefault(batch.id, _Patience())
        try:
            if not await self._leases.take(batch.id):
                patience.until_s = time.monotonic() + ELSEWHERE_S
                return
            try:
                paused = await self._run(batch, held)
                if paused is not Paused.STUCK:
                    self._patience.pop(batch.id, None)
                if paused in (Paused.STUCK, Paused.MOVED):
                    self._patience.setdefault(batch.id, _Patience()).wait(is_aside=True)
            finally:
                await self._leases.release(batch.id)
        except PenstockError as error:
            facts = {"batch": batch.id, "reason": error.message}
            log.warning("batch interrupted", extra=facts)
            patience.wait(is_aside=False)
        except Exception as error:  # a bug must not stop the runner from running other batches
            log.error("batch failed unexpectedly", extra={"batch": batch.id}, exc_info=error)
            patience.wait(is_aside=False)

    async def _run(self, batch: OpenBatch, held: _Held) -> Paused | None:
        store = self._tools.store
        state = await store.state(batch.owner, batch.id)
        if state is None:
            if time.time() - parse_created_at_s(batch.id) > NEVER_CREATED_S:
                await store.close(batch.owner, batch.id)
            return None
        ended = state.ended or await self._compute(state.created, held)
        if not isinstance(ended, BatchEnded):
            return ended
        await self._announce(ended)
        await store.close(batch.owner, batch.id)
        log.info("batch over", extra={"batch": batch.id, "end": ended.end})
        return None

    async def _compute(self, batch: BatchCreated, held: _Held) -> BatchEnded | Paused | None:
        stop = held.stop = Stop(batch.expires_at_s)
        if held.is_cancelled:
            stop.cancel()
        with self._window.share() as share:
            attempts = self._attempts.setdefault(batch.id, {})
            run = BatchRun(self._tools, batch, stop, share, held.others, attempts)
            running = asyncio.ensure_future(run.run())
            keeping = asyncio.ensure_future(self._leases.keep(batch.id))
            try:
                await asyncio.wait([running, keeping], return_when=asyncio.FIRST_COMPLETED)
                if running.done():
                    return running.result()
                log.warning("batch lease lost", extra={"batch": batch.id})
                return None
            finally:
                for task in (running, keeping):
                    task.cancel()
                await asyncio.gather(running, keeping, return_exceptions=True)

    async def _announce(self, ended: BatchEnded) -> None:
        batch = ended.created
        if batch.webhook:
            event = BatchEvent(
                batch=batch.id,
                tenant=batch.tenant,
                url=batch.webhook,
                event=f"batch.{ended.end}",  # type: ignore[arg-type]
                created_at_s=ended.at_s,
            )
            await self._webhooks.publish_batch(event)

    def _forget(self, batches: set[str], owners: set[str]) -> None:
        self._patience = {
            batch_id: value for batch_id, value in self._patience.items() if batch_id in batches
        }
        self._attempts = {
            batch_id: value for batch_id, value in self._attempts.items() if batch_id in batches
        }
        self._served_s = {
            owner: value for owner, value in self._served_s.items() if owner in owners
        }


def _oldest_of_each(batches: Iterable[OpenBatch]) -> list[OpenBatch]:
    """Returns one batch per owner. The newest batches come first, so the last one wins."""
    return list({batch.owner: batch for batch in batches}.values())


class _StoredResults:
    """Prediction results that lines refer to, in the object store."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    async def fetch(self, key: str, media_type: str, deadline_s: float) -> bytes:
        """Returns the data for a link whose signature has already been verified."""
        return await self._objects.get(key, MAX_BYTES)


def _source_images(
    settings: ApiSettings,
    objects: ObjectStore,
    storage: Storage,
    uploads: BatchFiles,
    fetched_urls: FetchedUrls,
    codec: ImageCodec,
) -> SourceImages:
    """Returns the loader for files referenced in lines: data: URIs, uploads, results, and URLs."""
    return SourceImages(
        objects,
        Files(objects, storage),
        uploads,
        _StoredResults(objects),
        UrlSigner(settings.secret),
        codec,
        UrlFetcher(settings, storage, fetched_urls),
    )


@asynccontextmanager
async def open_runner(
    settings: ApiSettings,
    catalog: Catalog,
    transport: AbstractAsyncContextManager[Transport],
    admin: AbstractAsyncContextManager[Admin],
    rows: AbstractAsyncContextManager[RowSink],
    *,
    lease_s: float = LEASE_S,
) -> AsyncIterator[BatchRunner]:
    """Opens everything a runner needs. The caller runs the runner inside the block.

    Args:
        transport: connection to the broker, not yet open.
        admin: creates an inbox if no pool provides one. Not yet open.
        rows: receives rows for lines that no worker runs. Not yet open.
        lease_s: seconds after which another runner takes over from a dead one.

    Raises:
        ConfigurationError: the object store's or the key store's URL is invalid.
    """
    # Lines are seldom repeated, and Redis caches the ones that are, so a runner's memory use stays
    # flat.
    settings = settings.model_copy(update={"memory_cache_bytes": 0})
    instance, objects = f"batches-{secrets.token_hex(4)}", ObjectStore(settings.objects_url)
    store = BatchStore(objects)
    storage = Storage(objects)
    files = BatchFiles(objects, storage)
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        await enter(sweep(storage))
        leases = await enter(BatchLeases(settings.records_redis_url, instance, lease_s=lease_s))
        keys = key_store(settings.keys_url) if settings.keys_url else None
        terms = await enter(CurrentTerms(keys))
        pool = CodecPool(settings.picture_processes, settings.picture_budget_bytes)
        codec = ImageCodec(await enter(pool))
        pipeline = await open_pipeline(
            stack, settings, catalog, objects, transport, admin, rows, instance, codec
        )
        webhooks = WebhookPublisher(pipeline.broker)
        predictions = await enter(
            Predictions.of_pipeline(
                pipeline, webhooks, WebhookLog(pipeline.redis), keep_s=settings.prediction_keep_s
            )
        )
        limiter = await open_limiter(
            stack,
            settings.records_redis_url,
            pipeline.broker,
            instance,
            instances=settings.inbox_pool,
        )
        executor = LineExecutor(
            pipeline.dispatcher,
            predictions,
            objects,
            codec,
            limiter,
            _source_images(settings, objects, storage, files, FetchedUrls(pipeline.redis), codec),
            settings.files_max_bytes,
        )
        tools = RunTools(
            store=store,
            files=files,
            outputs=Outputs(objects, store, files),
            catalog=catalog,
            terms=terms,
            executor=executor,
        )
        window = ItemWindow(settings.batch_items_in_flight)
        yield BatchRunner(tools, leases, webhooks, window)
