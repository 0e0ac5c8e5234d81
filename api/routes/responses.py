"""POST /v1/responses, and what became of them.

One that is streamed or written in the background is a prediction, which any instance can tell of.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from api.endpoints.responses import ResponseEvents
from api.endpoints.text import inputs_of, is_repeatable, model_of
from api.errors import NotFound, NotNow, PreviousResponseNotFound
from api.http import openapi
from api.http.disconnect import while_connected
from api.http.fast_route import IS_HEAD, StreamedRoute
from api.http.openapi import inference_body, inference_responses, streamed
from api.http.request import ApiRequest, authenticate, open_request
from api.predictions.creation import PredictionSnapshot
from api.predictions.event_stream import HeldResponse
from api.predictions.service import GRACE_S
from api.predictions.text_stream import Seen
from api.routes.prediction_request import digest_of, new_prediction
from api.schemas.openai_responses import ResponseBody
from api.schemas.openai_responses_replies import ResponseDeleted, ResponseReply
from api.schemas.openai_text import ChatBody
from api.tasks.base import Inputs
from shared.catalog import Model
from shared.errors import BadInput
from shared.messages import reason_of
from shared.predictions import EVENTS_TYPE, ended_at_s, error_of
from shared.tasks.text import GenerationInput
from shared.usage.charge import price_of

router = APIRouter(route_class=StreamedRoute)
stored_router = APIRouter()
PATH = "/v1/responses"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
StartingAfter = Annotated[
    int, Query(ge=-1, le=2**31, description="Only events with a greater `sequence_number`.")
]


@router.post(
    PATH,
    summary="Get a response",
    openapi_extra=inference_body(ResponseBody),
    responses=streamed(inference_responses(ResponseReply)),
)
async def create_response(request: Request) -> Response:
    """Answers as the chat endpoint does, in items.

    With `"background": true` the answer comes at once, and the text is written whether anybody
    reads it or not. Streamed and background ones can be read again.
    """
    call = open_request(request)
    body = await call.read_json(ResponseBody)
    if body.previous_response_id is not None:
        body = await _continued(call, body, body.previous_response_id)
    chat = _chat_of(body)
    model = model_of(chat, call.dependencies.catalog)
    call.use(model)
    longest = model.generation.longest_tokens
    if body.max_output_tokens is not None and body.max_output_tokens > longest:
        raise BadInput(
            f"max_output_tokens: {model.name} writes at most {longest} tokens",
            field="max_output_tokens",
        )
    seed = call.context.key_seed
    inputs = inputs_of(chat, model, secrets.randbelow(2**53) if seed is None else seed)
    if body.is_kept:
        return await _create_kept(call, body, model, inputs)
    repeats = is_repeatable(chat) or seed is not None
    made = "resp_" + call.context.request_id.removeprefix("req_")
    events = ResponseEvents(body, made, call.context.received_at_s, model)
    async with call.inferred(model, inputs, is_repeatable=repeats) as response:
        return _json(events.whole(response.outcomes, time.time()))


@stored_router.get(
    "/v1/responses/{response_id}",
    summary="Get a response again",
    openapi_extra=openapi.AUTHENTICATED,
    responses=streamed(openapi.responses(ResponseReply, 400, 401, 404, 429, 500, 503)),
)
async def read_response(
    request: Request, response_id: str, stream: bool = False, starting_after: StartingAfter = -1
) -> Response:
    """A streamed or background response as it is now. With `stream=true` its events."""
    call = authenticate(request)
    snapshot = await _find(call, response_id)
    if not stream:
        return _json(_state_of(call, snapshot))
    with ExitStack() as held:
        held.enter_context(call.dependencies.text_streams.reserved(call.tenant))
        return _stream(call, snapshot, starting_after, held.pop_all())


@stored_router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a response",
    openapi_extra=openapi.AUTHENTICATED,
    responses=openapi.responses(ResponseReply, 401, 404, 503),
)
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends the writing of a response, unless it has ended."""
    call = authenticate(request)
    await _find(call, response_id)
    return _json(
        _state_of(call, await call.dependencies.predictions.cancel(call.tenant, response_id))
    )


@stored_router.delete(
    "/v1/responses/{response_id}",
    summary="Delete a response",
    openapi_extra=openapi.AUTHENTICATED,
    responses=openapi.responses(ResponseDeleted, 401, 404, 409, 503),
)
async def delete_response(request: Request, response_id: str) -> Response:
    """Deletes a response that has ended."""
    call = authenticate(request)
    await _find(call, response_id)
    await call.dependencies.predictions.delete(call.tenant, response_id)
    return _json(ResponseDeleted(response_id))


