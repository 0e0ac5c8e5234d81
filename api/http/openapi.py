"""Parts of the OpenAPI document: headers, parameters, request bodies, and responses.

`Router` (api/http/router.py) combines these parts for each endpoint. A new status in api/errors.py
needs a description in _DESCRIPTIONS and an entry in the `errors` of every endpoint that can return
it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from api.errors import ErrorReply
from api.http.request_options import MAX_KEY_CHARS, MAX_MS
from api.problem_details import Problem

Described: TypeAlias = dict[str, Any]
Responses: TypeAlias = dict[int | str, Described]
Schema: TypeAlias = type[BaseModel] | type[msgspec.Struct]
"""A request or response body with a named schema."""

TRUNCATED_HEADER = "x-penstock-truncated-tokens"
AUTHENTICATED: Described = {"security": [{"key": []}, {"header": []}]}
"""Security for endpoints that require an API key."""
AUTHENTICATED_OR_LINKED: Described = {"security": [*AUTHENTICATED["security"], {}]}
"""Security for endpoints that require an API key or a signed link."""
SCHEMA_REF = "#/components/schemas/{name}"

_DESCRIPTIONS = {
    400: "The request is invalid; the message names the field.",
    401: "The API key is missing or invalid.",
    403: "The API key does not permit this request, or the signed link is invalid.",
    404: "The model, path or resource does not exist.",
    408: "The body arrived too slowly.",
    409: "The first request with this `Idempotency-Key` is still being processed.",
    413: "The body is too large.",
    422: "The request is invalid; `invalid_fields` names the fields.",
    429: (
        "Too many items are waiting, the answer would be too late, or a rate limit of your plan "
        "is exceeded (`rate_limit_exceeded`): try again after `Retry-After` seconds. Or the "
        "monthly budget is spent (`insufficient_quota`)."
    ),
    499: "The request was canceled, or its caller hung up.",
    500: "The model could not compute the result.",
    503: (
        "A required service is unreachable; try again after `Retry-After` seconds. Or the model "
        "was withdrawn (`model_withdrawn`), and retrying does not help."
    ),
    504: "The deadline passed. `x-should-retry: false` keeps OpenAI's clients from retrying.",
}

_MILLISECONDS = {"type": "integer", "minimum": 1, "maximum": MAX_MS}
_REQUEST_HEADERS: dict[str, tuple[str, Described]] = {
    "X-Penstock-Deadline-Ms": (
        "Maximum milliseconds from receipt to the answer. After that, the response is a 504. "
        "Values above the model's maximum deadline are lowered to it.",
        _MILLISECONDS,
    ),
    "X-Penstock-Queue-Limit-Ms": (
        "Milliseconds from receipt after which the model no longer starts on the request, even if "
        "its deadline is later.",
        _MILLISECONDS,
    ),
    "Cache-Control": (
        "`no-cache`: compute again. `no-store`: compute again, and do not cache the result.",
        {"type": "string"},
    ),
    "Idempotency-Key": (
        "The same request with the same key is computed once. Its answer is repeated for a day, or "
        "until newer answers displace it.",
        {"type": "string", "pattern": rf"^[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}$"},
    ),
    "X-Penstock-Lane": (
        "`batch`: the request may wait for interactive requests.",
        {"type": "string", "enum": ["interactive", "batch"], "default": "interactive"},
    ),
    "Prefer": (
        "`wait` or `wait=n`: answer when the prediction ends, or after n seconds (at most 60).",
        {"type": "string", "examples": ["wait=5"]},
    ),
    "Cancel-After": (
        "Time from receipt after which the prediction is stopped.",
        {"type": "string", "examples": ["30s", "5m", "1h30m"]},
    ),
    "Traceparent": (
        "The trace that the request belongs to (W3C Trace Context). Invalid values are ignored.",
        {"type": "string", "examples": ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]},
    ),
    "X-Penstock-Event-Ids": (
        "`true`: each event of a stream has an ID. Default: only with an `Idempotency-Key`.",
        {"type": "string", "enum": ["true", "false"]},
    ),
    "Last-Event-ID": ("Sends only events after this one.", {"type": "string"}),
}

_AMOUNT = {"type": "number", "minimum": 0}
_COUNT = {"type": "integer", "minimum": 0}
_SECONDS = {"type": "integer", "minimum": 0}
_HEADERS: dict[str, tuple[str, Described]] = {
    "Accept-Ranges": ("The unit of ranges.", {"type": "string", "enum": ["bytes"]}),
    "Content-Range": (
        "The range of bytes in this response, and the total size.",
        {"type": "string"},
    ),
    "Content-Disposition": ("The name for the file.", {"type": "string"}),
    "X-Request-Id": ("The ID that you sent, or else a generated one.", {"type": "string"}),
    "X-Penstock-Total-Ms": ("Milliseconds from receipt to the answer.", _AMOUNT),
    "X-Penstock-Cache": (
        "Origin of the results.",
        {"type": "string", "enum": ["hit", "miss", "partial", "joined"]},
    ),
    "X-Penstock-Queue-Ms": ("Milliseconds spent waiting for a worker.", _AMOUNT),
    "X-Penstock-Batch-Ms": ("Milliseconds spent waiting for the batch to start.", _AMOUNT),
    "X-Penstock-Inference-Ms": ("Milliseconds spent in the model.", _AMOUNT),
    "X-Penstock-Device-Ms": (
        "Device milliseconds that the model used for this request, including its part of "
        "shared batches.",
        _AMOUNT,
    ),
    "X-Penstock-Cost-Usd": (
        "Charge for the request in US dollars. 0 for a repeated answer.",
        _AMOUNT,
    ),
    "X-Penstock-Revision": (
        "The revision of the model that computed the results. Comma-separated if a new revision "
        "under test computed some of them.",
        {"type": "string"},
    ),
    "X-Penstock-Lane": (
        "`batch` if the caller's plan does not include a higher priority.",
        {"type": "string", "enum": ["batch"]},
    ),
    "X-Penstock-Truncated-Tokens": (
        "Number of tokens that were cut: from all texts if the request has `truncate`, from the "
        "prompts for images.",
        {"type": "integer", "minimum": 0},
    ),
    "X-Penstock-Seed": ("The seeds of the images, comma-separated.", {"type": "string"}),
    "X-Penstock-Withheld": (
        "Number of images withheld by the model's safety check. They are not in `data`.",
        {"type": "integer", "minimum": 1},
    ),
    "Idempotent-Replayed": (
        "Present if this is a repeated answer.",
        {"type": "string", "enum": ["true"]},
    ),
    "Location": ("URL of the prediction.", {"type": "string", "format": "uri-reference"}),
    "Retry-After": ("Seconds to wait before trying again.", _SECONDS),
    "Retry-After-Ms": ("The same in milliseconds, which OpenAI's clients prefer.", _SECONDS),
    "Age": ("Age of the figures in seconds.", _SECONDS),
    **{
        f"X-Ratelimit-{kind}-{unit}": (
            words.format(unit=unit.lower()) + " Only if your plan has such a limit.",
            schema,
        )
        for unit in ("Requests", "Tokens", "Pixel-Steps", "Work")
        for kind, words, schema in (
            ("Limit", "Maximum {unit} per minute.", _COUNT),
            ("Remaining", "Remaining {unit} in this minute.", _COUNT),
            (
                "Reset",
                "Time until no {unit} count as used.",
                {"type": "string", "examples": ["1s", "6m0s", "17ms"]},
            ),
        )
    },
    "X-Should-Retry": (
        "`false`: do not retry automatically.",
        {"type": "string", "enum": ["false"]},
    ),
    "WWW-Authenticate": ("How to authenticate.", {"type": "string", "enum": ["Bearer"]}),
}
INFERRING = (
    *("X-Penstock-Deadline-Ms", "X-Penstock-Queue-Limit-Ms", "Cache-Control", "Idempotency-Key"),
    *("X-Penstock-Lane", "Traceparent"),
)
"""Headers for requests that run a model."""
_INFERENCE_ERRORS = (400, 401, 404, 408, 409, 413, 422, 429, 499, 500, 503, 504)
NOT_OVER = "The prediction has not ended."
"""Description of the 409 from an endpoint that requires a finished prediction."""
_ALWAYS = ("X-Request-Id", "X-Penstock-Total-Ms")
OF_LIMITS = ("X-Penstock-Lane", *(name for name in _HEADERS if name.startswith("X-Ratelimit-")))
_OF_INFERENCE = (
    *OF_LIMITS,
    *("X-Penstock-Cache", "X-Penstock-Queue-Ms", "X-Penstock-Batch-Ms", "X-Penstock-Inference-Ms"),
    *("X-Penstock-Device-Ms", "X-Penstock-Cost-Usd", "X-Penstock-Revision"),
    "Idempotent-Replayed",
)
_OF_STATUS = {
    401: ("WWW-Authenticate",),
    408: ("X-Should-Retry",),
    409: ("Retry-After", "X-Should-Retry"),
    429: ("Retry-After", "Retry-After-Ms", "X-Should-Retry", *OF_LIMITS),
    500: ("X-Should-Retry",),
    503: ("Retry-After", "X-Should-Retry"),
    504: ("X-Should-Retry",),
}
_referenced: dict[str, Schema] = {}
"""The schemas referenced by endpoints, keyed by name."""


def ref_to(kind: Schema) -> Described:
    """Returns a reference to a body's schema, which is then included in the document."""
    name = kind.__name__
    assert _referenced.setdefault(name, kind) is kind, f"two schemas are named {name}"
    return {"$ref": SCHEMA_REF.format(name=name)}


