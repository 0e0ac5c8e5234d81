"""/v1/responses as in OpenAI's API: creates, reads, streams and deletes responses.

Responses are stored unless `store` is false. A streamed or background response is a prediction,
which any instance can serve. Others are stored as predictions once they are complete.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import msgspec
from fastapi import APIRouter, Query
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from api.chat_bodies import ChatBody
from api.dispatch.request import InferenceRequest
from api.errors import NotFound, NotNow, PreviousResponseNotFound, describe, to_bad_input
from api.http import openapi
from api.http.encode_json import encode_json
from api.http.fast_route import IS_HEAD, StreamedRoute
from api.http.openapi import inference_body, inference_responses, streamed
from api.http.request import ApiRequest, authenticate, open_request, while_connected
from api.openai.conversations import add_to, as_stored, unlocked
from api.openai.generation import RESPONSE_PREFIX, answer_id, inputs_of, is_repeatable, model_of
from api.openai.item_pages import After, ItemsPage, Limit, Order, page_of
from api.openai.response_events import ResponseEvents, as_asked
from api.openai.responses_schemas import ResponseBody, ResponseDeleted, ResponseReply
from api.openai.stored import (
    PATH_OF_RESPONSES,
    find_response,
    referenced_items,
    response_of,
    shown_items,
    state_of,
)
from api.predictions.creation import PredictionSnapshot, digest_of
from api.predictions.event_stream import HeldResponse
from api.predictions.generation_stream import StreamPosition, find_return
from api.predictions.service import PredictionNotOver
from api.tasks.base import Inputs
from shared.errors import BadInput, InputTooLarge, Overloaded, PenstockError, Unavailable
from shared.messages import ItemOutcome
from shared.models.catalog import Model
from shared.models.tasks.text import GenerationInput
from shared.predictions import EVENTS_TYPE

PATH = PATH_OF_RESPONSES
UNSTORED_KEEP_S = 120
"""How long an unstored stream can be resumed after its end."""
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
StartingAfter = Annotated[
    int, Query(ge=-1, le=2**31, description="Only events with a greater `sequence_number`.")
]


@contextmanager
def words_of_responses() -> Iterator[None]:
    """Replaces chat fields by response fields in errors raised by the block."""
    try:
        yield
    except BadInput as error:
        raise as_asked(error) from error


router = APIRouter(route_class=StreamedRoute)
stored_router = APIRouter()


@router.post(
    PATH,
    summary="Get a response",
    openapi_extra=inference_body(ResponseBody),
    responses=streamed(inference_responses(ResponseReply)),
)
async def create_response(request: Request) -> Response:
    """Answers like the chat endpoint, in the form of items.

    With `"background": true`, answers at once, and the text is generated whether it is read or not.
    Responses can be read again and continued unless `store` is false.
    """
    call = open_request(request)
    asked = await whole_request(call, await call.read_json(ResponseBody))
    body = asked.body
    chat = _chat_of(body)
    model = model_of(chat, call.dependencies.catalog)
    call.use(model)
    longest = model.generation.longest_tokens
    if body.max_output_tokens is not None and body.max_output_tokens > longest:
        raise BadInput(
            f"max_output_tokens: must be at most {longest} for {model.name}",
            field="max_output_tokens",
        )
    seed = call.context.key_seed
    with words_of_responses():
        inputs = inputs_of(chat, model, secrets.randbelow(2**53) if seed is None else seed)
        if body.stream or body.background:
            return await _create_prediction(call, asked, model, inputs)
        repeats = is_repeatable(chat) or seed is not None
        async with call.inferred(model, inputs, is_repeatable=repeats) as response:
            return encode_json(await _kept(call, asked, model, inputs, response.outcomes))


@stored_router.get(
    "/v1/responses/{response_id}",
    summary="Get a response again",
    openapi_extra=openapi.AUTHENTICATED,
    responses=streamed(openapi.responses(ResponseReply, 400, 401, 404, 429, 500, 503)),
)
async def read_response(
    request: Request, response_id: str, stream: bool = False, starting_after: StartingAfter = -1
) -> Response:
    """Returns the current state of a stored response. With `stream=true`, its events."""
    call = authenticate(request)
    snapshot = await find_response(call, response_id, is_resumed=stream)
    if not stream:
        return encode_json(state_of(call, snapshot))
    with ExitStack() as held:
        held.enter_context(call.dependencies.generation_streams.reserved(call.tenant))
        return await _stream(call, snapshot, starting_after, held.pop_all())


@stored_router.get(
    "/v1/responses/{response_id}/input_items",
    summary="List the input of a response",
    openapi_extra=openapi.AUTHENTICATED,
    responses=openapi.responses(ItemsPage, 400, 401, 404, 503),
)
async def list_input_items(
    request: Request, response_id: str, limit: Limit = 20, order: Order = "desc", after: After = ""
) -> Response:
    """Lists the complete model input, including the part from `previous_response_id`."""
    call = authenticate(request)
    snapshot = await find_response(call, response_id)
    body, digits = ResponseBody.model_validate(snapshot.prediction.input), response_id[-24:]
    items = [item.model_dump(mode="json", exclude_unset=True) for item in body.items]
    return encode_json(page_of(shown_items(items, digits), limit, order, after))


@stored_router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a response",
    openapi_extra=openapi.AUTHENTICATED,
    responses=openapi.responses(ResponseReply, 400, 401, 404, 503),
)
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancels a background response unless it has ended."""
    call = authenticate(request)
    snapshot = await find_response(call, response_id)
    if not snapshot.prediction.input.get("background"):
        raise BadInput(
            "Cannot cancel a synchronous response. Only those with background: true can be "
            "canceled; close the connection of another one",
            field="response_id",
        )
    canceled = await call.dependencies.predictions.cancel(call.tenant, snapshot.prediction.id)
    return encode_json(state_of(call, canceled))


