"""The OpenAPI document: shared schemas, and responses of the server that no route sends."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.anthropic.schemas import (
    AnthropicErrorReply,
    CountBody,
    MessageReply,
    MessagesBody,
    TokenCountReply,
)
from api.bodies import ErrorReply
from api.chat_bodies import ChatBody, ChatReply, CompletionBody, CompletionReply
from api.http.openapi import ANSWERED, SCHEMA_REF, Described
from api.openai.batches import BatchBody, BatchesPage, BatchObject
from api.openai.conversations import (
    ConversationBody,
    ConversationChange,
    ConversationDeleted,
    ConversationReply,
    NewItems,
)
from api.openai.embeddings import EmbeddingsBody, EmbeddingsReply
from api.openai.files import FileDeleted, FileObject, FilesPage
from api.openai.images import EditBody, EditForm, GenerationBody, ImagesReply
from api.openai.item_pages import ItemsPage
from api.openai.models import ModelItem, ModelsReply
from api.openai.responses_schemas import ResponseBody, ResponseDeleted, ResponseReply
from api.openai.stored_chats import ChatChange, ChatDeleted
from api.openai.token_counts import (
    InputTokensBody,
    InputTokensReply,
    TokenizeBody,
    TokenizeReply,
)
from api.openai.usage import UsagePage, UsageReply
from api.problem_details import Problem
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
from api.replicate.schemas import PredictionBody, VersionedBody
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
from api.routes.reports import ReportReply, ReportsReply
from api.routes.status import StatusReply

_BODIES: tuple[type[BaseModel], ...] = (
    *(EmbeddingsBody, GenerationBody, EditForm, EditBody),
    *(ChatBody, CompletionBody, ResponseBody),
    *(ConversationBody, ConversationChange, NewItems),
    *(ChatChange, MessagesBody, CountBody, InputTokensBody, TokenizeBody),
    *(PredictionBody, VersionedBody, BatchBody),
)


_REPLIES: tuple[type[msgspec.Struct], ...] = (
    *(EmbeddingsReply, ImagesReply, ModelsReply, ModelItem, ErrorReply),
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


def describe(app: FastAPI) -> None:
    """Adds to the OpenAPI document of `app` the schemas that its routes refer to."""

    def openapi() -> Described:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> Described:
    page = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    template = SCHEMA_REF.replace("{name}", "{model}")
    _, described = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=template
    )
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
            # The server answers this before a route is known, like 400, 408 and 429 for a head
            # (api/server.py).
            operation["responses"]["431"] = {"$ref": "#/components/responses/HeadTooLarge"}
    return page


def _without_fastapis_errors(responses: Described) -> None:
    """Removes the 422 that FastAPI adds for parameters, in a shape that this API does not use."""
    content = responses.get("422", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if schema.get("$ref", "").endswith("/HTTPValidationError"):
        del responses["422"]
