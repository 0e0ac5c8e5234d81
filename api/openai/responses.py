"""/v1/responses as in OpenAI's API: creates, reads, streams, and deletes responses.

Responses are stored unless `store` is false. A streamed or background response is a prediction, so
any instance can serve it. Other responses are stored as predictions once they are complete.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from fastapi import Query
from pydantic import ValidationError
from starlette.responses import Response

from api.chat_bodies import ChatBody
from api.dispatch.request import InferenceRequest
from api.errors import (
    KeyReused,
    NotFound,
    NotNow,
    PreviousResponseNotFound,
    describe,
    to_bad_input,
)
from api.http.call import Call, ModelCall
from api.http.encode_json import encode_json
from api.http.fast_route import IS_HEAD, StreamedRoute
from api.http.inference import Inference
from api.http.recording import Recording
from api.http.router import Router
from api.http.streaming import answer_events, answer_head, begin_events
from api.openai.conversations import CallerConversations, add_to, as_stored
from api.openai.generation import RESPONSE_PREFIX, answer_id, inputs_of, is_repeatable, model_of
from api.openai.item_pages import After, ItemsPage, Limit, Order, page_of
from api.openai.response_events import ResponseEvents, as_asked
from api.openai.responses_schemas import ResponseBody, ResponseDeleted, ResponseReply
from api.openai.stored import (
    PATH_OF_RESPONSES,
    find_response,
    format_items,
    read_referenced_items,
    response_of,
    state_of,
)
from api.predictions.conversations import Conversations
from api.predictions.creation import PredictionSnapshot, digest_of, ids_of
from api.predictions.generation_stream import GenerationStreams, StreamPosition
from api.predictions.service import PredictionNotOver, Predictions
from api.tasks.base import Inputs
from shared.errors import BadInput, InputTooLarge, Overloaded, PenstockError, Unavailable
from shared.messages import ItemOutcome
from shared.models.catalog import Catalog, Model
from shared.models.tasks.text import GenerationInput

PATH = PATH_OF_RESPONSES
UNSTORED_KEEP_S = 120
"""How many seconds an unstored stream can be resumed after it ends."""
StartingAfter = Annotated[
    int, Query(ge=-1, le=2**31, description="Only events with a greater `sequence_number`.")
]


@contextmanager
def words_of_responses() -> Iterator[None]:
    """Replaces chat fields with response fields in errors raised inside the block."""
    try:
        yield
    except BadInput as error:
        raise as_asked(error) from error


router = Router(scope="text", route_class=StreamedRoute)
stored_router = Router(scope="text")


@router.post(
    PATH,
    summary="Get a response",
    body=ResponseBody,
    reply=ResponseReply,
    is_streamed=True,
)
async def create_response(
    call: ModelCall,
    catalog: Catalog,
    inference: Inference,
    recording: Recording,
    predictions: Predictions,
    conversations: Conversations,
    generation_streams: GenerationStreams,
) -> Response:
    """Works like the chat endpoint, but returns items.

    With `"background": true`, returns immediately and generates the text even if nobody reads it.
    Unless `store` is false, responses can be retrieved and continued later.
    """
    preceding = PrecedingItems(call, catalog, recording, predictions, conversations)
    full_request = await preceding.complete(await call.read_json(ResponseBody))
    body = full_request.body
    chat = _chat_of(body)
    model = model_of(chat, catalog)
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
        new = _NewResponse(call, full_request, model, inputs, recording, conversations)
        if body.stream or body.background:
            return await new.start(catalog, generation_streams)
        repeats = is_repeatable(chat) or seed is not None
        async with inference.compute(call, model, inputs, is_repeatable=repeats) as response:
            return encode_json(await new.keep(response.outcomes, predictions))


@stored_router.get(
    "/v1/responses/{response_id}",
    summary="Get a response again",
    reply=ResponseReply,
    errors=(400, 429, 500),
    is_streamed=True,
)
async def read_response(
    call: Call,
    catalog: Catalog,
    recording: Recording,
    generation_streams: GenerationStreams,
    response_id: str,
    stream: bool = False,
    starting_after: StartingAfter = -1,
) -> Response:
    """Returns a stored response's current state or, with `stream=true`, its events."""
    snapshot = await find_response(call, response_id, recording, is_resumed=stream)
    if not stream:
        return encode_json(state_of(call, snapshot, catalog))
    with ExitStack() as held:
        held.enter_context(generation_streams.room.reserve(call.tenant))
        events = _EventAnswer(call, snapshot, catalog, generation_streams)
        return events.follow(starting_after, held)


