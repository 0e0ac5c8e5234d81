"""The OpenAPI document. Routes that read and write bodies themselves are described from here.

Each route lists its responses in the `responses` of its decorator: `responses` for OpenAI's shapes,
`problems` for Replicate's, with the possible statuses. A status that is new in api/errors.py needs
a description in _DESCRIPTIONS and an entry at every route that can return it.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.http import openapi_headers
from api.problem_details import Problem
from api.schemas import admin, report_replies, status_replies, usage_replies
from api.schemas import openai as schemas
from api.schemas import openai_batches as batch_schemas
from api.schemas import openai_files as file_replies
from api.schemas import openai_text as text_schemas
from api.schemas import openai_text_replies as text_replies
from api.schemas import replicate_replies as prediction_replies
from api.schemas.openai_replies import (
    EmbeddingsReply,
    ErrorReply,
    ImagesReply,
    ModelItem,
    ModelsReply,
)
from api.schemas.openai_responses import ResponseBody
from api.schemas.openai_responses_replies import ResponseDeleted, ResponseReply
from api.schemas.replicate import PredictionBody, VersionedBody

Described = dict[str, Any]
Responses = dict[int | str, Described]

AUTHENTICATED: Described = {"security": [{"key": []}, {"header": []}]}
"""For every route that requires an API key."""
AUTHENTICATED_OR_LINKED: Described = {"security": [*AUTHENTICATED["security"], {}]}
"""For every route that requires an API key or a signed link."""
INFERENCE_ERRORS = (400, 401, 404, 408, 409, 413, 422, 429, 499, 500, 503, 504)
CREATION_ERRORS = (401, 404, 408, 413, 422, 429, 499, 503, 504)
"""For routes that create predictions."""
_REF = "#/components/schemas/{name}"
_DESCRIPTIONS = {
    400: "The request is not valid; the message names the field.",
    401: "No valid API key.",
    403: "The API key may not do this, or the signed link is not valid.",
    404: "This model, path or resource does not exist.",
    408: "The body arrives too slowly.",
    409: "The first request with this `Idempotency-Key` is still being answered.",
    413: "The body is too large.",
    422: "The request is not valid; `invalid_fields` names the fields.",
    429: (
        "Too many items are waiting, or the answer would come too late, "
        "or a limit of your plan is reached (`rate_limit_exceeded`): "
        "try again after `Retry-After` seconds. "
        "Or the budget of the month is spent (`insufficient_quota`)."
    ),
    499: "The request was canceled, or its caller hung up.",
    500: "The model could not compute the result.",
    503: "A service that this needs is out of reach; try again after `Retry-After` seconds.",
    504: (
        "The deadline passed. `x-should-retry: false` keeps OpenAI's clients from sending it again."
    ),
}
_BODIES: tuple[type[BaseModel], ...] = (
    *(schemas.EmbeddingsBody, schemas.GenerationBody, schemas.EditForm, schemas.EditBody),
    *(text_schemas.ChatBody, text_schemas.CompletionBody, ResponseBody),
    *(PredictionBody, VersionedBody, batch_schemas.BatchBody),
)
_REPLIES: tuple[type[msgspec.Struct], ...] = (
    *(EmbeddingsReply, ImagesReply, ModelsReply, ModelItem, ErrorReply),
    *(text_replies.ChatReply, text_replies.CompletionReply),
    *(ResponseReply, ResponseDeleted),
    *(batch_schemas.BatchObject, batch_schemas.BatchesPage),
    *(file_replies.FileObject, file_replies.FilesPage, file_replies.FileDeleted),
    *(
        prediction_replies.PredictionReply,
        prediction_replies.PredictionsPage,
        prediction_replies.WebhookAttempts,
        prediction_replies.ReplicateModel,
    ),
    *(
        prediction_replies.ModelsPage,
        prediction_replies.VersionReply,
        prediction_replies.VersionsPage,
    ),
    *(
        prediction_replies.DeploymentReply,
        prediction_replies.DeploymentsPage,
        prediction_replies.FileReply,
        prediction_replies.SecretReply,
    ),
    *(prediction_replies.AccountReply, prediction_replies.Hardware),
    *(usage_replies.UsagePage, usage_replies.UsageReply, status_replies.StatusReply),
    *(report_replies.ReportsReply, report_replies.ReportReply),
    *(prediction_replies.HealthReply, prediction_replies.ReadinessReply, Problem),
    *(admin.NewKeyBody, admin.RotationBody, admin.TenantBody, admin.KeyObject),
    *(admin.IssuedKeyObject, admin.KeysPage, admin.KeyDeleted, admin.PlanObject, admin.PlansReply),
    *(admin.PlanDeleted, admin.TenantObject, admin.TenantsReply, admin.ActObject, admin.ActsPage),
)

_HEAD_TOO_LARGE: Described = {
    "description": "The URL and headers are too large.",
    "content": {"application/json": {"schema": {"$ref": _REF.format(name=ErrorReply.__name__)}}},
}


def inference_body(json: type[BaseModel], form: type[BaseModel] | None = None) -> Described:
    """The request of an inference route: a JSON body, optionally a form, and headers."""
    return _request_body(openapi_headers.INFERRING, json, form)


def prediction_body(json: type[BaseModel]) -> Described:
    """The request of a route that creates predictions: a JSON body and headers."""
    return _request_body(openapi_headers.PREDICTING, json)


def json_body(json: type[BaseModel]) -> Described:
    """The request of a route with a JSON body and no headers of its own."""
    return _request_body([], json)


def _request_body(
    headers: list[Described], json: type[BaseModel], form: type[BaseModel] | None = None
) -> Described:
    content = {"application/json": {"schema": ref_to(json)}}
    if form is not None:
        content = {"multipart/form-data": {"schema": ref_to(form)}} | content
    return {
        "requestBody": {"required": True, "content": content},
        "parameters": headers,
    } | AUTHENTICATED


def responses(
    reply: type[msgspec.Struct], *statuses: int, headers: tuple[str, ...] = ()
) -> Responses:
    """The responses of a route in OpenAI's shape: 200 with `reply` and `headers`, or an error."""
    return {200: success("The result.", reply, *headers)} | errors(*statuses)


