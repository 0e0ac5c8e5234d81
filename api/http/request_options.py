"""Parses request headers into RequestOptions, and reads two facts about the request.

No other code reads these headers.

Accepted values are within the job decoder's limits, so workers can read every published job. All
other values are rejected with an error that names the header. Invalid values of Cache-Control and
Prefer are ignored, as their specifications require.

The kind of client is derived from its `User-Agent`. Rows contain the kind, never the header. The
set of kinds is fixed, so reports can group by kind and callers can't write arbitrary text into the
table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from api.dispatch.request import RequestOptions
from shared.errors import BadInput
from shared.messages import RequestFacts
from shared.models.entry import MAX_DEADLINE_S
from shared.tenants.plan import PRIORITIES

MAX_READ = 256
OTHER = "other"
_FAMILIES = (
    ("langchain", "langchain"),
    ("litellm", "litellm"),
    ("llama-index", "llama-index"),
    ("llama_index", "llama-index"),
    ("ai-sdk/", "ai-sdk"),
    ("openai/python", "openai-python"),
    ("openai/js", "openai-node"),
    ("openai/", "openai-other"),
    ("replicate-", "replicate"),
    ("curl/", "curl"),
    ("wget/", "wget"),
    ("python-requests/", "python-requests"),
    ("python-httpx/", "python-httpx"),
    ("aiohttp/", "python-aiohttp"),
    ("python-urllib", "python-urllib"),
    ("go-http-client/", "go"),
    ("axios/", "node"),
    ("undici", "node"),
    ("node-fetch", "node"),
    ("okhttp/", "java"),
    ("apache-httpclient/", "java"),
    ("java/", "java"),
    ("java-http-client/", "java"),
    ("postmanruntime/", "postman"),
    ("mozilla/", "browser"),
)
"""Lowercase substrings to look for in the header.

