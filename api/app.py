"""The API as an ASGI app: `create_app` adds routes and middleware.

It also adds two things to the OpenAPI document: the shared schemas, and the responses that the
server sends without involving a route.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from api.composition import Configuration, open_dependencies
from api.endpoints import LINE_ENDPOINTS, REPLICATE_ROUTERS, ROUTERS
from api.errors import ErrorReply, add_handlers
from api.fair_room import FairRoom
from api.http.examples import add_examples
from api.http.fast_route import FastRouteApp
from api.http.middleware import BodyBudget
from api.http.openapi import Described, describe_components, ref_to
from api.inputs.guides import show_guides
from api.limits.spent import SpentReader
from api.openai.batches import BatchBody
from api.openai.image_edits import EditBody, EditForm, VariationForm
from api.openai.images import GenerationBody
from api.routes import pages
from shared.broker.transport import Admin, Transport
from shared.models.catalog import Catalog
from shared.process.gc_tuning import settle_heap
from shared.settings import ApiSettings
from shared.usage.row import RowSink

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
"""Groups of endpoints on the /docs page, in order."""


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
        admin: creates an inbox if no pool provides one. Not yet open.
        rows: receives the rows that the API writes. Not yet open.
        spent: adds up spending. If None, spending is read from the rows in BigQuery.

    Raises:
        ConfigurationError: the API keys or the object store's URL are invalid, or API keys are
            required but missing.
    """
    configuration = Configuration.check(settings, catalog)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            app.state.dependencies = await open_dependencies(
                stack, configuration, transport, admin, rows, spent
            )
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
            # Half of the connections, because small tenants are admitted up to twice this limit.
            FairRoom(max(1, settings.max_connections // 2)),
        ),
        origins=[origin.strip() for origin in settings.cors_origins.split(",") if origin.strip()],
        title="Penstock",
        description=_ABOUT,
        version="1",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # A path with an extra slash is treated as unknown. A redirect would use the scheme and host
        # as this API sees them, and clients would then send their keys there.
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


def describe(app: FastAPI, catalog: Catalog) -> None:
    """Adds the schemas referenced by routes to the OpenAPI document of `app`.

    Image request bodies get the fields that the models in the catalog accept.
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
    add_examples(page)
    return page


def _without_fastapis_errors(responses: Described) -> None:
    """Removes the 422 response that FastAPI adds for parameters; its format is not used here."""
    content = responses.get("422", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if schema.get("$ref", "").endswith("/HTTPValidationError"):
        del responses["422"]