def describe_components() -> Described:
    """Returns everything referenced by the endpoint descriptions."""
    bodies = [kind for kind in _referenced.values() if issubclass(kind, BaseModel)]
    structs = [kind for kind in _referenced.values() if issubclass(kind, msgspec.Struct)]
    template = SCHEMA_REF.replace("{name}", "{model}")
    _, described = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=template
    )
    _, components = msgspec.json.schema_components(structs, ref_template=SCHEMA_REF)
    headers = {
        name: {"description": text, "schema": schema} for name, (text, schema) in _HEADERS.items()
    }
    return {"schemas": {**described["$defs"], **components}, "headers": headers}


def header_parameters(names: Iterable[str]) -> list[Described]:
    """Returns request headers as parameters, in this order."""
    return [_parameter("header", name, *_REQUEST_HEADERS[name]) for name in names]


def query_parameter(
    name: str, description: str, schema: Described, *, required: bool = False
) -> Described:
    """Returns a query parameter that the endpoint parses itself."""
    return _parameter("query", name, description, schema, required=required)


def array_parameter(name: str, description: str) -> Described:
    """Returns an optional parameter that accepts multiple values."""
    values = {"type": "array", "items": {"type": "string"}, "maxItems": 100}
    return query_parameter(name, description, values)


def _parameter(
    place: str, name: str, description: str, schema: Described, *, required: bool = False
) -> Described:
    return {
        "name": name,
        "in": place,
        "required": required,
        "description": description,
        "schema": schema,
    }


