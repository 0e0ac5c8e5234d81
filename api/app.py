"""Composes the API: `create_app` adds routes and middleware, and its lifespan opens connections.

The OpenAPI document gets the shared schemas, and the responses that the server sends without a
route.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.batches.files import BatchFiles
from api.batches.service import Batches
from api.batches.store import BatchStore
from api.dispatch.pipeline import OpenParts, open_pipeline
from api.dispatch.readiness import Readiness
from api.endpoints import ACCESS_RULES, LINE_ENDPOINTS, REPLICATE_ROUTERS, ROUTERS
from api.errors import ErrorReply, add_handlers
from api.fair_room import FairRoom
from api.http.auth import Access, access_of
from api.http.dependencies import Dependencies, StartedAt
from api.http.fast_route import FastRouteApp
from api.http.inference import Inference
from api.http.middleware import BodyBudget
from api.http.openapi import Described, describe_components, ref_to
from api.http.recording import Recording
from api.http.refusals import Refusals
from api.idempotency.service import IdempotencyService
from api.idempotency.store import IdempotencyStore
from api.inputs.codec_pool import CodecPool
from api.inputs.files import Files
from api.inputs.guides import show_guides
from api.inputs.image_codec import ImageCodec
from api.inputs.source_images import SourceImages
from api.inputs.storage import Storage
from api.inputs.url_fetcher import UrlFetcher
from api.limits.budget_marks import BudgetMarks
from api.limits.limiter import Limiter, open_limiter
from api.limits.spent import SpentReader, SpentRows
from api.openai.batches import BatchBody
from api.openai.image_edits import EditBody, EditForm, VariationForm
from api.openai.images import GenerationBody
from api.predictions.conversations import Conversations
from api.predictions.event_stream import EventStreams
from api.predictions.follower import PredictionFollower
from api.predictions.generation_stream import GenerationStreams
from api.predictions.progress import PredictionProgress
from api.predictions.results import ResultFetcher
from api.predictions.service import Predictions
from api.routes import pages
from api.usage.rows import UsageRows
from api.usage.service import QueryPermits, ReportDataset, ReportService, UsageService
from shared.broker.transport import Admin, Transport
from shared.models.catalog import Catalog
from shared.process.gc_tuning import settle_heap
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

_HEAD_TOO_LARGE: Described = {
    "description": "The URL and headers are too large.",
    "content": {"application/json": {"schema": ref_to(ErrorReply)}},
}

_ABOUT = (
    "Embeddings, images, audio and text in the shapes of OpenAI's API, documents as in "
    "Mistral's, and predictions as in Replicate's.\n\nEvery answer has `x-request-id`. Answers "
    "with results also have their origin (`x-penstock-cache`: hit, miss,\npartial or joined), "
    "the duration of each step (`x-penstock-queue-ms`, `-batch-ms`, `-inference-ms`, "
    "`-total-ms`) and the cost\n(`x-penstock-cost-usd`, `x-penstock-device-ms`)."
)

_GROUPS = {
    "text": "Chats, responses and messages, as in OpenAI's and Anthropic's APIs.",
    "embeddings": "Vectors of texts, and rerank.",
    "images": "Draw and edit images, as in OpenAI's API.",
    "audio": "Transcribe recordings and read texts aloud.",
    "ocr": "Read documents, as in Mistral's API.",
    "predictions": "Any model, as in Replicate's API: poll, stream, cancel, webhooks.",
    "models": "Models that the key may use, with their prices.",
    "files": "Uploads for batches and inputs.",
    "batches": "Many requests in one file, at a lower price.",
    "usage": "Usage, costs, reports and invoices.",
    "admin": "Keys, plans and budgets. Requires the `admin` scope.",
    "health": "Readiness, and how busy each model is.",
}
"""Groups of endpoints on the page /docs, in order."""


def describe(app: FastAPI, catalog: Catalog) -> None:
    """Adds the schemas referenced by routes to the OpenAPI document of `app`.

    Bodies of image requests have the fields that the models in the catalog accept.
    """

    def openapi() -> Described:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, catalog)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, catalog: Catalog) -> Described:
    page = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=[{"name": name, "description": about} for name, about in _GROUPS.items()],
    )
    components = page["components"] = describe_components()
    schemas = components["schemas"]
    for body in (GenerationBody, EditForm, EditBody, VariationForm):
        schemas[body.__name__] = show_guides(schemas[body.__name__], catalog.of_task("image"))
    schemas[BatchBody.__name__]["properties"]["endpoint"]["enum"] = list(LINE_ENDPOINTS)
    components["responses"] = {"HeadTooLarge": _HEAD_TOO_LARGE}
    components["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer"},
        "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path in page["paths"].values():
        for operation in path.values():
            _without_fastapis_errors(operation["responses"])
            # The server sends this before it knows the route, like 400, 408 and 429 for request
            # headers (api/server.py).
            operation["responses"]["431"] = {"$ref": "#/components/responses/HeadTooLarge"}
    return page


def _without_fastapis_errors(responses: Described) -> None:
    """Removes the 422 that FastAPI adds for parameters, which has a shape this API does not use."""
    content = responses.get("422", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if schema.get("$ref", "").endswith("/HTTPValidationError"):
        del responses["422"]


def create_app(
    settings: ApiSettings,
    catalog: Catalog,
    transport: AbstractAsyncContextManager[Transport],
    admin: AbstractAsyncContextManager[Admin],
    rows: AbstractAsyncContextManager[RowSink],
    spent: SpentReader | None = None,
) -> FastAPI:
    """Returns the API as an ASGI app. Only its lifespan opens connections.

    Args:
        transport: connection to the broker, not yet open.
        admin: creates an inbox if no pool has one. Not yet open.
        rows: receives the rows that the API writes. Not yet open.
        spent: adds up spending. None: from the rows in BigQuery.

    Raises:
        ConfigurationError: the API keys or the object store's URL are invalid, or API keys are
            required but missing.
    """
    configuration = _Configuration(
        settings,
        catalog,
        access_of(settings, catalog),
        ObjectStore(settings.objects_url),
        UrlSigner(settings.secret),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as opened:
            dependencies = await _open(opened, configuration, transport, admin, rows)
            await opened.enter_async_context(
                BudgetMarks(
                    dependencies.limiter.store,
                    configuration.access.budgets,
                    spent or SpentRows(*_report_dataset(settings)),
                )
            )
            app.state.dependencies = dependencies
            settle_heap()
            yield

    app = _app(settings, lifespan)
    _add_routes(app)
    add_handlers(app)
    describe(app, catalog)
    return app


def _app(
    settings: ApiSettings, lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]]
) -> FastRouteApp:
    return FastRouteApp(
        BodyBudget(
            settings.request_max_bytes,
            settings.bodies_max_bytes,
            # Half of the connections, because the room admits small tenants up to twice its bound.
            FairRoom(max(1, settings.max_connections // 2)),
        ),
        origins=[origin.strip() for origin in settings.cors_origins.split(",") if origin.strip()],
        title="Penstock",
        description=_ABOUT,
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A path with an extra slash is unknown. A redirect would contain this API's own idea of its
        # scheme and host, and clients would send their keys there.
        redirect_slashes=False,
    )


def _add_routes(app: FastRouteApp) -> None:
    for router in ROUTERS:
        app.add(router)
    app.mount("/docs/assets", pages.docs_assets)
    app.mount("/console/assets", pages.console_assets)
    for router in REPLICATE_ROUTERS:
        app.add(router, "/v1")
        app.add(router, is_in_schema=False)


class _Configuration(NamedTuple):
    """Settings validated before any connection opens, so that invalid settings fail at once."""

    settings: ApiSettings
    catalog: Catalog
    access: Access
    objects: ObjectStore
    url_signer: UrlSigner


async def _open(
    opened: AsyncExitStack,
    configuration: _Configuration,
    transport: AbstractAsyncContextManager[Transport],
    admin: AbstractAsyncContextManager[Admin],
    rows: AbstractAsyncContextManager[RowSink],
) -> Dependencies:
    """Opens everything in dependency order. `opened` closes it in reverse order."""
    settings, instance = configuration.settings, f"api-{secrets.token_hex(4)}"
    enter = opened.enter_async_context
    access = await enter(configuration.access)
    codec = await _open_codec(opened, settings)
    pipeline = await open_pipeline(
        opened,
        settings,
        configuration.catalog,
        configuration.objects,
        transport,
        admin,
        rows,
        instance,
        codec,
    )
    idempotency = await _open_idempotency(opened, configuration)
    webhooks, webhook_log = WebhookPublisher(pipeline.broker), WebhookLog(pipeline.redis)
    predictions = await enter(
        Predictions.of_pipeline(pipeline, webhooks, webhook_log, keep_s=settings.prediction_keep_s)
    )
    limiter = await open_limiter(
        opened,
        settings.records_redis_url,
        pipeline.broker,
        instance,
        instances=settings.inbox_pool,
    )
    follower = await enter(PredictionFollower(predictions, Holds(pipeline.redis), limiter))
    tokens = TokenStreams(pipeline.redis)
    return _dependencies(
        configuration,
        pipeline,
        Refusals(pipeline.rows, api_instance=instance, region=settings.region),
        limiter,
        Readiness(
            pipeline.inbox,
            pipeline.broker,
            settings.redis_url,
            settings.records_redis_url,
            access.keys_status,
        ),
        idempotency,
        predictions,
        follower,
        await enter(GenerationStreams(predictions, tokens)),
        tokens,
        webhooks,
        webhook_log,
        codec,
    )


async def _open_codec(opened: AsyncExitStack, settings: ApiSettings) -> ImageCodec:
    pool = CodecPool(settings.picture_processes, settings.picture_budget_bytes)
    return ImageCodec(await opened.enter_async_context(pool))


async def _open_idempotency(
    opened: AsyncExitStack, configuration: _Configuration
) -> IdempotencyService:
    settings = configuration.settings
    store = IdempotencyStore(
        settings.records_redis_url,
        keep_s=settings.idempotency_keep_s,
        lease_s=settings.idempotency_lease_s,
        max_bytes=settings.answers_max_bytes,
    )
    return await opened.enter_async_context(
        IdempotencyService(await opened.enter_async_context(store), configuration.objects)
    )


def _dependencies(
    configuration: _Configuration,
    pipeline: OpenParts,
    refusals: Refusals,
    limiter: Limiter,
    readiness: Readiness,
    idempotency: IdempotencyService,
    predictions: Predictions,
    follower: PredictionFollower,
    generation_streams: GenerationStreams,
    tokens: TokenStreams,
    webhooks: WebhookPublisher,
    webhook_log: WebhookLog,
    image_codec: ImageCodec,
) -> Dependencies:
    settings, turns = configuration.settings, QueryPermits()
    storage = Storage(configuration.objects, tenant_max_bytes=settings.files_max_bytes)
    inference = Inference(pipeline.dispatcher, limiter, pipeline.admission)
    sources = Files(configuration.objects, storage)
    batch_files = BatchFiles(configuration.objects, storage)
    progress = PredictionProgress(
        WaitingLines(pipeline.redis), PreviewStore(pipeline.redis), pipeline.flow_runs
    )
    result_fetcher = ResultFetcher(
        configuration.objects, pipeline.records, pipeline.flow_runs, image_codec
    )
    return Dependencies(
        settings=settings,
        catalog=configuration.catalog,
        access=configuration.access,
        access_rules=ACCESS_RULES,
        admission=pipeline.admission,
        dispatcher=pipeline.dispatcher,
        refusals=refusals,
        limiter=limiter,
        objects=configuration.objects,
        url_signer=configuration.url_signer,
        image_codec=image_codec,
        inference=inference,
        recording=Recording(inference, predictions, follower, storage, ACCESS_RULES),
        readiness=readiness,
        idempotency=idempotency,
        predictions=predictions,
        conversations=Conversations(
            pipeline.records, pipeline.prediction_store, keep_s=settings.prediction_keep_s
        ),
        follower=follower,
        progress=progress,
        event_streams=EventStreams(predictions, progress, configuration.url_signer),
        generation_streams=generation_streams,
        tokens=tokens,
        webhooks=webhooks,
        webhook_log=webhook_log,
        storage=storage,
        files=sources,
        batch_files=batch_files,
        batches=Batches(BatchStore(configuration.objects), batch_files, LINE_ENDPOINTS),
        result_fetcher=result_fetcher,
        source_images=SourceImages(
            configuration.objects,
            sources,
            batch_files,
            result_fetcher,
            configuration.url_signer,
            image_codec,
            UrlFetcher(settings, storage, FetchedUrls(pipeline.redis)),
        ),
        usage=UsageService(UsageRows(*_report_dataset(settings)), turns),
        reports=ReportService(_report_dataset(settings), turns),
        started_at_s=StartedAt(time.time()),
    )


def _report_dataset(settings: ApiSettings) -> ReportDataset:
    return ReportDataset(
        settings.project,
        settings.dataset,
        settings.bigquery_endpoint,
        settings.usage_query_max_bytes,
    )
