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

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.anthropic import messages
from api.anthropic.schemas import (
    AnthropicErrorReply,
    CountBody,
    MessageReply,
    MessagesBody,
    TokenCountReply,
)
from api.batches.files import BatchFiles
from api.batches.service import Batches
from api.batches.store import BatchStore
from api.chat_bodies import ChatBody, CompletionBody
from api.dispatch.pipeline import OpenParts, open_pipeline
from api.dispatch.readiness import Readiness
from api.errors import ErrorReply, add_handlers
from api.fair_room import FairRoom
from api.http.auth import Access, access_of
from api.http.dependencies import Dependencies, StartedAt
from api.http.fast_route import FastRouteApp
from api.http.inference import Inference
from api.http.middleware import BodyBudget
from api.http.openapi import ANSWERED, SCHEMA_REF, Described
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
from api.mistral import ocr
from api.mistral.ocr_schemas import OcrBody, OcrErrorReply, OcrReply
from api.openai import (
    audio,
    batches,
    conversations,
    embeddings,
    image_edits,
    images,
    rerank,
    responses,
    speech,
    stored_chats,
    token_counts,
    usage,
)
from api.openai import chat as generation_routes
from api.openai.audio_schemas import (
    SpeechBody,
    TranscriptionForm,
    TranscriptionReply,
    TranslationForm,
    VerboseTranscriptionReply,
)
from api.openai.batches import BatchBody, BatchesPage, BatchObject
from api.openai.chat_replies import ChatReply, CompletionReply
from api.openai.conversations import (
    ConversationBody,
    ConversationChange,
    ConversationDeleted,
    ConversationReply,
    NewItems,
)
from api.openai.embeddings_schemas import EmbeddingsBody, EmbeddingsReply
from api.openai.image_edits import EditBody, EditForm, VariationForm
from api.openai.images import GenerationBody, ImagesReply
from api.openai.item_pages import ItemsPage
from api.openai.rerank import RerankBody, RerankReply
from api.openai.responses_schemas import ResponseBody, ResponseDeleted, ResponseReply
from api.openai.stored_chats import ChatChange, ChatDeleted
from api.openai.token_counts import (
    InputTokensBody,
    InputTokensReply,
    TokenizeBody,
    TokenizeReply,
)
from api.openai.usage import UsagePage, UsageReply
from api.predictions.conversations import Conversations
from api.predictions.event_stream import EventStreams
from api.predictions.follower import PredictionFollower
from api.predictions.generation_stream import GenerationStreams
from api.predictions.results import ResultFetcher
from api.predictions.service import Predictions
from api.problem_details import Problem
from api.replicate import events as prediction_events
from api.replicate import models as prediction_models
from api.replicate import predictions as prediction_routes
from api.replicate.predictions import PredictionBody, VersionedBody
from api.replicate.replies import (
    AccountReply,
    DeploymentReply,
    DeploymentsPage,
    FileReply,
    Hardware,
    HealthReply,
    ModelsPage,
    PredictionReply,
    PredictionsPage,
    ReadinessReply,
    ReplicateModel,
    SecretReply,
    VersionReply,
    VersionsPage,
    WebhookAttempts,
)
from api.routes import admin as admin_routes
from api.routes import files, health, models, pages, reports
from api.routes.admin import (
    ActObject,
    ActsPage,
    IssuedKeyObject,
    KeyDeleted,
    KeyObject,
    KeysPage,
    NewKeyBody,
    PlanDeleted,
    PlanObject,
    PlansReply,
    RotationBody,
    TenantBody,
    TenantObject,
    TenantsReply,
)
from api.routes.files import FileDeleted, FileObject, FilesPage
from api.routes.health import StatusReply
from api.routes.models import ModelItem, ModelsReply
from api.routes.reports import ReportReply, ReportsReply
from api.usage.rows import UsageRows
from api.usage.service import QueryPermits, ReportDataset, ReportService, UsageService
from shared.broker.transport import Admin, Transport
from shared.models.catalog import Catalog
from shared.process.gc_tuning import settle_heap
from shared.settings import ApiSettings
from shared.stores.objects import ObjectStore, UrlSigner
from shared.usage.row import RowSink
from shared.webhooks.publisher import WebhookPublisher

_BODIES: tuple[type[BaseModel], ...] = (
    *(EmbeddingsBody, RerankBody, GenerationBody, EditForm, EditBody, VariationForm),
    *(TranscriptionForm, TranslationForm, SpeechBody, OcrBody),
    *(ChatBody, CompletionBody, ResponseBody),
    *(ConversationBody, ConversationChange, NewItems),
    *(ChatChange, MessagesBody, CountBody, InputTokensBody, TokenizeBody),
    *(PredictionBody, VersionedBody, BatchBody),
)