def errors(*statuses: int) -> Responses:
    """The errors of a route in OpenAI's shape."""
    return _errors(statuses, ErrorReply, "application/json")


def inference_responses(reply: type[msgspec.Struct], *headers: str) -> Responses:
    """The responses of an inference route."""
    answers = responses(reply, *INFERENCE_ERRORS, headers=(*openapi_headers.OF_INFERENCE, *headers))
    answers[422]["description"] = "This `Idempotency-Key` was used with another request."
    # Where some items of a request fail, the others were computed and are told of all the same.
    computed = openapi_headers.references(*openapi_headers.OF_INFERENCE)
    for status in INFERENCE_ERRORS:
        answers[status]["headers"] = computed | answers[status]["headers"]
    return answers


def problems(*statuses: int) -> Responses:
    """The errors of a route in Replicate's shape."""
    return _errors(statuses, Problem, "application/problem+json")


def creation_responses() -> Responses:
    """The responses of a route that creates predictions: a new one, or that of an equal request."""
    reply = prediction_replies.PredictionReply
    answers: Responses = {
        200: success(
            "The prediction that the same request created before.",
            reply,
            "Location",
            "Idempotent-Replayed",
            *openapi_headers.OF_LIMITS,
        ),
        201: success("The new prediction.", reply, "Location", *openapi_headers.OF_LIMITS),
    }
    return answers | problems(*CREATION_ERRORS)


def of_both_apis(*statuses: int) -> Responses:
    """Errors in OpenAI's shape, or in Replicate's for its clients."""
    found = errors(*statuses)
    for status, in_other_shape in problems(*statuses).items():
        found[status]["content"] |= in_other_shape["content"]
    return found


def success(text: str, reply: type[msgspec.Struct], *headers: str) -> Described:
    """A response with a JSON body."""
    content = {"application/json": {"schema": ref_to(reply)}}
    return {
        "description": text,
        "content": content,
        "headers": openapi_headers.references(*headers),
    }


def event_stream(*kinds: str) -> Described:
    """A response that is a stream of server-sent events. The schema is that of one event."""
    properties = {
        "event": {"type": "string", "enum": list(kinds)},
        "id": {"type": "string"},
        "data": {"type": "string"},
    }
    event = {"type": "object", "required": list(properties), "properties": properties}
    content = {"text/event-stream": {"schema": event}}
    return {
        "description": "Server-sent events.",
        "content": content,
        "headers": openapi_headers.references(),
    }


def streamed(answers: Responses) -> Responses:
    """The responses of a route that answers as a stream of events too, if asked for it.

    A stream says in `Location` at which URL it can be read again.
    """
    properties = {name: {"type": "string"} for name in ("event", "id", "data")}
    event = {"type": "object", "required": ["data"], "properties": properties}
    content = answers[200]["content"] | {"text/event-stream": {"schema": event}}
    headers = answers[200]["headers"] | openapi_headers.references("Location")
    return answers | {200: answers[200] | {"content": content, "headers": headers}}


def empty(text: str) -> Described:
    """A response without a body."""
    return {"description": text, "headers": openapi_headers.references()}


def not_over() -> Responses:
    """The error of a route that needs a prediction that has ended."""
    found = problems(409)
    found[409]["description"] = "The prediction has not ended."
    return found


def binary(text: str, *media_types: str, headers: tuple[str, ...] = ()) -> Described:
    """A response whose body is not JSON, with these headers besides the common ones."""
    schema = {"type": "string", "format": "binary"}
    content = {media_type: {"schema": schema} for media_type in media_types}
    references = openapi_headers.references(*headers)
    return {"description": text, "content": content, "headers": references}


def ref_to(body: type[BaseModel] | type[msgspec.Struct]) -> dict[str, str]:
    """A reference to the schema of a body."""
    return {"$ref": _REF.format(name=body.__name__)}


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
    template = _REF.replace("{name}", "{model}")
    _, described = models_json_schema(
        [(body, "validation") for body in _BODIES], ref_template=template
    )
    _, structs = msgspec.json.schema_components(_REPLIES, ref_template=_REF)
    page["components"] = {
        "schemas": {**described["$defs"], **structs},
        "headers": openapi_headers.ANSWERED,
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
            # (api/http/bounded_protocol.py).
            operation["responses"]["431"] = {"$ref": "#/components/responses/HeadTooLarge"}
    return page


def _without_fastapis_errors(responses: Described) -> None:
    """Removes the 422 that FastAPI adds for parameters, in a shape that this API does not use."""
    content = responses.get("422", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema", {})
    if schema.get("$ref", "").endswith("/HTTPValidationError"):
        del responses["422"]


def _errors(statuses: tuple[int, ...], reply: type[msgspec.Struct], media_type: str) -> Responses:
    if 401 in statuses:  # where a key is checked
        statuses = tuple(sorted({*statuses, 403, 503}))
    return {
        status: {
            "description": _DESCRIPTIONS[status],
            "content": {media_type: {"schema": ref_to(reply)}},
            "headers": openapi_headers.references(*openapi_headers.OF_STATUS.get(status, ())),
        }
        for status in statuses
    }
