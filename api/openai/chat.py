"""POST /v1/chat/completions and /v1/completions, and their streams.

A streamed answer is a prediction: its record is in Redis before its job is published, so any
instance can resume the stream. Events have OpenAI's format.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from api.chat_bodies import ChatBody, CompletionBody
from api.errors import encode_error, error_body
from api.http import openapi
from api.http.encode_json import encode_json
from api.http.fast_route import IS_HEAD, StreamedRoute
from api.http.openapi import LAST_EVENT_ID, generation_body, inference_responses, streamed
from api.http.request import ApiRequest, authenticate, open_request, while_connected
from api.http.request_options import wants_event_ids
from api.openai.chat_replies import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatReply,
    CompletionChoice,
    CompletionReply,
)
from api.openai.generation import (
    CHAT_PREFIX,
    COMPLETION_PREFIX,
    answer_id,
    begun_call,
    chat_choice,
    chat_logprobs,
    chat_reply,
    completion_logprobs,
    completion_reply,
    first_call,
    inputs_of,
    is_repeatable,
    model_of,
    results_of,
    shown_of,
    usage_of,
)
from api.openai.stored import find_stored
from api.predictions.creation import PredictionSnapshot, digest_of
from api.predictions.event_stream import HeldResponse
from api.predictions.generation_stream import (
    PromptSize,
    StreamShape,
    find_return,
    seen_from_id,
)
from api.predictions.service import PredictionNotOver
from api.tasks.base import Inputs
from shared.errors import PenstockError
from shared.messages import ItemOutcome
from shared.models.catalog import Model
from shared.models.tasks.text import GenerationInput, GenerationResult, TokenLogprob
from shared.predictions import EVENTS_TYPE

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode

B = TypeVar("B", ChatBody, CompletionBody)
_HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}
StartingAfter = Annotated[
    str, Query(description="Like `Last-Event-ID`: sends only events after this one.")
]


def failure_event(error: PenstockError) -> bytes:
    """Returns an error event that OpenAI's clients raise."""
    return b"data: " + encode_error(error_body(error)) + b"\n\n"


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class ChatEvents:
    """The events of a chat."""

    def __init__(
        self, body: ChatBody, completion_id: str, created_at_s: float, model: Model
    ) -> None:
        self._body = body
        self._made = completion_id
        self._created = int(created_at_s)
        self._model = model
        self._has_tools = bool(body.allowed_tools)
        self._is_forced = bool(body.forced_tools)
        options = body.stream_options
        self._has_usage = options is not None and options.include_usage

    def opening(self, index: int, prompt: PromptSize) -> bytes:
        """Returns the event with the role of the message."""
        return self._chunk(ChatChunkChoice(index, ChatDelta("assistant", "")))

    def delta(
        self,
        index: int,
        before: str,
        text: str,
        logprobs: Sequence[TokenLogprob],
        at: tuple[int, int],
    ) -> bytes | None:
        """Returns the event for new text. Text that may start a tool call is held back.

        If a call is required, its arguments are sent as they are generated.
        """
        encoded = chat_logprobs(logprobs) if self._body.logprobs and logprobs else None
        if self._is_forced and (call := self._call_delta(index, before, before + text)):
            return self._chunk(ChatChunkChoice(index, ChatDelta(tool_calls=[call]), encoded))
        if self._has_tools:
            text = shown_of(before + text)[len(shown_of(before)) :]
        if not text and encoded is None:
            return None
        return self._chunk(ChatChunkChoice(index, ChatDelta(content=text), encoded))

    def _call_delta(self, index: int, before: str, now: str) -> dict[str, object] | None:
        """Returns the text added to the first call since `before`."""
        begun, earlier = begun_call(now), begun_call(before)
        if begun is None:
            return None
        if earlier is None:
            call = first_call(begun, f"{self._made}:{index}")
            fields: dict[str, object] = msgspec.to_builtins(call)
            return {"index": 0} | fields
        added = begun.arguments[len(earlier.arguments) :]
        return {"index": 0, "function": {"arguments": added}} if added else None

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """Returns the text held back, the tool calls and the finish reason."""
        choice = chat_choice(self._body, self._made, index, result)
        events = []
        content = choice.message.content or ""
        if self._has_tools and (rest := content[len(shown_of(result.text)) :]):
            events.append(self._chunk(ChatChunkChoice(index, ChatDelta(content=rest))))
        if isinstance(choice.message.tool_calls, list):
            for number, call in enumerate(choice.message.tool_calls):
                if number == 0 and self._is_forced and begun_call(result.text) is not None:
                    continue  # already sent while it was generated
                tool_call = {"index": number} | msgspec.to_builtins(call)
                delta = ChatDelta(tool_calls=[tool_call])
                events.append(self._chunk(ChatChunkChoice(index, delta)))
        ended = ChatChunkChoice(index, ChatDelta(), finish_reason=choice.finish_reason)
        return [*events, self._chunk(ended)]

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """Returns the token counts, if they were requested."""
        if not self._has_usage:
            return [DONE]
        usage = usage_of(results_of(outcomes, self._model), self._body.n or 1)
        chunk = ChatChunk(self._made, self._created, self._model.name, [], usage)
        return [_event(chunk), DONE]

    def failure(self, error: PenstockError) -> bytes:
        return failure_event(error)

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        chunk = ChatChunk(self._made, self._created, self._model.name, [choice])
        if self._has_usage:
            chunk.usage = None
        return _event(chunk)