@stored_router.get(
    "/v1/responses/{response_id}/input_items",
    summary="List the input of a response",
    reply=ItemsPage,
    errors=(400,),
)
async def list_input_items(
    call: Call,
    recording: Recording,
    response_id: str,
    limit: Limit = 20,
    order: Order = "desc",
    after: After = "",
) -> Response:
    """Lists the model's complete input, including the part from `previous_response_id`."""
    snapshot = await find_response(call, response_id, recording)
    body, digits = ResponseBody.model_validate(snapshot.prediction.input), response_id[-24:]
    items = [item.model_dump(mode="json", exclude_unset=True) for item in body.items]
    return encode_json(page_of(format_items(items, digits), limit, order, after))


@stored_router.post(
    "/v1/responses/{response_id}/cancel",
    summary="Cancel a response",
    reply=ResponseReply,
    errors=(400,),
)
async def cancel_response(
    call: Call,
    catalog: Catalog,
    recording: Recording,
    predictions: Predictions,
    response_id: str,
) -> Response:
    """Cancels a background response unless it has already finished."""
    snapshot = await find_response(call, response_id, recording)
    if not snapshot.prediction.input.get("background"):
        raise BadInput(
            "Cannot cancel a synchronous response. Only responses created with background: "
            "true can be canceled; to stop any other response, close its connection",
            field="response_id",
        )
    canceled = await predictions.cancel(call.tenant, snapshot.prediction.id)
    return encode_json(state_of(call, canceled, catalog))


@stored_router.delete(
    "/v1/responses/{response_id}",
    summary="Delete a response",
    reply=ResponseDeleted,
    errors=(409,),
)
async def delete_response(
    call: Call, recording: Recording, predictions: Predictions, response_id: str
) -> Response:
    snapshot = await find_response(call, response_id, recording)
    try:
        await predictions.delete(call.tenant, snapshot.prediction.id)
    except PredictionNotOver as error:
        raise PredictionNotOver("the response has not finished; cancel it first") from error
    return encode_json(ResponseDeleted(response_id))


class WholeRequest(NamedTuple):
    """A request with everything that precedes its input, and its new items."""

    body: ResponseBody
    own: list[dict[str, Any]]
    conversation: str
    """ID of the conversation to append to. Empty if there is none."""
    digest: str = ""
    """Digest of the request as sent, without the conversation's items, which may have changed when
    it is repeated. Empty if there is no conversation.
    """


