"""The request and response headers that the OpenAPI document describes."""

from __future__ import annotations

from typing import Any

from api.http.request_options import LONGEST_KEY, LONGEST_MS

Described = dict[str, Any]
TRUNCATED_HEADER = "x-penstock-truncated-tokens"


def _parameter(name: str, description: str, schema: Described) -> Described:
    return {
        "name": name,
        "in": "header",
        "required": False,
        "description": description,
        "schema": schema,
    }


_MILLISECONDS = {"type": "integer", "minimum": 1, "maximum": LONGEST_MS}
_DEADLINE = _parameter(
    "X-Penstock-Deadline-Ms",
    "Milliseconds from receipt to the answer. Later it is 504. "
    "A longer one is cut to the model's longest deadline.",
    _MILLISECONDS,
)
_QUEUE_LIMIT = _parameter(
    "X-Penstock-Queue-Limit-Ms",
    "Milliseconds from receipt after which the model no longer starts on the request, "
    "even if its deadline is later.",
    _MILLISECONDS,
)
_CACHE_CONTROL = _parameter(
    "Cache-Control",
    "`no-cache`: compute again. `no-store`: also do not cache the result.",
    {"type": "string"},
)
_KEY = _parameter(
    "Idempotency-Key",
    "The same request with the same key is computed once. "
    "Its answer is repeated for a day, or until newer answers need its place.",
    {"type": "string", "pattern": rf"^[\x21-\x7e]{{1,{LONGEST_KEY}}}$"},
)
_LANE = _parameter(
    "X-Penstock-Lane",
    "`batch`: the request may wait behind interactive ones.",
    {"type": "string", "enum": ["interactive", "batch"], "default": "interactive"},
)
_PREFER = _parameter(
    "Prefer",
    "`wait` or `wait=n`: answer when the prediction ends, or after n seconds (at most 60).",
    {"type": "string", "examples": ["wait=5"]},
)
_CANCEL_AFTER = _parameter(
    "Cancel-After",
    "Time from receipt after which the prediction is stopped.",
    {"type": "string", "examples": ["30s", "5m", "1h30m"]},
)
_TRACEPARENT = _parameter(
    "Traceparent",
    "The trace that the request belongs to (W3C Trace Context). An invalid one is ignored.",
    {"type": "string", "examples": ["00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]},
)
INFERRING = [_DEADLINE, _QUEUE_LIMIT, _CACHE_CONTROL, _KEY, _LANE, _TRACEPARENT]
PREDICTING = [*INFERRING, _PREFER, _CANCEL_AFTER]
LAST_EVENT_ID = _parameter(
    "Last-Event-ID", "Only events after this one are sent.", {"type": "string"}
)


def _of_answers(description: str, schema: Described) -> Described:
    return {"description": description, "schema": schema}


_AMOUNT = {"type": "number", "minimum": 0}
_COUNT = {"type": "integer", "minimum": 0}
_SECONDS = {"type": "integer", "minimum": 0}
ANSWERED: dict[str, Described] = {
    "Accept-Ranges": _of_answers("The unit of ranges.", {"type": "string", "enum": ["bytes"]}),
    "Content-Range": _of_answers("Which bytes these are, of how many.", {"type": "string"}),
    "X-Request-Id": _of_answers("The id that you sent, or else one of ours.", {"type": "string"}),
    "X-Penstock-Total-Ms": _of_answers("Milliseconds from receipt to the answer.", _AMOUNT),
    "X-Penstock-Cache": _of_answers(
        "Where the results came from.",
        {"type": "string", "enum": ["hit", "miss", "partial", "joined"]},
    ),
    "X-Penstock-Queue-Ms": _of_answers("Milliseconds spent waiting for a worker.", _AMOUNT),
    "X-Penstock-Batch-Ms": _of_answers(
        "Milliseconds spent waiting for the batch to start.", _AMOUNT
    ),
    "X-Penstock-Inference-Ms": _of_answers("Milliseconds spent in the model.", _AMOUNT),
    "X-Penstock-Device-Ms": _of_answers(
        "Milliseconds of a whole device that the model took for this request, its part of batches.",
        _AMOUNT,
    ),
    "X-Penstock-Cost-Usd": _of_answers(
        "What the request is charged, in US dollars. 0 for an answer that is repeated.", _AMOUNT
    ),
    "X-Penstock-Revision": _of_answers(
        "The revision of the model that computed the results. Several, comma-separated, if a new "
        "revision that is being tried computed a part of them.",
        {"type": "string"},
    ),
    "X-Penstock-Lane": _of_answers(
        "`batch` where the plan of the caller has no higher priority.",
        {"type": "string", "enum": ["batch"]},
    ),
    "X-Penstock-Truncated-Tokens": _of_answers(
        "How many tokens were cut: of all texts where the request has `truncate`, "
        "of the prompts where it is an image.",
        {"type": "integer", "minimum": 0},
    ),
    "X-Penstock-Seed": _of_answers("The seeds of the images, comma-separated.", {"type": "string"}),
    "Idempotent-Replayed": _of_answers(
        "Present if this answer was given before.", {"type": "string", "enum": ["true"]}
    ),
    "Location": _of_answers("The URL of the prediction.", {"type": "string", "format": "uri"}),
    "Retry-After": _of_answers("Seconds after which to try again.", _SECONDS),
    "Retry-After-Ms": _of_answers(
        "The same in milliseconds, which OpenAI's clients prefer.", _SECONDS
    ),
    "Age": _of_answers("Seconds for which the figures are known.", _SECONDS),
    **{
        f"X-Ratelimit-{kind}-{unit}": _of_answers(
            words.format(unit=unit.lower()) + " Only where your plan has such a limit.", schema
        )
        for unit in ("Requests", "Tokens", "Pixel-Steps")
        for kind, words, schema in (
            ("Limit", "The {unit} that you may use in any minute.", _COUNT),
            ("Remaining", "What is left of the {unit} in this minute.", _COUNT),
            (
                "Reset",
                "Until none of the {unit} count as used any more.",
                {"type": "string", "examples": ["1s", "6m0s", "17ms"]},
            ),
        )
    },
    "X-Should-Retry": _of_answers(
        "`false`: do not retry on your own.", {"type": "string", "enum": ["false"]}
    ),
    "WWW-Authenticate": _of_answers("How to authenticate.", {"type": "string", "enum": ["Bearer"]}),
}
ALWAYS = ("X-Request-Id", "X-Penstock-Total-Ms")
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
    503: ("Retry-After",),
    504: ("X-Should-Retry",),
}


def references(*names: str) -> Described:
    """The headers of one answer, those that every answer has among them."""
    return {name: {"$ref": f"#/components/headers/{name}"} for name in (*ALWAYS, *names)}
