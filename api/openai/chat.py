"""POST /v1/chat/completions and /v1/completions, including streaming.

A streamed response is a prediction. Its record is written to Redis before its job is published, so
any instance can resume the stream. Events are in OpenAI's format.
"""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Annotated, Any, ClassVar, Generic, NamedTuple

import msgspec
from fastapi import Query
from starlette.responses import Response

from api.chat_bodies import ChatBody, CompletionBody
from api.dispatch.request import InferenceRequest, InferenceResponse
from api.errors import encode_error, error_body
from api.http.call import Call, ModelCall
from api.http.encode_json import encode_json
from api.http.fast_route import IS_HEAD, StreamedRoute
from api.http.inference import Inference
from api.http.recording import Recording
from api.http.request_options import wants_event_ids
from api.http.router import Router
from api.http.streaming import answer_events, answer_head, begin_events
from api.openai.chat_replies import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatReply,
    CompletionChoice,
    CompletionReply,
    TextUsage,
)
from api.openai.generation import (
    CHAT_PREFIX,
    COMPLETION_PREFIX,
    B,
    BuildReply,
    TextEndpoint,
    answer_id,
    chat_choice,
    chat_logprobs,
    chat_reply,
    completion_logprobs,
    completion_reply,
    extract_message_text,
    first_call,
    inputs_of,
    is_repeatable,
    model_of,
    read_begun_call,
    results_of,
    usage_of,
)
from api.openai.stored import find_stored
from api.predictions.creation import PredictionSnapshot, digest_of
from api.predictions.generation_stream import (
    AddedText,
    GenerationStreams,
    PromptSize,
    StreamShape,
    parse_last_event_id,
)
from api.predictions.service import PredictionNotOver, Predictions
from api.tasks.base import Inputs
from shared.errors import PenstockError
from shared.messages import ItemOutcome
from shared.models.catalog import Catalog, Model
from shared.models.tasks.text import GenerationResult

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode
_MARK = "\x00text\x00"
"""Stands for a text in an event. No ID or name contains it."""

StartingAfter = Annotated[
    str, Query(description="Like `Last-Event-ID`: sends only events after this one.")
]


def failure_event(error: PenstockError) -> bytes:
    """Returns an error event, which OpenAI's clients raise as an exception."""
    return b"data: " + encode_error(error_body(error)) + b"\n\n"


class _TextEvents(StreamShape, Generic[B]):
    """The events of a chat or a completion."""

    _type: ClassVar[type[ChatChunk] | type[CompletionReply]]

    def __init__(self, body: B, completion_id: str, created_at_s: float, model: Model) -> None:
        self._body: B = body
        self._completion_id = completion_id
        self._created = int(created_at_s)
        self._model = model
        options = body.stream_options
        self._has_usage = options is not None and options.include_usage
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        """The parts of a text's event before and after the text, by generation."""

    @abstractmethod
    def _text_choice(self, index: int, text: str) -> ChatChunkChoice | CompletionChoice:
        """Returns a choice with only a text."""

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """Returns the token counts, if they were requested."""
        if not self._has_usage:
            return [DONE]
        usage = usage_of(results_of(outcomes, self._model), self._body.n or 1)
        return [self._event([], usage), DONE]

    def failure(self, error: PenstockError) -> bytes:
        return failure_event(error)

    def _text(self, index: int, text: str) -> bytes:
        """Returns the event for a text. Everything else in it is encoded only once."""
        if index not in self._frames:
            event = self._chunk(self._text_choice(index, _MARK))
            before, after = event.split(_encode(_MARK))
            self._frames[index] = before, after
        before, after = self._frames[index]
        return before + _encode(text) + after

    def _chunk(self, choice: ChatChunkChoice | CompletionChoice) -> bytes:
        return self._event([choice], None if self._has_usage else msgspec.UNSET)

    def _event(self, choices: list[Any], usage: TextUsage | msgspec.UnsetType | None) -> bytes:
        reply = self._type(self._completion_id, self._created, self._model.name, choices, usage)
        return b"data: " + _encode(reply) + b"\n\n"