class CompletionEvents(StreamShape):
    """The events of a completion."""

    def __init__(
        self, body: CompletionBody, completion_id: str, created_at_s: float, model: Model
    ) -> None:
        self._body = body
        self._made = completion_id
        self._created = int(created_at_s)
        self._model = model
        options = body.stream_options
        self._has_usage = options is not None and options.include_usage

    def delta(
        self,
        index: int,
        before: str,
        text: str,
        logprobs: Sequence[TokenLogprob],
        at: tuple[int, int],
    ) -> bytes | None:
        """Returns the event for new text."""
        encoded = None
        if self._body.logprobs is not None and logprobs:
            encoded = completion_logprobs(logprobs, len(before))
        if not text and encoded is None:
            return None
        return self._chunk(CompletionChoice(index, text, None, encoded))

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """Returns the event with the finish reason."""
        return [self._chunk(CompletionChoice(index, "", result.finish_reason))]

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """Returns the token counts, if they were requested."""
        if not self._has_usage:
            return [DONE]
        usage = usage_of(results_of(outcomes, self._model), self._body.n or 1)
        reply = CompletionReply(self._made, self._created, self._model.name, [], usage)
        return [_event(reply), DONE]

    def failure(self, error: PenstockError) -> bytes:
        return failure_event(error)

    def _chunk(self, choice: CompletionChoice) -> bytes:
        reply = CompletionReply(self._made, self._created, self._model.name, [choice])
        if self._has_usage:
            reply.usage = None
        return _event(reply)


router = APIRouter(route_class=StreamedRoute)
stored_router = APIRouter()


class _Endpoint(NamedTuple, Generic[B]):
    """The differences between the two endpoints."""

    path: str
    body: type[B]
    id_prefix: str
    reply: Callable[[B, str, float, Model, Sequence[ItemOutcome]], msgspec.Struct]
    events: Callable[[B, str, float, Model], StreamShape]


CHAT = _Endpoint("/v1/chat/completions", ChatBody, CHAT_PREFIX, chat_reply, ChatEvents)
COMPLETION = _Endpoint(
    "/v1/completions", CompletionBody, COMPLETION_PREFIX, completion_reply, CompletionEvents
)


@router.post(
    CHAT.path,
    summary="Continue a chat",
    openapi_extra=generation_body(ChatBody),
    responses=streamed(inference_responses(ChatReply)),
)
async def create_chat(request: Request) -> Response:
    """Answers with the complete message or, with `"stream": true`, token by token.

    With an `Idempotency-Key`, or `X-Penstock-Event-Ids: true`, each event of a stream has an ID.
    Sending the same request with the same `Idempotency-Key` and that ID as `Last-Event-ID` resumes
    after it, on any instance.
    """
    return await _create(request, CHAT)


@router.post(
    COMPLETION.path,
    summary="Continue a text",
    openapi_extra=generation_body(CompletionBody),
    responses=streamed(inference_responses(CompletionReply)),
)
async def create_completion(request: Request) -> Response:
    """Same as the chat endpoint, without a chat template."""
    return await _create(request, COMPLETION)


@stored_router.get(
    "/v1/chat/completions/{completion_id}",
    summary="Get a streamed chat",
    openapi_extra={"parameters": [LAST_EVENT_ID]} | openapi.AUTHENTICATED,
    responses=streamed(openapi.responses(ChatReply, 400, 401, 404, 409, 429, 499, 500, 503, 504)),
)
async def read_chat(
    request: Request, completion_id: str, stream: bool = False, starting_after: StartingAfter = ""
) -> Response:
    """Returns the completed chat or, with `stream=true`, its events, replayed from any ID."""
    call = authenticate(request)
    snapshot = await find_stored(call, CHAT_PREFIX, CHAT.path, completion_id)
    body = ChatBody.model_validate(snapshot.prediction.input)
    if stream:
        last_id = request.headers.get("last-event-id", "") or starting_after
        with ExitStack() as held:
            held.enter_context(call.dependencies.generation_streams.reserved(call.tenant))
            return await _stream(call, CHAT, body, snapshot, last_id, held.pop_all())
    return encode_json(stored_chat(call, snapshot))