class PrecedingItems:
    """The items a request refers to, taken from its conversation or from stored responses."""

    def __init__(
        self,
        call: ModelCall,
        catalog: Catalog,
        recording: Recording,
        predictions: Predictions,
        conversations: Conversations,
    ) -> None:
        self._call = call
        self._catalog = catalog
        self._recording = recording
        self._conversations = CallerConversations(call, catalog, predictions, conversations)

    async def complete(self, body: ResponseBody) -> WholeRequest:
        """Returns the request with references resolved and preceding items included.

        If an earlier attempt with the same Idempotency-Key created the response, the items are the
        ones that it read.

        Raises:
            BadInput: the request is not valid with the resolved items. PenstockError: the items
                can't be read.
        """
        conversation, before, digest = body.conversation_id, list[dict[str, Any]](), ""
        if conversation:
            digest = digest_of(json.dumps([PATH, _dump_body(body)], sort_keys=True))
            if (begun := await self._find_begun(body, digest)) is not None:
                return begun
            before = await self._items_of(conversation, _count_items(body))
        if body.references:
            known = {item["id"]: item for item in before}
            names = [name for name in body.references if name not in known]
            referenced = await read_referenced_items(
                self._call, names, self._catalog, self._recording
            )
            body = body.with_items(known | referenced)
        own = body.dumped_items
        if body.previous_response_id is not None:
            before = await self._items_before(body.previous_response_id)
        try:
            body = body.behind(before) if before else body
            return WholeRequest(body, own, conversation, digest)
        except ValidationError as error:
            field = "conversation" if conversation else "previous_response_id"
            reason = f"{field}: {describe(error.errors()[0])[1]}"
            raise BadInput(reason, field=field) from error

    async def _find_begun(self, body: ResponseBody, digest: str) -> WholeRequest | None:
        """Returns the request whose response an earlier attempt with the same key created.

        None if there is none. Responses that are neither streamed nor created in the background are
        only stored after they are in their conversation.
        """
        key = self._call.options.idempotency_key
        if not key or not (body.stream or body.background):
            return None
        response_id = answer_id(RESPONSE_PREFIX, ids_of(self._call.tenant, "", key)[0])
        try:
            snapshot = await find_response(
                self._call, response_id, self._recording, is_resumed=True
            )
        except NotFound:
            return None
        if snapshot.prediction.digest != digest:
            raise KeyReused
        begun = ResponseBody.model_validate(snapshot.prediction.input)
        before = len(begun.items) - _count_items(body)
        return WholeRequest(begun, begun.dumped_items[before:], body.conversation_id, digest)

    async def _items_of(self, conversation: str, new: int) -> list[dict[str, Any]]:
        """Returns a conversation's items, provided it has room for `new` items and their output.

        Raises:
            InputTooLarge: the conversation is full.
        """
        try:
            contents = await self._conversations.read_complete(conversation)
        except NotFound as error:
            raise NotFound(error.message, field="conversation") from error
        if contents.room <= new:
            raise InputTooLarge(
                f"conversation: only {contents.room} more items fit, which is not enough for the "
                "input and output; start a new conversation",
                field="conversation",
            )
        return contents.items

    async def _items_before(self, previous: str) -> list[dict[str, Any]]:
        """Returns a previous response's input and output."""
        try:
            snapshot = await find_response(self._call, previous, self._recording)
        except NotFound as error:
            raise PreviousResponseNotFound(
                f"Previous response with id '{previous[:80]}' not found.",
                field="previous_response_id",
            ) from error
        reply = state_of(self._call, snapshot, self._catalog)
        if reply.status not in ("completed", "incomplete"):
            raise NotNow(
                f"previous_response_id: that response's status is {reply.status}, so it has no "
                "output",
                field="previous_response_id",
            )
        earlier = ResponseBody.model_validate(snapshot.prediction.input)
        output: list[dict[str, Any]] = msgspec.to_builtins(reply.output)
        return [*earlier.dumped_items, *output]


def _count_items(body: ResponseBody) -> int:
    return len(body.items) + len(body.references)


def _chat_of(body: ResponseBody) -> ChatBody:
    try:
        return body.to_chat()
    except ValidationError as error:
        raise as_asked(to_bad_input(error)) from error