def references(*names: str) -> Described:
    """Returns references to one response's headers, including the common ones."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in (*_ALWAYS, *names)}


def request_body(json: Schema | None, form: Schema | None) -> Described:
    """Returns a request body that is JSON, a form, or either."""
    kinds = {"multipart/form-data": form, "application/json": json}
    content = {kind: {"schema": ref_to(body)} for kind, body in kinds.items() if body is not None}
    return {"requestBody": {"required": True, "content": content}}


def success(text: str, reply: Schema, *headers: str) -> Described:
    """Returns a response with a JSON body."""
    content = {"application/json": {"schema": ref_to(reply)}}
    return {"description": text, "content": content, "headers": references(*headers)}


def any_object(text: str) -> Described:
    """Returns a response with a JSON object in one of several formats."""
    content = {"application/json": {"schema": {"type": "object"}}}
    return {"description": text, "content": content, "headers": references()}


def empty(text: str) -> Described:
    """Returns a response without a body."""
    return {"description": text, "headers": references()}


def binary(text: str, *media_types: str, headers: tuple[str, ...] = ()) -> Described:
    """Returns a response whose body is not JSON, with `headers` added to the common ones."""
    schema = {"type": "string", "format": "binary"}
    content = {media_type: {"schema": schema} for media_type in media_types}
    return {"description": text, "content": content, "headers": references(*headers)}


def event_stream(*kinds: str) -> Described:
    """Returns a response that is a stream of server-sent events, given the schema of one event."""
    properties = {
        "event": {"type": "string", "enum": list(kinds)},
        "id": {"type": "string"},
        "data": {"type": "string"},
    }
    event = {"type": "object", "required": list(properties), "properties": properties}
    content = {"text/event-stream": {"schema": event}}
    return {"description": "Server-sent events.", "content": content, "headers": references()}


def add_event_stream(answers: Responses) -> Responses:
    """Returns the responses for an endpoint that can also return an event stream.

    A stream's `Location` is the URL for rereading it.
    """
    properties = {name: {"type": "string"} for name in ("event", "id", "data")}
    event = {"type": "object", "required": ["data"], "properties": properties}
    content = answers[200]["content"] | {"text/event-stream": {"schema": event}}
    headers = answers[200]["headers"] | references("Location")
    return answers | {200: answers[200] | {"content": content, "headers": headers}}


def inference_responses(answers: Responses, error: Schema) -> Responses:
    """Returns an inference endpoint's responses, with errors in the `error` format."""
    responses = answers | errors_as(error, *_INFERENCE_ERRORS)
    responses[422]["description"] = "This `Idempotency-Key` was used for a different request."
    # Even if some of a request's items fail, the other items were still computed and are reported.
    computed = references(*_OF_INFERENCE)
    for status in (*answers, *_INFERENCE_ERRORS):
        headers = computed | responses[status]["headers"]
        responses[status] = responses[status] | {"headers": headers}
    return responses


def errors(*statuses: int) -> Responses:
    """Returns the error responses in OpenAI's format."""
    return errors_as(ErrorReply, *statuses)


def problems(*statuses: int) -> Responses:
    """Returns the error responses in Replicate's format."""
    return errors_as(Problem, *statuses)


def of_both_apis(*statuses: int) -> Responses:
    """Returns errors in OpenAI's format, or in Replicate's format for Replicate's clients."""
    documented = errors(*statuses)
    for status, in_other_shape in problems(*statuses).items():
        documented[status]["content"] |= in_other_shape["content"]
    return documented


def errors_as(error: Schema, *statuses: int) -> Responses:
    """Returns errors in the `error` format.

    A 401 also covers the other errors that a key can cause.
    """
    if 401 in statuses:
        statuses = (*statuses, 403, 503)
    media_type = "application/problem+json" if error is Problem else "application/json"
    return {
        status: {
            "description": _DESCRIPTIONS[status],
            "content": {media_type: {"schema": ref_to(error)}},
            "headers": references(*_OF_STATUS.get(status, ())),
        }
        for status in sorted({*statuses})
    }
