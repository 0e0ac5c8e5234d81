"""From an HTTP request to what the dispatcher takes: key, body, and what its headers ask for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from pydantic import BaseModel
from python_multipart.multipart import parse_options_header
from starlette.requests import Request

from api.dispatch.request import InferenceRequest, InferenceResponse
from api.http.dependencies import dependencies_of
from api.http.json_limits import check_amount
from api.http.middleware import context_of, while_connected
from api.http.request_options import RequestOptions, read_options
from shared.catalog import Model
from shared.errors import BadInput
from shared.tasks import Input

B = TypeVar("B", bound=BaseModel)


def tenant_of(request: Request) -> str:
    """Who asks; to be called before the body is read.

    Raises:
        Unauthorized: a key is needed, and none or a wrong one was sent.
    """
    dependencies, context = dependencies_of(request), context_of(request)
    context.tenant = dependencies.api_keys.tenant_of(request.headers.get("authorization"))
    context.record_refusal = dependencies.refusals.write_row
    return context.tenant


async def read_json(request: Request, kind: type[B]) -> B:
    """The body as `kind`; numbers in quotes and the like are refused.

    Raises:
        ValidationError: it is not JSON, or not such a body.
        BodyTooLarge: it is larger than the API takes.
        InputTooLarge: it has more values than any request needs.
    """
    body = await request.body()
    check_amount(body)
    return kind.model_validate_json(body, strict=True)


def check_charset(request: Request) -> None:
    """Lets forms in UTF-8 pass, which all clients send: Python has codecs that fail, or make what is no text.

    Raises:
        BadInput: the texts of this form are in something else.
    """
    _, parameters = parse_options_header(request.headers.get("content-type", ""))
    charset = parameters.get(b"charset", b"utf-8").lower()
    if charset not in (b"utf-8", b"utf8"):
        shown = charset[:40].decode("latin-1")
        raise BadInput(f"content-type: forms must be in UTF-8, not {shown!r}", field="content-type")


async def infer(
    request: Request, model: Model, tenant: str, inputs: Sequence[Input], *, is_repeatable: bool = True
) -> InferenceResponse:
    """Has `inputs` computed for this HTTP request and tells its context how it went.

    Raises:
        PenstockError: an item has no result, or the request could not be taken on.
        ClientGone: the caller hung up.
    """
    context, options = context_of(request), options_of(request)
    context.model = model.name
    wanted = InferenceRequest(
        request_id=context.request_id,
        client_request_id=context.client_request_id,
        model=model,
        tenant=tenant,
        inputs=inputs,
        received_at_s=context.received_at_s,
        deadline_s=answer_by_s(request, model),
        is_repeatable=is_repeatable,
        cache_read=options.cache_read,
        cache_write=options.cache_write,
        traceparent=options.traceparent,
        lane=options.lane,
        start_by_s=options.start_by_s(context.received_at_s),
    )
    answer = await while_connected(request, dependencies_of(request).dispatcher.dispatch(wanted))
    context.has_rows = True
    context.headers |= answer.headers()
    answer.raise_failed()
    return answer


def check_room(request: Request, model: Model, items: int) -> None:
    """Refuses now what `infer` would refuse, before a route does work for it; to be called where hits are rare.

    Raises:
        Overloaded: the model's items in flight leave no room, or no time until the deadline.
    """
    lane, remaining_s = options_of(request).lane, answer_by_s(request, model) - time.time()
    dependencies_of(request).admission.check(model.name, items, remaining_s=remaining_s, lane=lane)


def answer_by_s(request: Request, model: Model) -> float:
    """Unix time of the deadline: what the caller gives, at most what the model allows."""
    return options_of(request).answer_by_s(context_of(request).received_at_s, model.deadline)


def options_of(request: Request) -> RequestOptions:
    """What the headers of the request ask for; read once.

    Raises:
        BadInput: one of them has no such value.
    """
    context = context_of(request)
    if context.options is None:
        context.options = read_options(request.scope["headers"])
    return context.options


def base_url_of(request: Request) -> str:
    """The URL that callers reach this API by, without a slash at its end."""
    return (dependencies_of(request).settings.public_url or str(request.base_url)).rstrip("/")


def link_to(request: Request, key: str, media_type: str) -> str:
    """The URL under which an object can be fetched for the next 60 minutes."""
    return base_url_of(request) + dependencies_of(request).url_signer.path(key, media_type)
