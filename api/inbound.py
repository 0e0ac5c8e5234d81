"""From an HTTP request to what the dispatcher takes: key, body, deadline, and what the caller says about the cache."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from api.context import context_of, while_connected
from api.inference import Answer, InferenceRequest
from api.parts import parts_of
from shared.catalogue import Model
from shared.errors import BadInput
from shared.messages import Input

DEADLINE_HEADER = "x-penstock-deadline-ms"
QUEUE_HEADER = "x-penstock-queue-limit-ms"
LANE_HEADER = "x-penstock-lane"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
B = TypeVar("B", bound=BaseModel)


def tenant_of(request: Request) -> str:
    """Who asks; to be called before the body is read.

    Raises:
        Unauthorized: a key is needed, and none or a wrong one was sent.
    """
    return parts_of(request).tenants.tenant_of(request.headers.get("authorization"))


async def read_json(request: Request, kind: type[B]) -> B:
    """The body as `kind`; numbers in quotes and the like are refused.

    Raises:
        ValidationError: it is not JSON, or not such a body.
        BodyTooLarge: it is larger than the API takes.
    """
    return kind.model_validate_json(await request.body(), strict=True)


async def infer(
    request: Request, model: Model, tenant: str, inputs: Sequence[Input], *, is_repeatable: bool = True
) -> Answer:
    """Has `inputs` computed for this HTTP request and tells its context how it went.

    Raises:
        PenstockError: an item has no result, or the request could not be taken on.
        ClientGone: the caller hung up.
    """
    context = context_of(request)
    context.model = model.name
    controls = cache_controls(request)
    wanted = InferenceRequest(
        request_id=context.request_id,
        client_request_id=context.client_request_id,
        model=model,
        tenant=tenant,
        inputs=inputs,
        received_at_s=context.received_at_s,
        deadline_s=context.received_at_s + _deadline_s(request, model),
        is_repeatable=is_repeatable,
        cache_read=not controls & {"no-cache", "no-store"},
        cache_write="no-store" not in controls,
        traceparent=traceparent_of(request),
        lane=lane_of(request),
        start_by_s=start_by_s(request),
    )
    answer = await while_connected(request, parts_of(request).dispatcher.dispatch(wanted))
    context.headers |= answer.headers()
    answer.raise_failed()
    return answer


def check_room(request: Request, model: Model, items: int) -> None:
    """Refuses now what `infer` would refuse, before a route does work for it; to be called where hits are rare.

    Raises:
        Overloaded: the model's items in flight leave no room, or no time until the deadline.
    """
    remaining_s = context_of(request).received_at_s + _deadline_s(request, model) - time.time()
    parts_of(request).admission.check(model.name, items, remaining_s=remaining_s, lane=lane_of(request))


def _deadline_s(request: Request, model: Model) -> float:
    """Seconds the caller gives, at most what the model allows."""
    given_s = given_deadline_s(request)
    return model.deadline.default_s if given_s is None else min(given_s, model.deadline.longest_s)


def given_deadline_s(request: Request) -> float | None:
    """Seconds the caller gives, if it says so.

    Raises:
        BadInput: it says something else.
    """
    return _seconds(request, DEADLINE_HEADER)


def start_by_s(request: Request) -> float:
    """Unix time after which the request is not begun any more, if the caller says how long it may queue; else 0.

    Raises:
        BadInput: it says something else.
    """
    limit_s = _seconds(request, QUEUE_HEADER)
    return 0.0 if limit_s is None else context_of(request).received_at_s + limit_s


def _seconds(request: Request, header: str) -> float | None:
    given = request.headers.get(header)
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and int(given) > 0):
        raise BadInput(f"{header}: {given!r} is not a number of milliseconds above 0", field=header)
    return int(given) / 1000


def lane_of(request: Request) -> str:
    """`batch` where the caller says that its request may wait behind interactive ones, else nothing.

    Raises:
        BadInput: it names another lane.
    """
    given = request.headers.get(LANE_HEADER, "interactive").lower()
    if given not in ("interactive", "batch"):
        raise BadInput(f"{LANE_HEADER}: {given!r} is neither interactive nor batch", field=LANE_HEADER)
    return "batch" if given == "batch" else ""


def cache_controls(request: Request) -> set[str]:
    """What the caller says about the cache: `no-cache`, `no-store`."""
    given = request.headers.get("cache-control")
    return {part.strip().lower() for part in given.split(",")} if given else set()


def traceparent_of(request: Request) -> str:
    """The trace this request belongs to (W3C Trace Context), if it says so in the right form."""
    given = request.headers.get("traceparent", "")
    return given if _TRACEPARENT.fullmatch(given) else ""


def base_url_of(request: Request) -> str:
    """The URL that callers reach this API by, without a slash at its end."""
    return (parts_of(request).settings.public_url or str(request.base_url)).rstrip("/")


def link_to(request: Request, key: str, media_type: str) -> str:
    """The URL under which an object can be fetched for the next 60 minutes."""
    return base_url_of(request) + parts_of(request).links.path(key, media_type)
