"""Parts of the OpenAPI document: headers, usage parameters, request bodies and responses.

Routes that read and write bodies themselves are described here. Each route lists its responses in
the `responses` of its decorator: `responses` for OpenAI's format, `problems` for Replicate's, with
the possible statuses. A new status in api/errors.py needs a description in _DESCRIPTIONS and an
entry at every route that can return it. Parameters of usage queries are read by
api/usage/question.py, so that we control the wording of errors.
"""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel

from api.errors import ErrorReply
from api.http.request_options import MAX_KEY_CHARS, MAX_MS
from api.problem_details import Problem
from api.usage.question import COST_GROUPS, COST_LIMITS, GROUPS, LIMITS, WIDTHS_S

TRUNCATED_HEADER = "x-penstock-truncated-tokens"

_MILLISECONDS = {"type": "integer", "minimum": 1, "maximum": MAX_MS}

_AMOUNT = {"type": "number", "minimum": 0}
_COUNT = {"type": "integer", "minimum": 0}
_SECONDS = {"type": "integer", "minimum": 0}

ALWAYS = ("X-Request-Id", "X-Penstock-Total-Ms")

_MOMENT: Described = {"type": "integer", "minimum": 0}

_DAY_OR_SECONDS: Described = {"type": "string", "examples": ["2026-11-01", "1793491200"]}

_MOMENT_TEXT: Described = {"type": "string", "examples": ["2026-11-01", "2026-11-01T12:00:00Z"]}

Described = dict[str, Any]
Responses = dict[int | str, Described]

AUTHENTICATED: Described = {"security": [{"key": []}, {"header": []}]}
"""Security for every route that requires an API key."""
AUTHENTICATED_OR_LINKED: Described = {"security": [*AUTHENTICATED["security"], {}]}
"""Security for every route that requires an API key or a signed link."""
INFERENCE_ERRORS = (400, 401, 404, 408, 409, 413, 422, 429, 499, 500, 503, 504)
SCHEMA_REF = "#/components/schemas/{name}"
_DESCRIPTIONS = {
    400: "The request is invalid; the message names the field.",
    401: "The API key is missing or invalid.",
    403: "The API key does not permit this request, or the signed link is invalid.",
    404: "The model, path or resource does not exist.",
    408: "The body arrives too slowly.",
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


def _header_parameter(name: str, description: str, schema: Described) -> Described:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": schema,
    }


_DEADLINE = _header_parameter(
    "X-Penstock-Deadline-Ms",
    "Maximum milliseconds from receipt to the answer. After that, the response is a 504. Values "
    "above the model's maximum deadline are lowered to it.",
    _MILLISECONDS,
)
_QUEUE_LIMIT = _header_parameter(
    "X-Penstock-Queue-Limit-Ms",
    "Milliseconds from receipt after which the model no longer starts on the request, even if "
    "its deadline is later.",
    _MILLISECONDS,
)
_CACHE_CONTROL = _header_parameter(
    "Cache-Control",
    "`no-cache`: compute again. `no-store`: compute again, and do not cache the result.",
    {"type": "string"},
)
_KEY = _header_parameter(
    "Idempotency-Key",
    "The same request with the same key is computed once. Its answer is repeated for a day, or "
    "until newer answers displace it.",
    {"type": "string", "pattern": rf"^[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}$"},
)
_PRIORITY = _header_parameter(
    "X-Penstock-Lane",
    "`batch`: the request may wait for interactive requests.",
    {"type": "string", "enum": ["interactive", "batch"], "default": "interactive"},
)
_PREFER = _header_parameter(
    "Prefer",
    "`wait` or `wait=n`: answer when the prediction ends, or after n seconds (at most 60).",
    {"type": "string", "examples": ["wait=5"]},
)
_CANCEL_AFTER = _header_parameter(
    "Cancel-After",
    "Time from receipt after which the prediction is stopped.",
    {"type": "string", "examples": ["30s", "5m", "1h30m"]},
)
_TRACEPARENT = _header_parameter(
    "Traceparent",
    "The trace that the request belongs to (W3C Trace Context). Invalid values are ignored.",
    {"type": "string", "examples": ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]},
)
INFERRING = [_DEADLINE, _QUEUE_LIMIT, _CACHE_CONTROL, _KEY, _PRIORITY, _TRACEPARENT]
PREDICTING = [*INFERRING, _PREFER, _CANCEL_AFTER]
EVENT_IDS = _header_parameter(
    "X-Penstock-Event-Ids",
    "`true`: each event of a stream has an ID. Default: only with an `Idempotency-Key`.",
    {"type": "string", "enum": ["true", "false"]},
)
LAST_EVENT_ID = _header_parameter(
    "Last-Event-ID", "Sends only events after this one.", {"type": "string"}
)


