"""Opens everything that endpoints depend on, from the broker connection to the services."""

from __future__ import annotations

import secrets
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Self

from api.batches.files import BatchFiles
from api.batches.service import Batches
from api.batches.store import BatchStore
from api.dispatch.pipeline import open_pipeline
from api.dispatch.readiness import Readiness
from api.endpoints import ACCESS_RULES, LINE_ENDPOINTS
from api.http.auth import Access, access_of
from api.http.dependencies import Dependencies, StartedAt
from api.http.inference import Inference
from api.http.recording import Recording
from api.http.refusals import Refusals
from api.idempotency.service import IdempotencyService
from api.idempotency.store import IdempotencyStore
from api.inputs.codec_pool import CodecPool
from api.inputs.files import Files
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import SourceImages
from api.inputs.storage import Storage
from api.inputs.url_fetcher import UrlFetcher
from api.limits.budget_marks import BudgetMarks
from api.limits.limiter import open_limiter
from api.limits.spent import SpentReader, SpentRows
from api.predictions.conversations import Conversations
from api.predictions.event_stream import EventStreams
from api.predictions.follower import PredictionFollower
from api.predictions.generation_stream import GenerationStreams
from api.predictions.progress import PredictionProgress
from api.predictions.results import ResultFetcher
from api.predictions.service import Predictions
from api.usage.rows import UsageRows
from api.usage.service import QueryPermits, ReportDataset, ReportService, UsageService
from shared.broker.transport import Admin, Transport
from shared.models.catalog import Catalog
from shared.settings import ApiSettings
from shared.stores.fetched_urls import FetchedUrls
from shared.stores.holds import Holds
from shared.stores.objects import ObjectStore, UrlSigner
from shared.stores.previews import PreviewStore
from shared.stores.token_streams import TokenStreams
from shared.stores.waiting_lines import WaitingLines
from shared.stores.webhook_log import WebhookLog
from shared.usage.row import RowSink
from shared.webhooks.publisher import WebhookPublisher


@dataclass(frozen=True, slots=True)
class Configuration:
    """Validated settings, and what can be created from them without a connection."""

    settings: ApiSettings
    catalog: Catalog
    access: Access
    objects: ObjectStore
    url_signer: UrlSigner

    @classmethod
    def check(cls, settings: ApiSettings, catalog: Catalog) -> Self:
        """Validates settings before any connection opens, so that invalid ones fail right away.

        Raises:
            ConfigurationError: the API keys or the object store's URL are invalid, or API keys are
                required but missing.
        """
        return cls(
            settings,
            catalog,
            access_of(settings, catalog),
            ObjectStore(settings.objects_url),
            UrlSigner(settings.secret),
        )


async def open_dependencies(
    stack: AsyncExitStack,
    configuration: Configuration,
    transport: AbstractAsyncContextManager[Transport],
    admin: AbstractAsyncContextManager[Admin],
    rows: AbstractAsyncContextManager[RowSink],
    spent: SpentReader | None,
) -> Dependencies:
    """Opens everything in dependency order. `stack` closes it in reverse order.

    Args:
        transport: connection to the broker, not yet open.
        admin: creates an inbox if no pool provides one. Not yet open.
        rows: receives the rows that the API writes. Not yet open.
        spent: adds up spending. If None, spending is read from the rows in BigQuery.

    Raises:
        Unavailable: the broker is unreachable, or no inbox is free.
    """
    settings, catalog = configuration.settings, configuration.catalog
    objects, url_signer = configuration.objects, configuration.url_signer
    instance = f"api-{secrets.token_hex(4)}"
    enter = stack.enter_async_context

    access = await enter(configuration.access)
    codec_pool = CodecPool(settings.picture_processes, settings.picture_budget_bytes)
    image_codec = ImageCodec(await enter(codec_pool))
    pipeline = await open_pipeline(
        stack, settings, catalog, objects, transport, admin, rows, instance, image_codec
    )
    redis, broker = pipeline.redis, pipeline.broker
    idempotency = await _open_idempotency(stack, settings, objects)

    webhooks, webhook_log = WebhookPublisher(broker), WebhookLog(redis)
    predictions = await enter(
        Predictions.of_pipeline(pipeline, webhooks, webhook_log, keep_s=settings.prediction_keep_s)
    )
    limiter = await open_limiter(
        stack, settings.records_redis_url, broker, instance, instances=settings.inbox_pool
    )
    follower = await enter(PredictionFollower(predictions, Holds(redis), limiter))
    tokens = TokenStreams(redis)
    generation_streams = await enter(GenerationStreams(predictions, tokens))
    dataset = ReportDataset(
        settings.project,
        settings.dataset,
        settings.bigquery_endpoint,
        settings.usage_query_max_bytes,
    )
    spent = spent or SpentRows(*dataset)
    await enter(BudgetMarks(limiter.store, access.budgets, spent))

    storage = Storage(objects, tenant_max_bytes=settings.files_max_bytes)
    files, batch_files = Files(objects, storage), BatchFiles(objects, storage)
    inference = Inference(pipeline.dispatcher, limiter, pipeline.admission)
    progress = PredictionProgress(WaitingLines(redis), PreviewStore(redis), pipeline.flow_runs)
    result_fetcher = ResultFetcher(objects, pipeline.records, pipeline.flow_runs, image_codec)
    url_fetcher = UrlFetcher(settings, storage, FetchedUrls(redis))
    turns = QueryPermits()
    return Dependencies(
        settings=settings,
        catalog=catalog,
        access=configuration.access,
        access_rules=ACCESS_RULES,
        admission=pipeline.admission,
        dispatcher=pipeline.dispatcher,
        refusals=Refusals(pipeline.rows, api_instance=instance, region=settings.region),
        limiter=limiter,
        objects=objects,
        url_signer=url_signer,
        image_codec=image_codec,
        inference=inference,
        recording=Recording(inference, predictions, follower, storage, ACCESS_RULES),
        readiness=Readiness(
            pipeline.inbox,
            broker,
            settings.redis_url,
            settings.records_redis_url,
            access.keys_status,
        ),
        idempotency=idempotency,
        predictions=predictions,
        conversations=Conversations(
            pipeline.records, pipeline.prediction_store, keep_s=settings.prediction_keep_s
        ),
        follower=follower,
        progress=progress,
        event_streams=EventStreams(predictions, progress, url_signer),
        generation_streams=generation_streams,
        tokens=tokens,
        webhooks=webhooks,
        webhook_log=webhook_log,
        storage=storage,
        files=files,
        batch_files=batch_files,
        batches=Batches(BatchStore(objects), batch_files, LINE_ENDPOINTS),
        result_fetcher=result_fetcher,
        source_images=SourceImages(
            objects, files, batch_files, result_fetcher, url_signer, image_codec, url_fetcher
        ),
        usage=UsageService(UsageRows(*dataset), turns),
        reports=ReportService(dataset, turns),
        started_at_s=StartedAt(time.time()),
    )


async def _open_idempotency(
    stack: AsyncExitStack, settings: ApiSettings, objects: ObjectStore
) -> IdempotencyService:
    store = IdempotencyStore(
        settings.records_redis_url,
        keep_s=settings.idempotency_keep_s,
        lease_s=settings.idempotency_lease_s,
        max_bytes=settings.answers_max_bytes,
    )
    return await stack.enter_async_context(
        IdempotencyService(await stack.enter_async_context(store), objects)
    )