@stored_router.delete(
    "/v1/responses/{response_id}",
    summary="Delete a response",
    openapi_extra=openapi.AUTHENTICATED,
    responses=openapi.responses(ResponseDeleted, 401, 404, 409, 503),
)
async def delete_response(request: Request, response_id: str) -> Response:
    call = authenticate(request)
    snapshot = await find_response(call, response_id)
    try:
        await call.dependencies.predictions.delete(call.tenant, snapshot.prediction.id)
    except PredictionNotOver as error:
        raise PredictionNotOver("the response has not ended; cancel it first") from error
    return encode_json(ResponseDeleted(response_id))


class _Asked(NamedTuple):
    """A request with everything that precedes its input, and its new items."""

    body: ResponseBody
    own: list[dict[str, Any]]
    conversation: str
    """ID of the conversation to append to. Empty: none."""


async def whole_request(call: ApiRequest, body: ResponseBody) -> _Asked:
    """Returns the request with references resolved and preceding items included."""
    conversation, before = body.conversation_id, list[dict[str, Any]]()
    if conversation:
        before = await _items_of(call, conversation, new=len(body.items) + len(body.references))
    if body.references:
        known = {item["id"]: item for item in before}
        names = [name for name in body.references if name not in known]
        body = body.with_items(known | await referenced_items(call, names))
    own = body.dumped_items
    if body.previous_response_id is not None:
        before = await _items_before(call, body.previous_response_id)
    try:
        return _Asked(body.behind(before) if before else body, own, conversation)
    except ValidationError as error:
        field = "conversation" if conversation else "previous_response_id"
        reason = f"{field}: {describe(error.errors()[0])[1]}"
        raise BadInput(reason, field=field) from error


async def _items_of(call: ApiRequest, conversation: str, new: int) -> list[dict[str, Any]]:
    """Returns the items of a conversation that has room for `new` items and their output.

    Raises:
        InputTooLarge: the conversation is full.
    """
    try:
        kept = await unlocked(call, conversation)
    except NotFound as error:
        raise NotFound(error.message, field="conversation") from error
    if kept.room <= new:
        raise InputTooLarge(
            f"conversation: has room for only {kept.room} more items, which is too few for input "
            "and output; start a new conversation",
            field="conversation",
        )
    return kept.items


async def _items_before(call: ApiRequest, previous: str) -> list[dict[str, Any]]:
    """Returns the input and output of a previous response."""
    try:
        snapshot = await find_response(call, previous)
    except NotFound as error:
        raise PreviousResponseNotFound(
            f"Previous response with id '{previous[:80]}' not found.", field="previous_response_id"
        ) from error
    reply = state_of(call, snapshot)
    if reply.status not in ("completed", "incomplete"):
        raise NotNow(
            f"previous_response_id: that response has status {reply.status}, so it has no output",
            field="previous_response_id",
        )
    earlier = ResponseBody.model_validate(snapshot.prediction.input)
    output: list[dict[str, Any]] = msgspec.to_builtins(reply.output)
    return [*earlier.dumped_items, *output]


