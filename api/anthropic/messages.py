"""POST /v1/messages: Anthropic's chat API, with complete or streamed responses, and its errors.

https://docs.claude.com/en/docs/build-with-claude/streaming
https://docs.claude.com/en/api/errors
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from api.anthropic.schemas import (
    AnthropicError,
    AnthropicErrorReply,
    CountBody,
    MessageReply,
    MessagesBody,
    MessagesUsage,
    ShownBlock,
    ShownText,
    ShownToolUse,
    StopReason,
    TokenCountReply,
)
from api.chat_bodies import ChatBody
from api.dispatch.request import InferenceRequest
from api.errors import (
    ERROR_MAPPINGS,
    encode_error,
    headers_for,
    set_error_code,
    to_known_error,
)
from api.http.call import ModelCall
from api.http.encode_json import encode_json
from api.http.inference import Inference
from api.http.middleware import context_of
from api.http.recording import Recording
from api.http.router import Router
from api.http.streaming import answer_events, begin_events
from api.openai.chat_replies import ChatChoice
from api.openai.generation import (
    answer_id,
    chat_choice,
    extract_message_text,
    inputs_of,
    is_repeatable,
    model_of,
    results_of,
)
from api.openai.token_counts import count_chat
from api.predictions.creation import digest_of
from api.predictions.generation_stream import (
    AddedText,
    GenerationStreams,
    PromptSize,
    StreamPosition,
)
from api.problem_details import ErrorRoute
from api.tasks.base import Inputs
from shared.errors import BadInput, PenstockError, error_for_code
from shared.messages import ItemOutcome
from shared.models.catalog import Catalog, Model
from shared.models.tasks.text import GenerationResult

PATH = "/v1/messages"
MESSAGE = "msg_"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config",
}
"""Chat fields that have different names in a messages request."""

_CONTEXT = re.compile(
    r"maximum context length is (\d+) tokens\. .*\((\d+) in the messages, (\d+) in the completion\)"
)


class AnthropicRoute(ErrorRoute):
    """A route whose errors use Anthropic's format."""

    error_reply = AnthropicErrorReply

    def respond(self, request: Request, error: Exception) -> Response:
        """Returns the error in Anthropic's format."""
        set_error_code(request, error)
        return _response(request, to_known_error(error))


def error_reply(error: PenstockError, request_id: str | None = None) -> AnthropicErrorReply:
    """Returns the response body for `error`, which is also the event that ends a stream."""
    status = ERROR_MAPPINGS.get(error.code, ERROR_MAPPINGS["internal"]).status
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = as_asked(error).public_message
    return AnthropicErrorReply(AnthropicError(kind, message), request_id)


def as_asked(error: PenstockError) -> PenstockError:
    """Returns the error, with a chat field's name replaced by the name that the client sent.

    A prompt that is too long is rejected with Anthropic's wording, because clients and proxies
    check for it.
    """
    if sizes := _CONTEXT.search(error.public_message):
        limit, prompt, written = map(int, sizes.groups())
        message = f"prompt is too long: {prompt} tokens > {limit} maximum"
        if prompt < limit:
            message = (
                f"input length and `max_tokens` exceed context limit: {prompt} + {written} > "
                f"{limit}, decrease input length or `max_tokens` and try again"
            )
        return error_for_code(error.code, message, error.field)
    field = _FIELDS.get(error.field or "")
    if field is None:
        return error
    message = re.sub(rf"^{error.field}\b", field, error.public_message)
    return error_for_code(error.code, message, field)


def _response(request: Request, error: PenstockError) -> Response:
    status = ERROR_MAPPINGS.get(error.code, ERROR_MAPPINGS["internal"]).status
    body = encode_error(error_reply(error, context_of(request).shown_id))
    return Response(body, status, headers_for(error), "application/json")


class MessageEvents:
    """One request's response, and the events that stream it.

    Args:
        model: the model that generates the response.
    """

    def __init__(self, chat: ChatBody, message_id: str, model: Model) -> None:
        self._chat = chat
        self._made = message_id
        self._model = model
        self._has_tools = bool(chat.allowed_tools)

    def whole(self, outcomes: Sequence[ItemOutcome]) -> MessageReply:
        (result,) = results_of(outcomes, self._model)
        choice = chat_choice(self._chat, self._made, 0, result)
        reason, stop = _stop_reason(choice, result)
        return MessageReply(
            self._made, self._model.name, _blocks(choice), reason, _usage(result), stop
        )

    def opening(self, index: int, prompt: PromptSize) -> bytes:
        """Returns the event that begins a message, with the prompt's token counts."""
        usage = _usage_of(prompt, written=0)
        message = MessageReply(self._made, self._model.name, [], None, usage)
        return _event("message_start", message=message)

    def delta(self, added: AddedText) -> bytes | None:
        """Returns the event for new text. Text that may start a tool call is held back."""
        visible_before, now = self._show_text(added.before), self._show_text(added.now)
        if now == visible_before:
            return None
        return (b"" if visible_before else _begin(0, ShownText(""))) + _text_delta(
            now[len(visible_before) :]
        )

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """Returns events for held-back text, tool calls, the stop reason, and usage."""
        visible_text = self._show_text(result.text)
        choice = chat_choice(self._chat, self._made, index, result)
        blocks, events = _blocks(choice), []
        text = blocks[0].text if blocks and isinstance(blocks[0], ShownText) else ""
        if text or visible_text:
            if not visible_text:
                events.append(_begin(0, ShownText("")))
            if rest := text[len(visible_text) :]:
                events.append(_text_delta(rest))
            events.append(_event("content_block_stop", index=0))
        for at, block in enumerate(blocks):
            if isinstance(block, ShownToolUse):
                events.append(_begin(at, msgspec.structs.replace(block, input={})))
                # Like `whole`, writes NaN, which is not valid JSON, as null.
                arguments = msgspec.json.encode(block.input).decode()
                written = {"type": "input_json_delta", "partial_json": arguments}
                events.append(_event("content_block_delta", index=at, delta=written))
                events.append(_event("content_block_stop", index=at))
        reason, stop = _stop_reason(choice, result)
        ended = {"stop_reason": reason, "stop_sequence": stop}
        return [*events, _event("message_delta", delta=ended, usage=_usage(result))]

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        return [_event("message_stop")]

    def failure(self, error: PenstockError) -> bytes:
        return b"event: error\ndata: " + encode_error(error_reply(error)) + b"\n\n"

    def _show_text(self, text: str) -> str:
        return extract_message_text(text) if self._has_tools else text