async def _continued(call: ApiRequest, body: ResponseBody, previous: str) -> ResponseBody:
    """The request with what came before it."""
    try:
        snapshot = await _find(call, previous)
    except NotFound as error:
        raise PreviousResponseNotFound(
            f"Previous response with id '{previous[:80]}' not found.", field="previous_response_id"
        ) from error
    reply = _state_of(call, snapshot)
    if reply.status not in ("completed", "incomplete"):
        raise NotNow(
            f"previous_response_id: that response is {reply.status}, so it has no output",
            field="previous_response_id",
        )
    earlier = ResponseBody.model_validate(snapshot.prediction.input)
    try:
        return body.after(earlier, msgspec.to_builtins(reply.output))
    except ValidationError as error:
        reason = f"previous_response_id: {error.errors()[0]['msg']}"
        raise BadInput(reason, field="previous_response_id") from error


def _chat_of(body: ResponseBody) -> ChatBody:
    try:
        return body.to_chat()
    except ValidationError as error:
        wrong = error.errors()[0]
        field = str(wrong["loc"][0]) if wrong["loc"] else ""
        shown = f"{field}: {wrong['msg']}" if field else str(wrong["msg"])
        raise BadInput(shown, field=field or None) from error


async def _create_kept(
    call: ApiRequest, body: ResponseBody, model: Model, inputs: Sequence[GenerationInput]
) -> Response:
    dependencies = call.dependencies
    # Numbers of events follow from the most tokens, so these stay as they are now.
    shown = body.model_dump(mode="json", exclude_unset=True, by_alias=True)
    shown["max_output_tokens"] = inputs[0].max_tokens
    read = Inputs(inputs, shown, is_list=False, is_repeatable=is_repeatable(body.to_chat()))
    digest = digest_of(json.dumps([model.name, PATH, shown], sort_keys=True))
    new = new_prediction(call, model, read, digest=digest, owner="penstock", endpoint=PATH)
    with ExitStack() as held:
        if body.stream:
            held.enter_context(dependencies.text_streams.reserved(call.tenant))
        async with (
            call.limited(model, inputs) as limited,
            dependencies.predictions.creating(
                new,
                waits=body.waits,
                hold=limited.hold(new.prediction, dependencies.follower.follow),
            ) as creation,
        ):
            if not creation.is_new:
                limited.settle(price_of(model, call.context.received_at_s), [])
            if body.waits:
                left_s = new.prediction.deadline_s + GRACE_S - time.time()
                await while_connected(call.http.receive, creation.wait(left_s), call.check_key)
        if body.stream:
            return _stream(call, creation.snapshot, -1, held.pop_all())
    return _json(_state_of(call, creation.snapshot))


async def _find(call: ApiRequest, response_id: str) -> PredictionSnapshot:
    snapshot = await call.prediction(response_id)
    if snapshot.prediction.endpoint != PATH:
        raise NotFound(f"there is no response {response_id[:80]!r}")
    return snapshot


def _events_of(
    call: ApiRequest, snapshot: PredictionSnapshot, after: int = -1
) -> tuple[ResponseBody, ResponseEvents]:
    prediction = snapshot.prediction
    model = call.dependencies.catalog.find(prediction.model)
    call.use(model)
    body = ResponseBody.model_validate(prediction.input)
    events = ResponseEvents(body, prediction.id, prediction.created_at_s, model, after)
    return body, events


def _stream(
    call: ApiRequest, snapshot: PredictionSnapshot, after: int, held: ExitStack
) -> Response:
    """The events behind `after`. Frees what is `held` at the end."""
    with held:
        body, events = _events_of(call, snapshot, after)
        if IS_HEAD in call.http.scope:
            return Response(headers=_HEADERS, media_type=EVENTS_TYPE)
        stays = bool(body.background or not body.stream)
        seen = [Seen(*events.seen)]
        told = call.dependencies.text_streams.follow(
            snapshot, events, seen, call.check_key, stays=stays
        )
        headers = {**_HEADERS, "location": f"{PATH}/{snapshot.prediction.id}"}
        return HeldResponse(told, held.pop_all(), headers=headers, media_type=EVENTS_TYPE)


def _state_of(call: ApiRequest, snapshot: PredictionSnapshot) -> ResponseReply:
    record = snapshot.record
    _, events = _events_of(call, snapshot)
    outcomes = record.reply.outcomes if record.reply is not None else []
    if record.state == "succeeded":
        return events.whole(outcomes, ended_at_s(record))
    if record.state == "canceled":
        return events.failed("canceled", "")
    if not record.is_over:
        return events.reply("queued" if record.state == "starting" else "in_progress")
    failed = next((one for one in outcomes if one.error is not None), None)
    if failed is not None and failed.error is not None:
        return events.failed(failed.error.code, reason_of(failed))
    return events.failed("model_failed", error_of(record) or "failed")


def _json(reply: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(reply), media_type="application/json")