@dataclass(frozen=True, slots=True)
class _NewResponse:
    """A response to create.

    Args:
        model: the model that generates the response.
        inputs: the model's input, which is a single item.
    """

    call: ModelCall
    full_request: WholeRequest
    model: Model
    inputs: Sequence[GenerationInput]
    recording: Recording
    conversations: Conversations

    async def start(self, catalog: Catalog, streams: GenerationStreams) -> Response:
        """Creates a prediction. Responds with its state or, if requested, with its events."""
        call, full_request = self.call, self.full_request
        body = full_request.body
        # Event numbers depend on the maximum number of tokens, so that maximum is stored now.
        fields = _dump_body(body) | {"max_output_tokens": self.inputs[0].max_tokens}
        new = self._request(fields, full_request.digest)
        if not body.is_kept and not full_request.conversation:
            new = msgspec.structs.replace(
                new, record=msgspec.structs.replace(new.new_record, keep_s=UNSTORED_KEEP_S)
            )
        with ExitStack() as held:
            if body.stream:
                held.enter_context(streams.room.reserve(call.tenant))
            async with self.recording.create(call, new, waits=False) as creation:
                if full_request.conversation:
                    await self._append_pending(creation.snapshot, streams)
            if body.stream:
                events = _EventAnswer(call, creation.snapshot, catalog, streams)
                if body.background:
                    return events.follow(-1, held)
                return await events.begin(call, held)
        return encode_json(state_of(call, creation.snapshot, catalog))

    async def _append_pending(
        self, snapshot: PredictionSnapshot, streams: GenerationStreams
    ) -> None:
        """Appends a response to its conversation.

        If that fails, cancels the response, unless a retry with its key may still append it.
        """
        prediction = snapshot.prediction
        try:
            await self._append(self._own_items_of(prediction.id), prediction=prediction.id)
        except PenstockError as error:
            may_be_retried = isinstance(error, NotNow | Unavailable)
            if not (may_be_retried and self.call.options.idempotency_key):
                streams.leave(prediction, 0.0)  # its caller only gets the error
            raise

    def _own_items_of(self, prediction: str) -> list[dict[str, Any]]:
        """Returns the new items, with the IDs that they have in the response's input."""
        items = self.full_request.body.dumped_items
        before = len(items) - len(self.full_request.own)
        return format_items(items, prediction.rpartition("_")[2])[before:]

    async def keep(
        self, outcomes: Sequence[ItemOutcome], predictions: Predictions
    ) -> ResponseReply:
        """Appends a finished response to its conversation, and stores it if requested.

        Once a response is stored in either place, it can be read, but a failed request is not
        charged, so nothing may fail after that point. If there is no room or Redis is unreachable,
        the response is still returned, marked as not stored, unless the request explicitly asks to
        store it and has no conversation.
        """
        full_request, body = self.full_request, self.full_request.body
        prediction = self._request(_dump_body(body)).new_record.prediction
        response_id = answer_id(RESPONSE_PREFIX, prediction.id)
        events = ResponseEvents(body, response_id, prediction.created_at_s, self.model)
        reply = events.whole(outcomes, time.time())
        if full_request.conversation:
            await self._append([*as_stored(full_request.own), *msgspec.to_builtins(reply.output)])
        if not body.is_kept:
            return reply
        try:
            keep_s = self.call.caller.plan.prediction_keep_s
            await predictions.keep(prediction, outcomes, keep_s)
        except PenstockError as error:
            has_no_room = isinstance(error, Overloaded | Unavailable)
            if not full_request.conversation and (body.store or not has_no_room):
                raise
            reply.store = False
        return reply

    def _request(self, raw_input: dict[str, Any], digest: str = "") -> InferenceRequest:
        repeats = is_repeatable(self.full_request.body.to_chat())
        read = Inputs(self.inputs, raw_input, is_list=False, is_repeatable=repeats)
        if not digest:
            digest = digest_of(json.dumps([self.model.name, PATH, raw_input], sort_keys=True))
        return self.recording.request(self.call, self.model, read, digest=digest, endpoint=PATH)

    async def _append(self, items: Sequence[dict[str, Any]], *, prediction: str = "") -> None:
        await add_to(
            self.call,
            self.full_request.conversation,
            items,
            self.conversations,
            model=self.model.name,
            prediction=prediction,
        )


def _dump_body(body: ResponseBody) -> dict[str, Any]:
    """Returns a body in its storage format."""
    return body.model_dump(mode="json", exclude_unset=True, by_alias=True)


class _EventAnswer:
    """Streams a response's events.

    Readers resume by sequence number, so the events need no other IDs.
    """

    def __init__(
        self,
        call: Call,
        snapshot: PredictionSnapshot,
        catalog: Catalog,
        streams: GenerationStreams,
    ) -> None:
        self._call = call
        self._snapshot = snapshot
        self._catalog = catalog
        self._streams = streams
        self._location = f"{PATH}/{answer_id(RESPONSE_PREFIX, snapshot.prediction.id)}"

    async def begin(self, call: ModelCall, held: ExitStack) -> Response:
        """Sends all events of a new response. Owns `held` until the last event is sent.

        Raises:
            PenstockError: the prediction failed before its first event.
        """
        _, shape = response_of(call, self._snapshot, self._catalog)
        seen = [StreamPosition(*shape.seen)]
        events = await begin_events(
            call, self._streams, self._snapshot, shape, seen, has_ids=False, has_numbers=True
        )
        return answer_events(events, held, self._location)

    def follow(self, after: int, held: ExitStack) -> Response:
        """Sends the events after number `after`. Owns `held` until the last event is sent."""
        body, events = response_of(self._call, self._snapshot, self._catalog, after)
        if IS_HEAD in self._call.http.scope:
            return answer_head()
        sse = self._streams.follow(
            self._snapshot,
            events,
            [StreamPosition(*events.seen)],
            self._call.check_key,
            stays=bool(body.background or not body.stream),
            has_ids=False,
        )
        return answer_events(sse, held, self._location)
