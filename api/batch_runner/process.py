"""Composes the process that runs batches, from the parts of an API instance."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from api.batch_runner.execution import LineExecutor
from api.batch_runner.outputs import Outputs
from api.batch_runner.run import RunTools, Window
from api.batch_runner.runner import LEASE_S, BatchLeases, BatchRunner
from api.batch_runner.terms import CurrentTerms
from api.batches.files import BatchFiles
from api.batches.store import BatchStore
from api.dispatch.pipeline import open_pipeline
from api.inputs.codec_pool import CodecPool
from api.inputs.files import MAX_BYTES, Files
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import SourceImages
from api.inputs.storage import Storage, swept
from api.inputs.url_fetcher import UrlFetcher
from api.limits.limiter import open_limiter
from shared.catalog import Catalog
from shared.settings import ApiSettings
from shared.stores.key_stores import key_store
from shared.stores.objects import ObjectStore
from shared.stores.signed_urls import UrlSigner
from shared.transport import Admin, Transport
from shared.usage.row import RowSink
from shared.webhook_publisher import WebhookPublisher


class _StoredResults:
    """The results of predictions that are in the object store, for lines that name them."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    async def fetch(self, key: str, media_type: str, deadline_s: float) -> bytes:
        """Returns the bytes behind a link whose signature was verified."""
        return await self._objects.get(key, MAX_BYTES)


@asynccontextmanager
async def opened_runner(
    settings: ApiSettings,
    catalog: Catalog,
    transport: AbstractAsyncContextManager[Transport],
    admin: AbstractAsyncContextManager[Admin],
    rows: AbstractAsyncContextManager[RowSink],
    *,
    lease_s: float = LEASE_S,
) -> AsyncIterator[BatchRunner]:
    """Opens everything that a runner needs. The caller runs it inside the block.

    Args:
        settings: those of the API.
        catalog: the models to run.
        transport: the connection to the broker. Not yet open.
        admin: creates an inbox if no pool has one. Not yet open.
        rows: takes the rows of lines that no worker computes. Not yet open.
        lease_s: seconds after which another runner takes over from one that died.

    Raises:
        ConfigurationError: the URL of the object store or of the keys is wrong.
        Unavailable: the broker is out of reach.
    """
    # Lines seldom repeat, and Redis has those that do. So the memory of a runner stays flat.
    settings = settings.model_copy(update={"memory_cache_bytes": 0})
    instance, objects = f"batches-{secrets.token_hex(4)}", ObjectStore(settings.objects_url)
    store = BatchStore(objects)
    storage = Storage(objects)
    files = BatchFiles(objects, storage)
    async with AsyncExitStack() as opened:
        await opened.enter_async_context(swept(storage))
        leases = await opened.enter_async_context(
            BatchLeases(settings.records_redis_url, instance, lease_s=lease_s)
        )
        terms = await opened.enter_async_context(
            CurrentTerms(key_store(settings.keys_url) if settings.keys_url else None)
        )
        pool = await opened.enter_async_context(
            CodecPool(settings.picture_processes, settings.picture_budget_bytes)
        )
        pipeline = await open_pipeline(
            opened, settings, catalog, objects, transport, admin, rows, instance, ImageCodec(pool)
        )
        limiter = await open_limiter(
            opened,
            settings.records_redis_url,
            pipeline.broker,
            instance,
            instances=settings.inbox_pool,
        )
        tools = RunTools(
            store=store,
            files=files,
            outputs=Outputs(objects, store, files),
            catalog=catalog,
            terms=terms,
            executor=LineExecutor(
                pipeline.dispatcher,
                objects,
                ImageCodec(pool),
                limiter,
                SourceImages(
                    objects,
                    Files(objects, storage),
                    _StoredResults(objects),
                    UrlSigner(settings.secret),
                    ImageCodec(pool),
                    UrlFetcher(settings, objects, pipeline.records.fetched_urls),
                ),
            ),
        )
        window = Window(settings.batch_items_in_flight)
        yield BatchRunner(tools, leases, WebhookPublisher(pipeline.broker), window)