The first match wins: wrappers come before the libraries they wrap, and browsers come last because
many clients claim to be one.
"""
FAMILIES = frozenset({family for _, family in _FAMILIES} | {OTHER})

DEADLINE_HEADER = "x-penstock-deadline-ms"
QUEUE_HEADER = "x-penstock-queue-limit-ms"
PRIORITY_HEADER = "x-penstock-lane"
EVENT_IDS_HEADER = "x-penstock-event-ids"
CANCEL_AFTER_HEADER = "cancel-after"
IDEMPOTENCY_HEADER = "idempotency-key"
MAX_MS = MAX_DEADLINE_S * 1000
MAX_KEY_CHARS = 255
MAX_WAIT_S = 60.0
_SHOWN = 40
"""Maximum number of characters to repeat from an invalid value in an error message."""
_MS = re.compile(r"[0-9]{1,12}")
_CANCEL_AFTER = re.compile(r"(?=[0-9])(?:([0-9]{1,3})h)?(?:([0-9]{1,5})m)?(?:([0-9]{1,6})s?)?")
_WAIT = re.compile(r"wait(?:\s*=\s*\"?([0-9]+)\"?)?(?:\s*;.*)?", re.IGNORECASE)
_KEY = re.compile(rf"[\x21-\x7e]{{1,{MAX_KEY_CHARS}}}")


@lru_cache(maxsize=512)
def family_of(user_agent: str) -> str:
    """Returns the kind of client: empty if there is no header, `other` if unknown."""
    agent = user_agent[:MAX_READ].strip().lower()
    if not agent:
        return ""
    if agent == "node":  # sent by Node's fetch
        return "node"
    return next((family for part, family in _FAMILIES if part in agent), OTHER)


def wants_event_ids(headers: Mapping[str, str]) -> bool:
    """Returns whether the stream's events have IDs.

    OpenAI's events have no IDs, and some readers only understand `data:`.
    """
    value = headers.get(EVENT_IDS_HEADER, "").strip().lower()
    return value == "true" or (not value and IDEMPOTENCY_HEADER in headers)


def read_options(headers: Iterable[tuple[bytes, bytes]], facts: RequestFacts) -> RequestOptions:
    """Parses a request's options. Adds the priority and the kind of client to the request's facts.

    Args:
        headers: raw headers, with lowercase names.
        facts: the request's facts, changed only if all headers are valid.

    Raises:
        BadInput: a value is invalid or was sent more than once. `field` names the header.
    """
    values: dict[bytes, str] = {}
    for name, value in headers:
        if name in _READERS:
            text = value.decode("latin-1").strip(" \t")
            values[name] = _join_headers(name, values[name], text) if name in values else text
    options: dict[str, Any] = {}
    for name, text in values.items():
        options |= _READERS[name](text)
    facts.priority = options.pop("priority", "interactive")
    facts.user_agent_family = options.pop("user_agent_family", "")
    return RequestOptions(**options)


def _join_headers(name: bytes, first: str, second: str) -> str:
    """Joins headers with the same name if they are lists.

    Other option headers may be sent only once.
    """
    if name == b"user-agent":
        return first
    if name in (b"cache-control", b"prefer"):
        return f"{first}, {second}"
    raise BadInput(f"{name.decode()}: must be sent only once", field=name.decode())


def _milliseconds(header: str, option: str) -> Callable[[str], dict[str, Any]]:
    def read(text: str) -> dict[str, Any]:
        if not (_MS.fullmatch(text) and 1 <= int(text) <= MAX_MS):
            raise _refusal(header, text, f"a whole number of milliseconds from 1 to {MAX_MS}")
        return {option: int(text) / 1000}

    return read


def _cancel_after(text: str) -> dict[str, Any]:
    match = _CANCEL_AFTER.fullmatch(text)
    hours, minutes, seconds = (int(part or 0) for part in match.groups()) if match else (0, 0, 0)
    asked_s = (hours * 60 + minutes) * 60 + seconds
    if not 1 <= asked_s <= MAX_DEADLINE_S:
        reason = f"a time such as 30s, 5m or 1h30m, from 1s to {MAX_DEADLINE_S // 3600}h"
        raise _refusal(CANCEL_AFTER_HEADER, text, reason)
    return {"cancel_after_s": float(asked_s)}


def _priority(text: str) -> dict[str, Any]:
    if text.lower() not in PRIORITIES:
        raise _refusal(PRIORITY_HEADER, text, "interactive or batch")
    return {"priority": text.lower()}


def _event_ids(text: str) -> dict[str, Any]:
    if text.strip().lower() not in ("true", "false"):
        raise _refusal(EVENT_IDS_HEADER, text, "true or false")
    return {}


def _idempotency_key(text: str) -> dict[str, Any]:
    if not _KEY.fullmatch(text):
        raise _refusal(IDEMPOTENCY_HEADER, text, f"1 to {MAX_KEY_CHARS} visible ASCII characters")
    return {"idempotency_key": text}


def _cache_control(text: str) -> dict[str, Any]:
    controls = {part.strip().lower() for part in text.split(",")}
    return {
        "cache_read": not controls & {"no-cache", "no-store"},
        "cache_write": "no-store" not in controls,
    }


def _prefer(text: str) -> dict[str, Any]:
    """Parses `Prefer` (RFC 7240). The first value counts. Unknown preferences are ignored."""
    for match in filter(None, (_WAIT.fullmatch(part.strip()) for part in text.split(","))):
        seconds = match[1]
        # Checks the number of digits before parsing, because callers may send any number of them.
        return {
            "wait_s": MAX_WAIT_S
            if seconds is None or len(seconds) > 4
            else min(float(seconds), MAX_WAIT_S)
        }
    return {}


def _user_agent(text: str) -> dict[str, Any]:
    return {"user_agent_family": family_of(text)}


def _refusal(header: str, text: str, wanted: str) -> BadInput:
    excerpt = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return BadInput(f"{header}: {excerpt!r} is not {wanted}", field=header)


_READERS = {
    DEADLINE_HEADER.encode(): _milliseconds(DEADLINE_HEADER, "deadline_s"),
    QUEUE_HEADER.encode(): _milliseconds(QUEUE_HEADER, "queue_limit_s"),
    CANCEL_AFTER_HEADER.encode(): _cancel_after,
    PRIORITY_HEADER.encode(): _priority,
    EVENT_IDS_HEADER.encode(): _event_ids,
    IDEMPOTENCY_HEADER.encode(): _idempotency_key,
    b"cache-control": _cache_control,
    b"prefer": _prefer,
    b"user-agent": _user_agent,
}
