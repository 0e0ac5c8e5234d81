"""The headers that the OpenAPI document describes: those that requests may have, and those that answers have."""

from __future__ import annotations

from typing import Any

from api.request_options import LONGEST_KEY, LONGEST_MS

Described = dict[str, Any]


def _parameter(name: str, description: str, schema: Described) -> Described:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": schema}


_MILLISECONDS = {"type": "integer", "minimum": 1, "maximum": LONGEST_MS}
_DEADLINE = _parameter(
    "X-Penstock-Deadline-Ms",
    "Milliseconds until the answer is of no use; at most the model's longest, which also is the bound.",
    _MILLISECONDS,
)
_QUEUE_LIMIT = _parameter(
    "X-Penstock-Queue-Limit-Ms",
    "Milliseconds after which the request is not begun any more, even if the deadline is later.",
    _MILLISECONDS,
)
_CACHE_CONTROL = _parameter(
    "Cache-Control", "`no-cache`: compute anew; `no-store`: also keep nothing.", {"type": "string"}
)
_KEY = _parameter(
    "Idempotency-Key",
    "The same request under the same key is computed once; its answer is given again for a day.",
    {"type": "string", "pattern": rf"^[\x21-\x7e]{{1,{LONGEST_KEY}}}$"},
)
_LANE = _parameter(
    "X-Penstock-Lane",
    "`batch`: may wait behind interactive requests.",
    {"type": "string", "enum": ["interactive", "batch"], "default": "interactive"},
)
_PREFER = _parameter(
    "Prefer",
    "`wait` or `wait=n`: answer when the prediction is over, after n seconds at the latest (60 at most).",
    {"type": "string", "examples": ["wait=5"]},
)
_CANCEL_AFTER = _parameter(
    "Cancel-After",
    "A time after which it is not worked on any more.",
    {"type": "string", "examples": ["30s", "5m", "1h30m"]},
)
INFERRING = [_DEADLINE, _QUEUE_LIMIT, _CACHE_CONTROL, _KEY, _LANE]
PREDICTING = [*INFERRING, _PREFER, _CANCEL_AFTER]
LAST_EVENT_ID = _parameter("Last-Event-ID", "Events after this one are sent.", {"type": "string"})


def _of_answers(description: str, schema: Described) -> Described:
    return {"description": description, "schema": schema}


_AMOUNT = {"type": "number", "minimum": 0}
_SECONDS = {"type": "integer", "minimum": 0}
ANSWERED: dict[str, Described] = {
    "X-Request-Id": _of_answers("Yours, where you sent one, else ours.", {"type": "string"}),
    "X-Penstock-Total-Ms": _of_answers("From the first byte read to the answer.", _AMOUNT),
    "X-Penstock-Cache": _of_answers(
        "Where the results came from.", {"type": "string", "enum": ["hit", "miss", "partial", "joined"]}
    ),
    "X-Penstock-Queue-Ms": _of_answers("Waited for a worker.", _AMOUNT),
    "X-Penstock-Batch-Ms": _of_answers("Waited for the batch.", _AMOUNT),
    "X-Penstock-Inference-Ms": _of_answers("Computed.", _AMOUNT),
    "X-Penstock-Truncated-Tokens": _of_answers(
        "Where the request has `truncate`: how many tokens of its texts were left out.",
        {"type": "integer", "minimum": 0},
    ),
    "X-Penstock-Seed": _of_answers("The seeds of the images, comma-separated.", {"type": "string"}),
    "Idempotent-Replayed": _of_answers(
        "There, where the answer was given before.", {"type": "string", "enum": ["true"]}
    ),
    "Location": _of_answers("The prediction.", {"type": "string", "format": "uri"}),
    "Retry-After": _of_answers("Seconds after which to come back.", _SECONDS),
    "X-Should-Retry": _of_answers("Whether the same request may do better.", {"type": "string", "enum": ["false"]}),
    "WWW-Authenticate": _of_answers("How to say who you are.", {"type": "string", "enum": ["Bearer"]}),
}
ALWAYS = ("X-Request-Id", "X-Penstock-Total-Ms")
OF_INFERENCE = (
    *("X-Penstock-Cache", "X-Penstock-Queue-Ms", "X-Penstock-Batch-Ms", "X-Penstock-Inference-Ms"),
    "Idempotent-Replayed",
)
OF_STATUS = {
    401: ("WWW-Authenticate",),
    408: ("X-Should-Retry",),
    409: ("Retry-After",),
    429: ("Retry-After",),
    500: ("X-Should-Retry",),
    503: ("Retry-After",),
    504: ("X-Should-Retry",),
}


def references(*names: str) -> Described:
    """The headers of one answer, those that every answer has among them."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in (*ALWAYS, *names)}