class ChatEvents(_TextEvents[ChatBody]):
    """A chat's events."""

    _type = ChatChunk

    def __init__(
        self, body: ChatBody, completion_id: str, created_at_s: float, model: Model
    ) -> None:
        super().__init__(body, completion_id, created_at_s, model)
        self._has_tools = bool(body.allowed_tools)
        self._is_forced = bool(body.forced_tools)

    def opening(self, index: int, prompt: PromptSize) -> bytes:
        """Returns the event containing the message's role."""
        return self._chunk(ChatChunkChoice(index, ChatDelta("assistant", "")))

    def delta(self, added: AddedText) -> bytes | None:
        """Returns the event for new text. Text that might be the start of a tool call is held back.

        If a call is required, its arguments are sent as they are generated.
        """
        index, text = added.generation, added.text
        has_logprobs = self._body.logprobs and added.logprobs
        encoded = chat_logprobs(added.logprobs) if has_logprobs else None
        if self._is_forced and (call := self._call_delta(added)):
            return self._chunk(ChatChunkChoice(index, ChatDelta(tool_calls=[call]), encoded))
        if self._has_tools:
            text = extract_message_text(added.now)[len(extract_message_text(added.before)) :]
        if encoded is not None:
            return self._chunk(ChatChunkChoice(index, ChatDelta(content=text), encoded))
        return self._text(index, text) if text else None

    def _text_choice(self, index: int, text: str) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=text))

    def _call_delta(self, added: AddedText) -> dict[str, object] | None:
        """Returns the text added to the first tool call."""
        opened_call, earlier = read_begun_call(added.now), read_begun_call(added.before)
        if opened_call is None:
            return None
        if earlier is None:
            call = first_call(opened_call, f"{self._completion_id}:{added.generation}")
            fields: dict[str, object] = msgspec.to_builtins(call)
            return {"index": 0} | fields
        arguments = opened_call.arguments[len(earlier.arguments) :]
        return {"index": 0, "function": {"arguments": arguments}} if arguments else None

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """Returns the held-back text, the tool calls, and the finish reason."""
        choice = chat_choice(self._body, self._completion_id, index, result)
        events = []
        content = choice.message.content or ""
        if self._has_tools and (rest := content[len(extract_message_text(result.text)) :]):
            events.append(self._chunk(ChatChunkChoice(index, ChatDelta(content=rest))))
        if isinstance(choice.message.tool_calls, list):
            for number, call in enumerate(choice.message.tool_calls):
                if number == 0 and self._is_forced and read_begun_call(result.text) is not None:
                    continue  # already sent while it was being generated
                tool_call = {"index": number} | msgspec.to_builtins(call)
                delta = ChatDelta(tool_calls=[tool_call])
                events.append(self._chunk(ChatChunkChoice(index, delta)))
        ended = ChatChunkChoice(index, ChatDelta(), finish_reason=choice.finish_reason)
        return [*events, self._chunk(ended)]


class CompletionEvents(_TextEvents[CompletionBody]):
    """A completion's events."""

    _type = CompletionReply

    def delta(self, added: AddedText) -> bytes | None:
        """Returns the event for new text."""
        encoded = None
        if self._body.logprobs is not None and added.logprobs:
            encoded = completion_logprobs(added.logprobs, len(added.before))
        if encoded is not None:
            return self._chunk(CompletionChoice(added.generation, added.text, None, encoded))
        return self._text(added.generation, added.text) if added.text else None

    def _text_choice(self, index: int, text: str) -> CompletionChoice:
        return CompletionChoice(index, text, None)

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """Returns the event with the finish reason."""
        return [self._chunk(CompletionChoice(index, "", result.finish_reason))]


router = Router(scope="text", route_class=StreamedRoute)
stored_router = Router(scope="text")


class _Endpoint(NamedTuple, Generic[B]):
    """The differences between the two endpoints."""

    path: str
    id_prefix: str
    reply: BuildReply[B]
    events: Callable[[B, str, float, Model], StreamShape]


CHAT = _Endpoint("/v1/chat/completions", CHAT_PREFIX, chat_reply, ChatEvents)
COMPLETION = _Endpoint("/v1/completions", COMPLETION_PREFIX, completion_reply, CompletionEvents)


