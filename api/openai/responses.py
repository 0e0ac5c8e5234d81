"""/v1/responses in OpenAI's shape: creates, reads, streams and deletes responses.

A response that is streamed or computed in the background is a prediction, which any instance can
serve.

The sequence number of an event follows from the tokens that a reader has with it, not from the
number of earlier events: it is the same on every instance, also if one could not read the tokens
for a while. The first events have the numbers 0 to 3. An event with tokens has 3 plus the number of
tokens so far. The final events are numbered after the maximum number of tokens. So numbers grow,
with gaps.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from api.chat_bodies import ChatBody
from api.errors import NotFound, NotNow, PreviousResponseNotFound
from api.http import openapi
from api.http.fast_route import IS_HEAD, StreamedRoute
from api.http.openapi import inference_body, inference_responses, streamed
from api.http.request import ApiRequest, authenticate, open_request, while_connected
from api.openai.generation import (
    chat_choice,
    inputs_of,
    is_repeatable,
    model_of,
    results_of,
    shown_of,
)
from api.openai.responses_schemas import (
    IncompleteDetails,
    InputDetails,
    LogprobOfText,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ResponseBody,
    ResponseDeleted,
    ResponseError,
    ResponseReply,
    ResponseStatus,
    ResponseUsage,
    WrittenDetails,
)
from api.predictions.service import GRACE_S, PredictionSnapshot, digest_of
from api.predictions.text_stream import HeldResponse, StreamPosition
from api.tasks.base import Inputs
from shared.catalog import Model
from shared.errors import BadInput
from shared.messages import ItemOutcome, reason_of
from shared.predictions import EVENTS_TYPE, ended_at_s, error_of
from shared.tasks.text import GenerationInput, GenerationResult, TokenLogprob

_ITEM, _PART = 2, 3
"""The numbers of the events that begin a message."""
_encode = msgspec.json.Encoder().encode


class ResponseEvents:
    """The answer to one request, and its events after number `after`.

    Args:
        body: the body of the request. Its `max_output_tokens` is set if events are sent.
        made: the id of the answer.
        created_at_s: when it was requested.
        model: the model that generates it.
        after: the sequence number of the last event that the reader has. -1: none.
    """

    def __init__(
        self, body: ResponseBody, made: str, created_at_s: float, model: Model, after: int = -1
    ) -> None:
        self._body = body
        self._chat = body.to_chat()
        self._made = made
        self._created = int(created_at_s)
        self._model = model
        self._after = after
        self._has_tools = bool(self._chat.allowed_tools)
        self._first_end = _PART + (body.max_output_tokens or 0) + 1
        self._last = self._first_end

    @property
    def seen(self) -> tuple[bool, int, int]:
        """State of a reader after event `after`: the opening, tokens, and pieces of the end."""
        if self._after < _PART:
            return False, 0, 0
        if self._after < self._first_end:
            return True, self._after - _PART, 0
        return True, self._first_end - _PART - 1, self._after - self._first_end + 1

    def reply(self, status: ResponseStatus, **facts: Any) -> ResponseReply:
        """Returns the answer without its output."""
        body = self._body
        given = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return ResponseReply(
            id=self._made,
            created_at=self._created,
            model=self._model.name,
            status=status,
            instructions=body.instructions,
            background=bool(body.background),
            max_output_tokens=body.max_output_tokens,
            previous_response_id=body.previous_response_id,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=1.0 if body.temperature is None else body.temperature,
            text=given.get("text") or {"format": {"type": "text"}},
            tool_choice=given.get("tool_choice") or "auto",
            tools=given.get("tools") or [],
            top_p=1.0 if body.top_p is None else body.top_p,
            max_tool_calls=body.max_tool_calls,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=body.reasoning,
            safety_identifier=body.safety_identifier,
            store=body.is_kept,
            top_logprobs=body.top_logprobs or 0,
            user=body.user,
            **facts,
        )

    def whole(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> ResponseReply:
        """Returns the answer with its output, which was written until `ended_at_s`."""
        (result,) = results_of(outcomes, self._model)
        is_cut = result.finish_reason == "length"
        return self.reply(
            "incomplete" if is_cut else "completed",
            output=self._output(result),
            completed_at=None if is_cut else int(ended_at_s),
            incomplete_details=IncompleteDetails() if is_cut else None,
            usage=ResponseUsage(
                result.input_tokens,
                InputDetails(result.cached_tokens),
                result.output_tokens,
                WrittenDetails(),
                result.input_tokens + result.output_tokens,
            ),
        )

    def _output(self, result: GenerationResult) -> list[OutputItem]:
        message = chat_choice(self._chat, self._made, 0, result).message
        calls = message.tool_calls if isinstance(message.tool_calls, list) else []
        items: list[OutputItem] = []
        if message.content or not calls:
            encoded = self._logprobs(result.logprobs)
            is_cut = result.finish_reason == "length" and not calls
            said = [OutputText(message.content or "", logprobs=encoded)]
            items.append(self._message(said, "incomplete" if is_cut else "completed"))
        return items + [
            OutputCall(
                f"fc_{number}_{self._made}", call.id, call.function.name, call.function.arguments
            )
            for number, call in enumerate(calls)
        ]

    def _message(self, content: list[OutputText], status: str = "completed") -> OutputMessage:
        return OutputMessage(f"msg_{self._made}", content, status)

    def opening(self, index: int) -> bytes | None:
        """Returns the event for a created answer."""
        begun = self.reply("in_progress")
        return self._joined(
            self._event(0, "response.created", response=begun),
            self._event(1, "response.in_progress", response=begun),
        )

    def delta(
        self,
        index: int,
        before: str,
        text: str,
        logprobs: Sequence[TokenLogprob],
        at: tuple[int, int],
    ) -> bytes | None:
        """Returns the addition to the message. A possible start of a tool call is held back."""
        shown, now = self._shown(before), self._shown(before + text)
        if now == shown:
            return None
        encoded = self._logprobs(logprobs)
        tokens, ended = at
        number = self._first_end + ended - 1 if ended else _PART + tokens
        begin = [] if shown else self._begin(_ITEM, _PART)
        return self._joined(*begin, self._delta(number, now[len(shown) :], encoded))

    def _logprobs(self, given: Sequence[TokenLogprob]) -> list[LogprobOfText]:
        """Returns the requested ones."""
        return [_shown_logprob(one) for one in given] if self._body.has_logprobs else []

    def _shown(self, text: str) -> str:
        return shown_of(text) if self._has_tools else text

    def _begin(self, item: int, part: int) -> list[bytes]:
        added = self._message([], "in_progress")
        return [
            self._event(item, "response.output_item.added", output_index=0, item=added),
            self._event(part, "response.content_part.added", **self._place(), part=OutputText("")),
        ]

    def _delta(self, number: int, text: str, logprobs: list[LogprobOfText]) -> bytes:
        kind = "response.output_text.delta"
        return self._event(number, kind, **self._place(), delta=text, logprobs=logprobs)

    def _place(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._made}", "output_index": 0, "content_index": 0}

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """Returns the text held back, and the ends of items, numbered from the piece before."""
        events: list[tuple[str, dict[str, Any]]] = []
        shown = self._shown(result.text)
        for at, item in enumerate(self._output(result)):
            if isinstance(item, OutputMessage):
                events += self._message_end(item, shown)
            else:
                events += _call_events(item, at)
        first = self._first_end + 1
        self._last = first + len(events)
        return [
            self._event(first + at, kind, **facts, is_kept=True)
            for at, (kind, facts) in enumerate(events)
        ]

    def _message_end(self, item: OutputMessage, shown: str) -> list[tuple[str, dict[str, Any]]]:
        (part,), place = item.content, self._place()
        events: list[tuple[str, dict[str, Any]]] = []
        if not shown:
            added = {"output_index": 0, "item": self._message([], "in_progress")}
            events.append(("response.output_item.added", added))
            events.append(("response.content_part.added", {**place, "part": OutputText("")}))
        if rest := part.text[len(shown) :]:
            facts = {**place, "delta": rest, "logprobs": []}
            events.append(("response.output_text.delta", facts))
        done = {**place, "text": part.text, "logprobs": part.logprobs}
        events.append(("response.output_text.done", done))
        events.append(("response.content_part.done", {**place, "part": part}))
        events.append(("response.output_item.done", {"output_index": 0, "item": item}))
        return events

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """Returns the whole answer."""
        whole = self.whole(outcomes, ended_at_s)
        event = self._event(self._last, f"response.{whole.status}", response=whole)
        return [event] if event else []

    def failure(self, code: str, message: str) -> bytes:
        """Returns the event for a failed answer."""
        failed = self.failed(code, message)
        return self._event(self._last, "response.failed", response=failed, is_kept=True)

    def failed(self, code: str, message: str) -> ResponseReply:
        """Returns the failed answer, with its error."""
        if code == "canceled":
            return self.reply("cancelled")
        return self.reply("failed", error=ResponseError(code, message))

    def _event(self, number: int, kind: str, *, is_kept: bool = False, **facts: Any) -> bytes:
        """Returns an event. Empty if the reader has it."""
        if number <= self._after and not is_kept:
            return b""
        event = {"type": kind, "sequence_number": number, **facts}
        return f"event: {kind}\n".encode() + b"data: " + _encode(event) + b"\n\n"

    def _joined(self, *events: bytes) -> bytes | None:
        return b"".join(events) or None


def _shown_logprob(one: TokenLogprob) -> LogprobOfText:
    tops = [LogprobOfText(top.token, top.logprob, list(top.data)) for top in one.top]
    return LogprobOfText(one.token, one.logprob, list(one.data), tops)


def _call_events(call: OutputCall, at: int) -> list[tuple[str, dict[str, Any]]]:
    """Returns the events of a call, which comes in one piece."""
    place = {"output_index": at, "item_id": call.id}
    begun = msgspec.structs.replace(call, arguments="", status="in_progress")
    written = {**place, "arguments": call.arguments, "name": call.name}
    return [
        ("response.output_item.added", {"output_index": at, "item": begun}),
        ("response.function_call_arguments.delta", {**place, "delta": call.arguments}),
        ("response.function_call_arguments.done", written),
        ("response.output_item.done", {"output_index": at, "item": call}),
    ]


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
            f"max_output_tokens: {model.name} generates at most {longest} tokens",
            field="max_output_tokens",
        )
    seed = call.context.key_seed
    inputs = inputs_of(chat, model, secrets.randbelow(2**53) if seed is None else seed)
    if body.is_kept:
        return await _create_kept(call, body, model, inputs)
    repeats = is_repeatable(chat) or seed is not None
    made = "resp_" + call.context.facts.request_id.removeprefix("req_")
    events = ResponseEvents(body, made, call.context.facts.received_at_s, model)
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
    """The current state of a streamed or background response. With `stream=true` its events."""
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
    """Returns the request with what came before it."""
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
    # Numbers of events follow from the maximum number of tokens, so it is stored now.
    shown = body.model_dump(mode="json", exclude_unset=True, by_alias=True)
    shown["max_output_tokens"] = inputs[0].max_tokens
    read = Inputs(inputs, shown, is_list=False, is_repeatable=is_repeatable(body.to_chat()))
    digest = digest_of(json.dumps([model.name, PATH, shown], sort_keys=True))
    new = call.recorded(model, read, digest=digest, endpoint=PATH)
    with ExitStack() as held:
        if body.stream:
            held.enter_context(call.dependencies.text_streams.reserved(call.tenant))
        async with call.created(new, waits=body.waits) as creation:
            if body.waits:
                left_s = new.deadline_s + GRACE_S - time.time()
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
    """Returns the events behind `after`. Frees what is `held` at the end."""
    with held:
        body, events = _events_of(call, snapshot, after)
        if IS_HEAD in call.http.scope:
            return Response(headers=_HEADERS, media_type=EVENTS_TYPE)
        stays = bool(body.background or not body.stream)
        seen = [StreamPosition(*events.seen)]
        sse = call.dependencies.text_streams.follow(
            snapshot, events, seen, call.check_key, stays=stays
        )
        headers = {**_HEADERS, "location": f"{PATH}/{snapshot.prediction.id}"}
        return HeldResponse(sse, held.pop_all(), headers=headers, media_type=EVENTS_TYPE)


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
