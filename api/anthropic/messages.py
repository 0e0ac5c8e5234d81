"""POST /v1/messages in Anthropic's shape: a chat with its words, whole and streamed."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from contextlib import ExitStack

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api.anthropic.errors import AnthropicRoute, as_asked
from api.anthropic.events import MessageEvents
from api.anthropic.schemas import (
    AnthropicErrorReply,
    CountBody,
    MessageReply,
    MessagesBody,
    TokenCountReply,
)
from api.chat_bodies import ChatBody
from api.http import openapi
from api.http.fast_route import IS_HEAD
from api.http.request import ApiRequest, open_request, while_connected
from api.openai.generation import inputs_of, is_repeatable, model_of
from api.openai.ids import answer_id
from api.openai.token_counts import count_chat
from api.predictions.creation import digest_of
from api.predictions.event_stream import HeldResponse
from api.predictions.generation_stream import StreamPosition
from api.tasks.base import Inputs
from shared.catalog import Model
from shared.errors import BadInput
from shared.predictions import EVENTS_TYPE
from shared.tasks.text import GenerationInput

PATH = "/v1/messages"
MESSAGE = "msg_"
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
router = APIRouter(route_class=AnthropicRoute)


@router.post(
    PATH,
    summary="Create a message",
    openapi_extra=openapi.inference_body(MessagesBody),
    responses=openapi.streamed(
        openapi.inference_responses(MessageReply, error=AnthropicErrorReply)
    ),
)
async def create_message(request: Request) -> Response:
    """Answers in the shape of Anthropic's API, with `"stream": true` as its events."""
    call = open_request(request)
    body = await call.read_json(MessagesBody)
    chat = body.to_generation()
    model = model_of(chat, call.dependencies.catalog)
    call.use(model)
    try:
        inputs = inputs_of(chat, model, secrets.randbelow(2**53))
        if body.stream:
            return await _stream(call, body, chat, model, inputs)
        if call.options.idempotency_key:
            raise BadInput(
                "idempotency-key: is for stream: true on this route; leave it out",
                field="idempotency-key",
            )
        message_id = answer_id(MESSAGE, call.context.facts.request_id)
        async with call.inferred(model, inputs, is_repeatable=is_repeatable(chat)) as response:
            reply = MessageEvents(chat, message_id, model).whole(response.outcomes)
            return Response(msgspec.json.encode(reply), media_type="application/json")
    except BadInput as error:
        raise as_asked(error) from error


@router.post(
    PATH + "/count_tokens",
    summary="Count the tokens of messages",
    openapi_extra=openapi.inference_body(CountBody),
    responses=openapi.inference_responses(TokenCountReply, error=AnthropicErrorReply),
)
async def count_tokens(request: Request) -> Response:
    """The tokens that the same request would read."""
    call = open_request(request)
    body = await call.read_json(CountBody)
    try:
        counted = await count_chat(call, body.to_chat())
    except BadInput as error:
        raise as_asked(error) from error
    return Response(
        msgspec.json.encode(TokenCountReply(counted.count)), media_type="application/json"
    )


async def _stream(
    call: ApiRequest,
    body: MessagesBody,
    chat: ChatBody,
    model: Model,
    inputs: Sequence[GenerationInput],
) -> Response:
    if IS_HEAD in call.http.scope:
        return Response(headers=_HEADERS, media_type=EVENTS_TYPE)
    shown = body.model_dump(mode="json", exclude_unset=True, by_alias=True)
    read = Inputs(inputs, shown, is_list=False, is_repeatable=is_repeatable(chat))
    digest = digest_of(json.dumps([model.name, PATH, shown], sort_keys=True))
    new = call.recorded(model, read, digest=digest, endpoint=PATH)
    streams = call.dependencies.generation_streams
    with ExitStack() as held:
        held.enter_context(streams.reserved(call.tenant))
        async with call.created(new, waits=False) as creation:
            pass
        events = MessageEvents(chat, answer_id(MESSAGE, creation.snapshot.prediction.id), model)
        beginning = streams.begin(
            creation.snapshot, events, [StreamPosition()], call.check_key, has_ids=False
        )
        sse = await while_connected(call.http.receive, beginning)
        return HeldResponse(sse, held.pop_all(), headers=_HEADERS, media_type=EVENTS_TYPE)
