"""The OpenAPI pages: bodies and replies that routes read and write themselves are described to FastAPI from here."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api import schemas
from api.prediction_schemas import PredictionBody, VersionedBody

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "The request is not valid; `param` names the field.",
    401: "No valid API key.",
    404: "No such model here.",
    409: "The first request with this `Idempotency-Key` is still being answered.",
    413: "The body is too large.",
    422: "This `Idempotency-Key` came with another request before.",
    429: "Too many items are waiting; come back after `Retry-After` seconds.",
    503: "The broker is out of reach.",
    504: "The deadline passed; not retried by clients on their own (`x-should-retry: false`).",
}
_DEADLINE: dict[str, Any] = {
    "name": "X-Penstock-Deadline-Ms",
    "in": "header",
    "required": False,
    "description": "Milliseconds until the answer is of no use; at most the model's longest, which also is the bound.",
    "schema": {"type": "integer", "minimum": 1},
}
_QUEUE_LIMIT: dict[str, Any] = {
    "name": "X-Penstock-Queue-Limit-Ms",
    "in": "header",
    "required": False,
    "description": "Milliseconds after which the request is not begun any more, even if the deadline is later.",
    "schema": {"type": "integer", "minimum": 1},
}
_CACHE_CONTROL: dict[str, Any] = {
    "name": "Cache-Control",
    "in": "header",
    "required": False,
    "description": "`no-cache`: compute anew; `no-store`: also keep nothing.",
    "schema": {"type": "string"},
}


_KEY: dict[str, Any] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "The same request under the same key is computed once; its answer is given again for a day.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 255},
}
_LANE: dict[str, Any] = {
    "name": "X-Penstock-Lane",
    "in": "header",
    "required": False,
    "description": "`batch`: may wait behind interactive requests.",
    "schema": {"type": "string", "enum": ["interactive", "batch"], "default": "interactive"},
}


def body_of(json: type[BaseModel], form: type[BaseModel] | None = None) -> dict[str, Any]:
    """What a route that infers takes: a JSON body, a form as well where given, and the headers."""
    content = {"application/json": {"schema": _ref(json)}}
    if form is not None:
        content = {"multipart/form-data": {"schema": _ref(form)}} | content
    return {
        "requestBody": {"required": True, "content": content},
        "parameters": [_DEADLINE, _QUEUE_LIMIT, _CACHE_CONTROL, _KEY, _LANE],
        "security": [{"key": []}],
    }


def replies_with(reply: type[msgspec.Struct]) -> dict[int | str, dict[str, Any]]:
    """The replies of a route that infers: `reply`, or one of the errors."""
    described: dict[int | str, dict[str, Any]] = {200: _described("Done.", reply)}
    return described | {status: _described(text, schemas.ErrorReply) for status, text in _ERRORS.items()}


def describe(app: FastAPI) -> None:
    """Makes `app` describe itself with the schemas that the routes only refer to."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _page(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _page(app: FastAPI) -> dict[str, Any]:
    page = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    ours = (schemas.EmbeddingsBody, schemas.GenerationBody, schemas.EditForm, schemas.EditBody)
    bodies: tuple[type[BaseModel], ...] = (*ours, PredictionBody, VersionedBody)
    template = _REF.replace("{name}", "{model}")
    _, described = models_json_schema([(body, "validation") for body in bodies], ref_template=template)
    replies = (schemas.EmbeddingsReply, schemas.ImagesReply, schemas.ModelsReply, schemas.ModelItem, schemas.ErrorReply)
    _, structs = msgspec.json.schema_components(replies, ref_template=_REF)
    components = page.setdefault("components", {})
    components["schemas"] = {**components.get("schemas", {}), **described["$defs"], **structs}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return page


def _described(text: str, reply: type[msgspec.Struct]) -> dict[str, Any]:
    return {
        "description": text,
        "content": {"application/json": {"schema": {"$ref": _REF.format(name=reply.__name__)}}},
    }


def _ref(body: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(name=body.__name__)}