@router.post(
    CHAT.path,
    summary="Continue a chat",
    body=ChatBody,
    takes=("X-Penstock-Event-Ids", "Last-Event-ID"),
    reply=ChatReply,
    is_streamed=True,
    lines=TextEndpoint(ChatBody, CHAT_PREFIX, chat_reply),
)
async def create_chat(
    call: ModelCall,
    catalog: Catalog,
    inference: Inference,
    recording: Recording,
    predictions: Predictions,
    generation_streams: GenerationStreams,
) -> Response:
    """Returns the complete message or, with `"stream": true`, streams it token by token.

    With an `Idempotency-Key`, or `X-Penstock-Event-Ids: true`, each event of a stream has an ID. To
    resume after an event, on any instance, send the same request with the same `Idempotency-Key`
    and the event's ID as `Last-Event-ID`.
    """
    body = await call.read_json(ChatBody)
    model = model_of(body, catalog)
    call.use(model)
    new = _NewAnswer(call, CHAT, body, model)
    if body.stream:
        return await new.stream(catalog, recording, generation_streams)
    async with new.compute(inference) as response:
        if not body.store:
            return new.reply(response.outcomes)
        stored = new.request(recording).new_record
        await predictions.keep(stored.prediction, response.outcomes, stored.keep_s)
        return new.reply(response.outcomes, answer_id(CHAT_PREFIX, stored.prediction.id))


@router.post(
    COMPLETION.path,
    summary="Continue a text",
    body=CompletionBody,
    takes=("X-Penstock-Event-Ids", "Last-Event-ID"),
    reply=CompletionReply,
    is_streamed=True,
    lines=TextEndpoint(CompletionBody, COMPLETION_PREFIX, completion_reply),
)
async def create_completion(
    call: ModelCall,
    catalog: Catalog,
    inference: Inference,
    recording: Recording,
    generation_streams: GenerationStreams,
) -> Response:
    """Same as the chat endpoint, but without a chat template."""
    body = await call.read_json(CompletionBody)
    model = model_of(body, catalog)
    call.use(model)
    new = _NewAnswer(call, COMPLETION, body, model)
    if body.stream:
        return await new.stream(catalog, recording, generation_streams)
    async with new.compute(inference) as response:
        return new.reply(response.outcomes)


@stored_router.get(
    "/v1/chat/completions/{completion_id}",
    summary="Get a streamed chat",
    takes=("Last-Event-ID",),
    reply=ChatReply,
    errors=(400, 409, 429, 499, 500, 504),
    is_streamed=True,
)
async def read_chat(
    call: Call,
    catalog: Catalog,
    recording: Recording,
    generation_streams: GenerationStreams,
    completion_id: str,
    stream: bool = False,
    starting_after: StartingAfter = "",
) -> Response:
    """Returns the completed chat or, with `stream=true`, its events, replayed from any ID."""
    snapshot = await find_stored(call, CHAT_PREFIX, CHAT.path, completion_id, recording)
    body = ChatBody.model_validate(snapshot.prediction.input)
    if not stream:
        return encode_json(build_stored_chat(call, snapshot, catalog))
    last_id = call.http.headers.get("last-event-id", "") or starting_after
    with ExitStack() as held:
        held.enter_context(generation_streams.room.reserve(call.tenant))
        events = _EventAnswer(call, CHAT, body, snapshot, catalog)
        return events.follow(last_id, generation_streams, held)


class _NewAnswer(Generic[B]):
    """A response to generate, either whole or as a stream.

    Args:
        model: the model that generates it.

    Raises:
        BadInput: the model can't generate as much as the body requests.
    """

    def __init__(self, call: ModelCall, endpoint: _Endpoint[B], body: B, model: Model) -> None:
        self._call = call
        self._endpoint: _Endpoint[B] = endpoint
        self._body: B = body
        self._model = model
        seed = call.context.key_seed
        self._is_repeatable = is_repeatable(body) or seed is not None
        self._inputs = inputs_of(body, model, secrets.randbelow(2**53) if seed is None else seed)

    def compute(self, inference: Inference) -> AbstractAsyncContextManager[InferenceResponse]:
        """Computes the response. The block returns `reply`."""
        return inference.compute(
            self._call, self._model, self._inputs, is_repeatable=self._is_repeatable
        )

    def reply(self, outcomes: Sequence[ItemOutcome], answer: str = "") -> Response:
        """Returns the whole response.

        Args:
            answer: ID of the response. By default, it is derived from the request's ID.
        """
        facts = self._call.context.facts
        answer = answer or answer_id(self._endpoint.id_prefix, facts.request_id)
        return encode_json(
            self._endpoint.reply(self._body, answer, facts.received_at_s, self._model, outcomes)
        )

    def request(self, recording: Recording) -> InferenceRequest:
        """Returns the request for a prediction that stores the response."""
        request_fields, path = dump_body(self._body), self._endpoint.path
        read = Inputs(
            self._inputs,
            request_fields,
            is_list=len(self._inputs) > 1,
            is_repeatable=self._is_repeatable,
        )
        digest = digest_of(json.dumps([self._model.name, path, request_fields], sort_keys=True))
        return recording.request(self._call, self._model, read, digest=digest, endpoint=path)

    async def stream(
        self, catalog: Catalog, recording: Recording, streams: GenerationStreams
    ) -> Response:
        """Responds with events. With `Last-Event-ID`, sends only the events after that one.

        Raises:
            PenstockError: the generation failed before its first event.
        """
        call, endpoint, body = self._call, self._endpoint, self._body
        last_id = call.http.headers.get("last-event-id", "")
        parse_last_event_id(last_id, len(self._inputs))
        new = self.request(recording)
        with ExitStack() as held:
            held.enter_context(streams.room.reserve(call.tenant))
            snapshot = await recording.start(call, new)
            events = _EventAnswer(call, endpoint, body, snapshot, catalog)
            if last_id:
                return events.follow(last_id, streams, held)
            return await events.begin(call, streams, held)