def _of_answers(description: str, schema: Described) -> Described:
    return {"description": description, "schema": schema}


ANSWERED: dict[str, Described] = {
    "Accept-Ranges": _of_answers("The unit of ranges.", {"type": "string", "enum": ["bytes"]}),
    "Content-Range": _of_answers(
        "The range of bytes in this response, and the total size.", {"type": "string"}
    ),
    "X-Request-Id": _of_answers(
        "The ID that you sent, or else a generated one.", {"type": "string"}
    ),
    "X-Penstock-Total-Ms": _of_answers("Milliseconds from receipt to the answer.", _AMOUNT),
    "X-Penstock-Cache": _of_answers(
        "Origin of the results.",
        {"type": "string", "enum": ["hit", "miss", "partial", "joined"]},
    ),
    "X-Penstock-Queue-Ms": _of_answers("Milliseconds spent waiting for a worker.", _AMOUNT),
    "X-Penstock-Batch-Ms": _of_answers(
        "Milliseconds spent waiting for the batch to start.", _AMOUNT
    ),
    "X-Penstock-Inference-Ms": _of_answers("Milliseconds spent in the model.", _AMOUNT),
    "X-Penstock-Device-Ms": _of_answers(
        "Device milliseconds that the model used for this request, including its part of "
        "shared batches.",
        _AMOUNT,
    ),
    "X-Penstock-Cost-Usd": _of_answers(
        "Charge for the request in US dollars. 0 for a repeated answer.", _AMOUNT
    ),
    "X-Penstock-Revision": _of_answers(
        "The revision of the model that computed the results. Comma-separated if a new revision "
        "under test computed some of them.",
        {"type": "string"},
    ),
    "X-Penstock-Lane": _of_answers(
        "`batch` if the caller's plan does not include a higher priority.",
        {"type": "string", "enum": ["batch"]},
    ),
    "X-Penstock-Truncated-Tokens": _of_answers(
        "Number of tokens that were cut: from all texts if the request has `truncate`, from the "
        "prompts for images.",
        {"type": "integer", "minimum": 0},
    ),
    "X-Penstock-Seed": _of_answers("The seeds of the images, comma-separated.", {"type": "string"}),
    "X-Penstock-Withheld": _of_answers(
        "Number of images withheld by the model's safety check. They are not in `data`.",
        {"type": "integer", "minimum": 1},
    ),
    "Idempotent-Replayed": _of_answers(
        "Present if this is a repeated answer.", {"type": "string", "enum": ["true"]}
    ),
    "Location": _of_answers(
        "URL of the prediction.", {"type": "string", "format": "uri-reference"}
    ),
    "Retry-After": _of_answers("Seconds to wait before trying again.", _SECONDS),
    "Retry-After-Ms": _of_answers(
        "The same in milliseconds, which OpenAI's clients prefer.", _SECONDS
    ),
    "Age": _of_answers("Age of the figures in seconds.", _SECONDS),
    **{
        f"X-Ratelimit-{kind}-{unit}": _of_answers(
            words.format(unit=unit.lower()) + " Only if your plan has such a limit.", schema
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
    "X-Should-Retry": _of_answers(
        "`false`: do not retry automatically.", {"type": "string", "enum": ["false"]}
    ),
    "WWW-Authenticate": _of_answers("How to authenticate.", {"type": "string", "enum": ["Bearer"]}),
}
OF_LIMITS = (
    "X-Penstock-Lane",
    *(name for name in ANSWERED if name.startswith("X-Ratelimit-")),
)
OF_INFERENCE = (
    *OF_LIMITS,
    *("X-Penstock-Cache", "X-Penstock-Queue-Ms", "X-Penstock-Batch-Ms", "X-Penstock-Inference-Ms"),
    *("X-Penstock-Device-Ms", "X-Penstock-Cost-Usd", "X-Penstock-Revision"),
    "Idempotent-Replayed",
)
OF_STATUS = {
    401: ("WWW-Authenticate",),
    408: ("X-Should-Retry",),
    409: ("Retry-After", "X-Should-Retry"),
    429: ("Retry-After", "Retry-After-Ms", "X-Should-Retry", *OF_LIMITS),
    500: ("X-Should-Retry",),
    503: ("Retry-After", "X-Should-Retry"),
    504: ("X-Should-Retry",),
}


def references(*names: str) -> Described:
    """Returns references to the headers of one answer, including the common ones."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in (*ALWAYS, *names)}


def _parameter(
    name: str, description: str, schema: Described, *, required: bool = False
) -> Described:
    return {
        "name": name,
        "in": "query",
        "required": required,
        "description": description,
        "schema": schema,
    }


def _names(name: str, description: str) -> Described:
    return _parameter(
        name, description, {"type": "array", "items": {"type": "string"}, "maxItems": 100}
    )


def _of_pages(groups: dict[str, str], most: int, models: str) -> list[Described]:
    return [
        _parameter("start_time", "Unix seconds, inclusive.", _MOMENT, required=True),
        _parameter("end_time", "Unix seconds, exclusive. Default: now.", _MOMENT),
        _parameter("bucket_width", "Bucket width.", {"enum": list(WIDTHS_S), "default": "1d"}),
        _parameter(
            "group_by",
            "Also accepted as `group_by[]`, which OpenAI's clients send.",
            {"type": "array", "items": {"enum": list(groups)}},
        ),
        _parameter(
            "limit",
            "Buckets per page. The default and the maximum depend on the width.",
            {"type": "integer", "minimum": 1, "maximum": most},
        ),
        _parameter("page", "`next_page` of the previous answer.", {"type": "string"}),
        _names("project_ids", "Only these tenants."),
        _names("api_key_ids", "Only these keys."),
        _names(models, "Only these models."),
    ]


OF_USAGE = _of_pages(GROUPS, max(most for _, most in LIMITS.values()), "models")
OF_COSTS = _of_pages(COST_GROUPS, max(most for _, most in COST_LIMITS.values()), "line_items")
SUMMARY = [
    _parameter("from", "Unix seconds or a UTC date, inclusive.", _DAY_OR_SECONDS),
    _parameter("to", "Unix seconds or a UTC date, exclusive. Default: now.", _DAY_OR_SECONDS),
]
OF_REPORTS = [
    _parameter("from", "A date in the time zone, or a time. Inclusive.", _MOMENT_TEXT),
    _parameter("to", "A date in the time zone, or a time. Exclusive. Default: now.", _MOMENT_TEXT),
    _parameter("tz", "Time zone of the dates.", {"type": "string", "default": "UTC"}),
    _names("tenant", "Only these tenants. Only for keys with the `admin` scope."),
    _names("model", "Only these models."),
]


def inference_body(
    json: type[BaseModel] | None = None, form: type[BaseModel] | None = None
) -> Described:
    """Returns the request of an inference route: headers, and a JSON body, a form or both."""
    return _request_body(INFERRING, json, form)


def generation_body(json: type[BaseModel]) -> Described:
    """Returns the request of a route that streams chats or completions."""
    return _request_body([*INFERRING, EVENT_IDS, LAST_EVENT_ID], json)


def prediction_body(json: type[BaseModel]) -> Described:
    """Returns the request of a route that creates predictions: a JSON body and headers."""
    return _request_body(PREDICTING, json)


def json_body(json: type[BaseModel]) -> Described:
    """Returns the request of a route with a JSON body and without special headers."""
    return _request_body([], json)


def form_body(form: type[BaseModel], headers: list[Described]) -> Described:
    """Returns the request of a route that accepts a form, with its headers."""
    content = {"multipart/form-data": {"schema": ref_to(form)}}
    body = {"requestBody": {"required": True, "content": content}, "parameters": headers}
    return body | AUTHENTICATED


def _request_body(
    headers: list[Described],
    json: type[BaseModel] | None = None,
    form: type[BaseModel] | None = None,
) -> Described:
    kinds = {"multipart/form-data": form, "application/json": json}
    content = {kind: {"schema": ref_to(body)} for kind, body in kinds.items() if body is not None}
    return {
        "requestBody": {"required": True, "content": content},
        "parameters": headers,
    } | AUTHENTICATED


def responses(
    reply: type[msgspec.Struct],
    *statuses: int,
    headers: tuple[str, ...] = (),
    error: type[msgspec.Struct] = ErrorReply,
) -> Responses:
    """Returns a route's responses: 200 with `reply`, `headers`, and errors with `error`."""
    documented = _errors(statuses, error, "application/json")
    return {200: success("The result.", reply, *headers)} | documented


def errors(*statuses: int) -> Responses:
    """Returns the errors of a route in OpenAI's format."""
    return _errors(statuses, ErrorReply, "application/json")


def inference_responses(
    reply: type[msgspec.Struct], *headers: str, error: type[msgspec.Struct] = ErrorReply
) -> Responses:
    """Returns the responses of an inference route, with errors in the format `error`."""
    answers = responses(reply, *INFERENCE_ERRORS, headers=(*OF_INFERENCE, *headers), error=error)
    answers[422]["description"] = "This `Idempotency-Key` was used with another request."
    # If some items of a request fail, the others were computed and are still reported.
    computed = references(*OF_INFERENCE)
    for status in INFERENCE_ERRORS:
        answers[status]["headers"] = computed | answers[status]["headers"]
    return answers


def problems(*statuses: int) -> Responses:
    """Returns the errors of a route in Replicate's format."""
    return _errors(statuses, Problem, "application/problem+json")


def of_both_apis(*statuses: int) -> Responses:
    """Returns errors in OpenAI's format, or in Replicate's for its clients."""
    documented = errors(*statuses)
    for status, in_other_shape in problems(*statuses).items():
        documented[status]["content"] |= in_other_shape["content"]
    return documented


def success(text: str, reply: type[msgspec.Struct], *headers: str) -> Described:
    """Returns a response with a JSON body."""
    content = {"application/json": {"schema": ref_to(reply)}}
    return {
        "description": text,
        "content": content,
        "headers": references(*headers),
    }


def any_object(text: str) -> Described:
    """Returns a response with a JSON object that has one of many formats."""
    content = {"application/json": {"schema": {"type": "object"}}}
    return {"description": text, "content": content, "headers": references()}


def event_stream(*kinds: str) -> Described:
    """Returns a response that is a stream of server-sent events, with the schema of one event."""
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
        "headers": references(),
    }


def streamed(answers: Responses) -> Responses:
    """Returns the responses of a route that also answers with an event stream on request.

    The `Location` of a stream is the URL for reading it again.
    """
    properties = {name: {"type": "string"} for name in ("event", "id", "data")}
    event = {"type": "object", "required": ["data"], "properties": properties}
    content = answers[200]["content"] | {"text/event-stream": {"schema": event}}
    headers = answers[200]["headers"] | references("Location")
    return answers | {200: answers[200] | {"content": content, "headers": headers}}


def empty(text: str) -> Described:
    """Returns a response without a body."""
    return {"description": text, "headers": references()}


def not_over() -> Responses:
    """Returns the error of a route that requires a prediction to have ended."""
    documented = problems(409)
    documented[409]["description"] = "The prediction has not ended."
    return documented


def binary(text: str, *media_types: str, headers: tuple[str, ...] = ()) -> Described:
    """Returns a response whose body is not JSON, with `headers` added to the common ones."""
    schema = {"type": "string", "format": "binary"}
    content = {media_type: {"schema": schema} for media_type in media_types}
    described = references(*headers)
    return {"description": text, "content": content, "headers": described}


def ref_to(body: type[BaseModel] | type[msgspec.Struct]) -> dict[str, str]:
    """Returns a reference to the schema of a body."""
    return {"$ref": SCHEMA_REF.format(name=body.__name__)}


def _errors(statuses: tuple[int, ...], reply: type[msgspec.Struct], media_type: str) -> Responses:
    if 401 in statuses:  # an API key is checked
        statuses = tuple(sorted({*statuses, 403, 503}))
    return {
        status: {
            "description": _DESCRIPTIONS[status],
            "content": {media_type: {"schema": ref_to(reply)}},
            "headers": references(*OF_STATUS.get(status, ())),
        }
        for status in statuses
    }