def _chat_of(body: ResponseBody) -> ChatBody:
    try:
        return body.to_chat()
    except ValidationError as error:
        raise as_asked(to_bad_input(error)) from error


async def _create_prediction(
    call: ApiRequest, asked: _Asked, model: Model, inputs: Sequence[GenerationInput]
) -> Response:
    body = asked.body
    # Event numbers depend on the maximum number of tokens, so it is stored now.
    shown = body.model_dump(mode="json", exclude_unset=True, by_alias=True)
    shown["max_output_tokens"] = inputs[0].max_tokens
    new = _recorded(call, body, model, inputs, shown)
    if not body.is_kept and not asked.conversation:
        new = replace(new, record=replace(new.new_record, keep_s=UNSTORED_KEEP_S))
    with ExitStack() as held:
        if body.stream:
            held.enter_context(call.dependencies.generation_streams.reserved(call.tenant))
        async with call.created(new, waits=False) as creation:
            if creation.is_new and asked.conversation:
                about = {"model": model.name, "prediction": new.new_record.prediction.id}
                await add_to(call, asked.conversation, as_stored(asked.own), **about)
        if body.stream:
            is_new = not body.background
            return await _stream(call, creation.snapshot, -1, held.pop_all(), is_new=is_new)
    return encode_json(state_of(call, creation.snapshot))


def _recorded(
    call: ApiRequest,
    body: ResponseBody,
    model: Model,
    inputs: Sequence[GenerationInput],
    shown: dict[str, Any],
) -> InferenceRequest:
    read = Inputs(inputs, shown, is_list=False, is_repeatable=is_repeatable(body.to_chat()))
    digest = digest_of(json.dumps([model.name, PATH, shown], sort_keys=True))
    return call.recorded(model, read, digest=digest, endpoint=PATH)


async def _kept(
    call: ApiRequest,
    asked: _Asked,
    model: Model,
    inputs: Sequence[GenerationInput],
    outcomes: Sequence[ItemOutcome],
) -> ResponseReply:
    """Appends a finished response to its conversation, and stores it if requested.

    Stored responses can be read, and a failed answer is not charged, so nothing may fail after it
    is stored in one of the two places. Without room or Redis, the response is still returned,
    marked as not stored, unless the request explicitly asks to store it and has no conversation.
    """
    body = asked.body
    shown = body.model_dump(mode="json", exclude_unset=True, by_alias=True)
    prediction = _recorded(call, body, model, inputs, shown).new_record.prediction
    response_id = answer_id(RESPONSE_PREFIX, prediction.id)
    events = ResponseEvents(body, response_id, prediction.created_at_s, model)
    reply = events.whole(outcomes, time.time())
    if asked.conversation:
        output = msgspec.to_builtins(reply.output)
        items = [*as_stored(asked.own), *output]
        await add_to(call, asked.conversation, items, model=model.name)
    if not body.is_kept:
        return reply
    try:
        keep_s = call.caller.plan.prediction_keep_s
        await call.dependencies.predictions.keep(prediction, outcomes, keep_s)
    except PenstockError as error:
        has_no_room = isinstance(error, Overloaded | Unavailable)
        if not asked.conversation and (body.store or not has_no_room):
            raise
        reply.store = False
    return reply


async def _stream(
    call: ApiRequest,
    snapshot: PredictionSnapshot,
    after: int,
    held: ExitStack,
    *,
    is_new: bool = False,
) -> Response:
    """Returns the events after `after`. Releases `held` at the end.

    Raises:
        PenstockError: a new prediction failed before its first event.
    """
    with held:
        body, events = response_of(call, snapshot, after)
        if IS_HEAD in call.http.scope:
            return Response(headers=_HEADERS, media_type=EVENTS_TYPE)
        stays = bool(body.background or not body.stream)
        seen = [StreamPosition(*events.seen)]
        # Readers resume by sequence number, so the events don't need other IDs.
        streams, check = call.dependencies.generation_streams, call.check_key
        if is_new:
            returns = find_return(call.options.idempotency_key, has_positions=True)
            beginning = streams.begin(snapshot, events, seen, check, returns, has_ids=False)
            sse = await while_connected(call.http.receive, beginning)
        else:
            sse = streams.follow(snapshot, events, seen, check, stays=stays, has_ids=False)
        response_id = answer_id(RESPONSE_PREFIX, snapshot.prediction.id)
        headers = {**_HEADERS, "location": f"{PATH}/{response_id}"}
        return HeldResponse(sse, held.pop_all(), headers=headers, media_type=EVENTS_TYPE)