def dump_body(body: ChatBody | CompletionBody) -> dict[str, Any]:
    """Returns a body in its storage format."""
    return body.model_dump(mode="json", exclude_unset=True, by_alias=True)


class _EventAnswer(Generic[B]):
    """A response that streams a prediction's events."""

    def __init__(
        self,
        call: Call,
        endpoint: _Endpoint[B],
        body: B,
        snapshot: PredictionSnapshot,
        catalog: Catalog,
    ) -> None:
        prediction, model = snapshot.prediction, _model_of(call, snapshot, catalog)
        self._call = call
        self._snapshot = snapshot
        self._items = _items_of(body)
        answer = answer_id(endpoint.id_prefix, prediction.id)
        self._shape = endpoint.events(body, answer, prediction.created_at_s, model)
        self._location = f"{CHAT.path}/{answer}" if endpoint.path == CHAT.path else ""

    async def begin(self, call: ModelCall, streams: GenerationStreams, held: ExitStack) -> Response:
        """Responds with all events of a new prediction. Owns `held` until the last event is sent.

        Raises:
            PenstockError: the prediction failed before its first event.
        """
        seen, has_ids = parse_last_event_id("", self._items), wants_event_ids(call.http.headers)
        events = await begin_events(
            call, streams, self._snapshot, self._shape, seen, has_ids=has_ids
        )
        return answer_events(events, held, self._location)

    def follow(self, last_id: str, streams: GenerationStreams, held: ExitStack) -> Response:
        """Responds with the events after `last_id`. Owns `held` until the last event is sent.

        Raises:
            BadInput: the ID does not belong to this stream.
        """
        seen = parse_last_event_id(last_id, self._items)
        if IS_HEAD in self._call.http.scope:
            return answer_head()
        events = streams.follow(
            self._snapshot, self._shape, seen, self._call.check_key, stays=False, has_ids=True
        )
        return answer_events(events, held, self._location)


def _items_of(body: ChatBody | CompletionBody) -> int:
    prompts = len(body.prompts) if isinstance(body, CompletionBody) else 1
    return prompts * (body.n or 1)


def build_stored_chat(call: Call, snapshot: PredictionSnapshot, catalog: Catalog) -> ChatReply:
    """Returns a prediction's complete chat.

    Raises:
        PredictionNotOver: the response is still being generated.
        PenstockError: the prediction failed.
    """
    prediction, record = snapshot
    if not record.is_over:
        raise PredictionNotOver(
            "the completion is still being generated; stream it or try again later"
        )
    if record.state != "succeeded" or record.reply is None:
        raise snapshot.failure
    body = ChatBody.model_validate(prediction.input)
    model = _model_of(call, snapshot, catalog)
    completion_id = answer_id(CHAT_PREFIX, prediction.id)
    reply = chat_reply(body, completion_id, prediction.created_at_s, model, record.reply.outcomes)
    reply.metadata = body.metadata or {}
    return reply


def _model_of(call: Call, snapshot: PredictionSnapshot, catalog: Catalog) -> Model:
    model = catalog.find(snapshot.prediction.model)
    call.use(model)
    return model