_REPLIES: tuple[type[msgspec.Struct], ...] = (
    *(EmbeddingsReply, RerankReply, ImagesReply, ModelsReply, ModelItem, ErrorReply),
    *(TranscriptionReply, VerboseTranscriptionReply, OcrReply, OcrErrorReply),
    *(ChatReply, CompletionReply),
    *(ResponseReply, ResponseDeleted, ItemsPage),
    *(ConversationReply, ConversationDeleted, ChatDeleted),
    *(MessageReply, AnthropicErrorReply, TokenCountReply, InputTokensReply, TokenizeReply),
    *(BatchObject, BatchesPage),
    *(FileObject, FilesPage, FileDeleted),
    *(
        PredictionReply,
        PredictionsPage,
        WebhookAttempts,
        ReplicateModel,
    ),
    *(
        ModelsPage,
        VersionReply,
        VersionsPage,
    ),
    *(
        DeploymentReply,
        DeploymentsPage,
        FileReply,
        SecretReply,
    ),
    *(AccountReply, Hardware),
    *(UsagePage, UsageReply, StatusReply),
    *(ReportsReply, ReportReply),
    *(HealthReply, ReadinessReply, Problem),
    *(NewKeyBody, RotationBody, TenantBody, KeyObject),
    *(IssuedKeyObject, KeysPage, KeyDeleted, PlanObject, PlansReply),
    *(PlanDeleted, TenantObject, TenantsReply, ActObject, ActsPage),
)


_HEAD_TOO_LARGE: Described = {
    "description": "The URL and headers are too large.",
    "content": {
        "application/json": {"schema": {"$ref": SCHEMA_REF.format(name=ErrorReply.__name__)}}
    },
}

_ABOUT = (
    "Embeddings, images, audio and text in the shapes of OpenAI's API, documents as in "
    "Mistral's, and predictions as in Replicate's.\n\nEvery answer has `x-request-id`. Answers "
    "with results also have their origin (`x-penstock-cache`: hit, miss,\npartial or joined), "
    "the duration of each step (`x-penstock-queue-ms`, `-batch-ms`, `-inference-ms`, "
    "`-total-ms`) and the cost\n(`x-penstock-cost-usd`, `x-penstock-device-ms`)."
)


def describe(app: FastAPI, catalog: Catalog) -> None:
    """Adds the schemas that the routes refer to to the OpenAPI document of `app`.

    Bodies of image requests have the fields that the models in the catalog accept.
    """

    def openapi() -> Described:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, catalog)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, catalog: Catalog) -> Described:
    page = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    template = SCHEMA_REF.replace("{name}", "{model}")
    _, described = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=template
    )
    for body in (GenerationBody, EditForm, EditBody, VariationForm):
        schema = described["$defs"][body.__name__]
        described["$defs"][body.__name__] = show_guides(schema, catalog.of_task("image"))
    _, structs = msgspec.json.schema_components(_REPLIES, ref_template=SCHEMA_REF)
    page["components"] = {
        "schemas": {**described["$defs"], **structs},
        "headers": ANSWERED,
        "responses": {"HeadTooLarge": _HEAD_TOO_LARGE},
        "securitySchemes": {
            "key": {"type": "http", "scheme": "bearer"},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        },
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
    for routes in (
        embeddings,
        rerank,
        images,
        image_edits,
        audio,
        speech,
        ocr,
        generation_routes,
        responses,
        files,
        batches,
        models,
        usage,
        reports,
        admin_routes,
        health,
        pages,
    ):
        app.add(routes.router)
    app.include_router(generation_routes.stored_router)
    app.include_router(stored_chats.router)
    app.include_router(token_counts.router)
    app.include_router(responses.stored_router)
    app.include_router(conversations.router)
    app.include_router(messages.router)
    app.mount("/docs/assets", pages.docs_assets)
    app.mount("/console/assets", pages.console_assets)
    for router in (
        prediction_routes.creation_router,
        prediction_routes.router,
        prediction_events.router,
        prediction_models.router,
    ):
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
    webhooks = WebhookPublisher(pipeline.broker)
    predictions = await enter(
        Predictions.of_pipeline(pipeline, webhooks, keep_s=settings.prediction_keep_s)
    )
    limiter = await open_limiter(
        opened,
        settings.records_redis_url,
        pipeline.broker,
        instance,
        instances=settings.inbox_pool,
    )
    follower = await enter(PredictionFollower(predictions, pipeline.records.holds, limiter))
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
        await enter(GenerationStreams(predictions, pipeline.records.tokens)),
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
    image_codec: ImageCodec,
) -> Dependencies:
    settings, turns = configuration.settings, QueryPermits()
    storage = Storage(configuration.objects, tenant_max_bytes=settings.files_max_bytes)
    inference = Inference(pipeline.dispatcher, limiter, pipeline.admission)
    sources = Files(configuration.objects, storage)
    batch_files = BatchFiles(configuration.objects, storage)
    result_fetcher = ResultFetcher(configuration.objects, predictions, image_codec)
    return Dependencies(
        settings=settings,
        catalog=configuration.catalog,
        access=configuration.access,
        admission=pipeline.admission,
        dispatcher=pipeline.dispatcher,
        refusals=refusals,
        limiter=limiter,
        objects=configuration.objects,
        url_signer=configuration.url_signer,
        image_codec=image_codec,
        inference=inference,
        recording=Recording(inference, predictions, follower, storage),
        readiness=readiness,
        idempotency=idempotency,
        predictions=predictions,
        conversations=Conversations(pipeline.records, keep_s=settings.prediction_keep_s),
        follower=follower,
        event_streams=EventStreams(predictions, configuration.url_signer),
        generation_streams=generation_streams,
        storage=storage,
        files=sources,
        batch_files=batch_files,
        batches=Batches(BatchStore(configuration.objects), batch_files),
        result_fetcher=result_fetcher,
        source_images=SourceImages(
            configuration.objects,
            sources,
            batch_files,
            result_fetcher,
            configuration.url_signer,
            image_codec,
            UrlFetcher(settings, storage, pipeline.records.fetched_urls),
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