async def _create(request: Request, endpoint: _Endpoint[Any]) -> Response:
    call = open_request(request)
    body = await call.read_json(endpoint.body)
    model = model_of(body, call.dependencies.catalog)
    call.use(model)
    seed = call.context.key_seed
    if seed is None:
        seed = secrets.randbelow(2**53)
    inputs = inputs_of(body, model, seed)
    if body.stream:
        return await _create_stream(call, endpoint, body, model, inputs)
    repeats = is_repeatable(body) or call.context.key_seed is not None
    completion_id = answer_id(endpoint.id_prefix, call.context.facts.request_id)
    async with call.inferred(model, inputs, is_repeatable=repeats) as response:
        if isinstance(body, ChatBody) and body.store:
            read = Inputs(inputs, dumped(body), len(inputs) > 1, is_repeatable=repeats)
            completion_id = await _keep(call, model, read, response.outcomes)
        return encode_json(
            endpoint.reply(
                body, completion_id, call.context.facts.received_at_s, model, response.outcomes
            )
        )


def dumped(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """Returns a body in the format in which it is stored."""
    return body.model_dump(mode="json", exclude_unset=True, by_alias=True)


async def _keep(
    call: ApiRequest, model: Model, read: Inputs, outcomes: Sequence[ItemOutcome]
) -> str:
    """Stores a finished chat. Returns its ID."""
    digest = digest_of(json.dumps([model.name, CHAT.path, read.shown], sort_keys=True))
    new = call.recorded(model, read, digest=digest, endpoint=CHAT.path).new_record
    await call.dependencies.predictions.keep(new.prediction, outcomes, new.keep_s)
    return answer_id(CHAT_PREFIX, new.prediction.id)


async def _create_stream(
    call: ApiRequest,
    endpoint: _Endpoint[Any],
    body: ChatBody | CompletionBody,
    model: Model,
    inputs: Sequence[GenerationInput],
) -> Response:
    last_id = call.http.headers.get("last-event-id", "")
    seen_from_id(last_id, len(inputs))
    shown = dumped(body)
    read = Inputs(inputs, shown, is_list=len(inputs) > 1, is_repeatable=is_repeatable(body))
    digest = digest_of(json.dumps([model.name, endpoint.path, shown], sort_keys=True))
    new = call.recorded(model, read, digest=digest, endpoint=endpoint.path)
    with ExitStack() as held:
        held.enter_context(call.dependencies.generation_streams.reserved(call.tenant))
        async with call.created(new, waits=False) as creation:
            pass
        return await _stream(
            call, endpoint, body, creation.snapshot, last_id, held.pop_all(), is_new=not last_id
        )


async def _stream(
    call: ApiRequest,
    endpoint: _Endpoint[Any],
    body: ChatBody | CompletionBody,
    snapshot: PredictionSnapshot,
    last_id: str,
    held: ExitStack,
    *,
    is_new: bool = False,
) -> Response:
    """Returns the events after `last_id`. Releases `held` at the end.

    Raises:
        PenstockError: a new prediction failed before its first event.
    """
    with held:
        prediction, model = snapshot.prediction, _model_of(call, snapshot)
        seen = seen_from_id(last_id, _items_of(body))
        if IS_HEAD in call.http.scope:
            return Response(headers=_HEADERS, media_type=EVENTS_TYPE)
        completion_id = answer_id(endpoint.id_prefix, prediction.id)
        shape = endpoint.events(body, completion_id, prediction.created_at_s, model)
        streams = call.dependencies.generation_streams
        if is_new:
            has_ids = wants_event_ids(call.http.headers)
            returns = find_return(call.options.idempotency_key, has_positions=has_ids)
            beginning = streams.begin(
                snapshot, shape, seen, call.check_key, returns, has_ids=has_ids
            )
            sse = await while_connected(call.http.receive, beginning)
        else:
            sse = streams.follow(snapshot, shape, seen, call.check_key, stays=False, has_ids=True)
        headers = {**_HEADERS, "location": f"{CHAT.path}/{completion_id}"}
        if endpoint is not CHAT:
            del headers["location"]
        return HeldResponse(sse, held.pop_all(), headers=headers, media_type=EVENTS_TYPE)


def _items_of(body: ChatBody | CompletionBody) -> int:
    prompts = len(body.prompts) if isinstance(body, CompletionBody) else 1
    return prompts * (body.n or 1)


def stored_chat(call: ApiRequest, snapshot: PredictionSnapshot) -> ChatReply:
    """Returns the complete chat of a prediction.

    Raises:
        PredictionNotOver: the answer is still being written.
        PenstockError: the prediction failed.
    """
    prediction, record = snapshot
    if not record.is_over:
        raise PredictionNotOver("the answer is still being written; stream it, or try again later")
    if record.state != "succeeded" or record.reply is None:
        raise snapshot.failure
    body = ChatBody.model_validate(prediction.input)
    model, completion_id = _model_of(call, snapshot), answer_id(CHAT_PREFIX, prediction.id)
    reply = chat_reply(body, completion_id, prediction.created_at_s, model, record.reply.outcomes)
    reply.metadata = body.metadata or {}
    return reply


def _model_of(call: ApiRequest, snapshot: PredictionSnapshot) -> Model:
    model = call.dependencies.catalog.find(snapshot.prediction.model)
    call.use(model)
    return model