def _event(kind: str, **facts: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, **facts})
    return f"event: {kind}\n".encode() + b"data: " + data + b"\n\n"


def _begin(index: int, block: ShownBlock) -> bytes:
    return _event("content_block_start", index=index, content_block=block)


def _text_delta(text: str) -> bytes:
    return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


def _blocks(choice: ChatChoice) -> list[ShownBlock]:
    """Returns the text, if any, followed by the tool calls."""
    message = choice.message
    calls = message.tool_calls if isinstance(message.tool_calls, list) else []
    blocks: list[ShownBlock] = [ShownText(message.content)] if message.content else []
    return blocks + [
        ShownToolUse(f"toolu_{call.id.removeprefix('call_')}", call.function.name, _input(call))
        for call in calls
    ]


def _input(call: Any) -> dict[str, Any]:
    """Returns a call's arguments as an object.

    A model may generate something other than an object, or be cut off partway through.
    """
    try:
        # Uses the request-body parser, which limits nesting and rejects lone surrogates.
        arguments = from_json(call.function.arguments)
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {"value": arguments}


def _stop_reason(choice: ChatChoice, result: GenerationResult) -> tuple[StopReason, str | None]:
    """Returns the reason the message ended, and the stop sequence that ended it, if any."""
    if choice.finish_reason == "tool_calls":
        return "tool_use", None
    if choice.finish_reason == "length":
        return "max_tokens", None
    if result.stop_sequence:
        return "stop_sequence", result.stop_sequence
    return "end_turn", None


def _usage(result: GenerationResult) -> MessagesUsage:
    prompt = PromptSize(result.input_tokens, result.cached_tokens)
    return _usage_of(prompt, written=result.output_tokens)


def _usage_of(prompt: PromptSize, *, written: int) -> MessagesUsage:
    read = prompt.input_tokens - prompt.cached_tokens
    return MessagesUsage(read, written, prompt.cached_tokens)


router = Router(scope="text", route_class=AnthropicRoute)


@router.post(
    PATH,
    summary="Create a message",
    body=MessagesBody,
    reply=MessageReply,
    is_streamed=True,
)
async def create_message(
    call: ModelCall,
    catalog: Catalog,
    inference: Inference,
    recording: Recording,
    generation_streams: GenerationStreams,
) -> Response:
    """Responds in the format of Anthropic's API. With `"stream": true`, sends events."""
    body = await call.read_json(MessagesBody)
    chat = body.to_generation()
    model = model_of(chat, catalog)
    call.use(model)
    try:
        inputs = inputs_of(chat, model, secrets.randbelow(2**53))
        repeats = is_repeatable(chat)
        if body.stream:
            fields = body.model_dump(mode="json", exclude_unset=True, by_alias=True)
            read = Inputs(inputs, fields, is_list=False, is_repeatable=repeats)
            digest = digest_of(json.dumps([model.name, PATH, fields], sort_keys=True))
            new = recording.request(call, model, read, digest=digest, endpoint=PATH)
            return await _stream(call, chat, new, recording, generation_streams)
        if call.options.idempotency_key:
            raise BadInput(
                "idempotency-key: only allowed with stream: true on this route; omit it otherwise",
                field="idempotency-key",
            )
        message_id = answer_id(MESSAGE, call.context.facts.request_id)
        async with inference.compute(call, model, inputs, is_repeatable=repeats) as response:
            reply = MessageEvents(chat, message_id, model).whole(response.outcomes)
            return encode_json(reply)
    except BadInput as error:
        raise as_asked(error) from error


@router.post(
    PATH + "/count_tokens",
    summary="Count the tokens of messages",
    body=CountBody,
    reply=TokenCountReply,
)
async def count_tokens(call: ModelCall, catalog: Catalog, inference: Inference) -> Response:
    """Counts the tokens the model would read for the same request."""
    body = await call.read_json(CountBody)
    try:
        token_count = await count_chat(call, body.to_chat(), catalog, inference)
    except BadInput as error:
        raise as_asked(error) from error
    return encode_json(TokenCountReply(token_count.count))


async def _stream(
    call: ModelCall,
    chat: ChatBody,
    new: InferenceRequest,
    recording: Recording,
    streams: GenerationStreams,
) -> Response:
    with ExitStack() as held:
        held.enter_context(streams.room.reserve(call.tenant))
        snapshot = await recording.start(call, new)
        message_id = answer_id(MESSAGE, snapshot.prediction.id)
        shape = MessageEvents(chat, message_id, new.model)
        events = await begin_events(
            call, streams, snapshot, shape, [StreamPosition()], has_ids=False
        )
        return answer_events(events, held)
