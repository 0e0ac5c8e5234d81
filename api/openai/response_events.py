"""Responses, either complete or as events, with deterministic IDs and sequence numbers.

An event's sequence number depends on the token count up to that point, not on how many events came
before, so it is the same on every instance, even one that could not read the tokens for a while.
The first events are numbered 0 to 3. An event with tokens is numbered 3 plus the token count so
far. Final events are numbered starting from the maximum number of tokens, so the numbers increase
with gaps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from api.openai.generation import RESPONSE_PREFIX, chat_choice, extract_message_text, results_of
from api.openai.responses_schemas import (
    ConversationShown,
    IncompleteDetails,
    InputDetails,
    LogprobOfText,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ResponseBody,
    ResponseError,
    ResponseReply,
    ResponseStatus,
    ResponseUsage,
    WrittenDetails,
)
from api.predictions.generation_stream import AddedText, PromptSize
from shared.errors import Canceled, PenstockError, error_for_code
from shared.messages import ItemOutcome
from shared.models.catalog import Model
from shared.models.tasks.text import GenerationResult, TokenLogprob

_ITEM, _PART = 2, 3
"""Sequence numbers of the events that start a message."""
_encode = msgspec.json.Encoder().encode

_FIELDS_OF_CHATS = {
    "messages": "input",
    "prompt": "input",
    "response_format": "text",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "logprobs": "include",
}
"""Chat fields that have different names in a response."""


class ResponseEvents:
    """The response to one request, and its events after number `after`.

    Args:
        body: request body. Its `max_output_tokens` is set if events are sent.
        model: the model that generates the response.
        after: sequence number of the last event the reader received. -1 if none.
    """

    def __init__(
        self,
        body: ResponseBody,
        response_id: str,
        created_at_s: float,
        model: Model,
        after: int = -1,
    ) -> None:
        self._body = body
        self._chat = body.to_chat()
        self._response_id = response_id
        self._digits = response_id.removeprefix(RESPONSE_PREFIX)
        self._created = int(created_at_s)
        self._model = model
        self._after = after
        self._has_tools = bool(self._chat.allowed_tools)
        self._first_end = _PART + (body.max_output_tokens or 0) + 1
        self._last = self._first_end

    @property
    def seen(self) -> tuple[bool, int, int]:
        """Returns how much a reader has up to `after`: opening, tokens, and parts of the ending."""
        if self._after < _PART:
            return False, 0, 0
        if self._after < self._first_end:
            return True, self._after - _PART, 0
        return True, self._first_end - _PART - 1, self._after - self._first_end + 1

    def reply(self, status: ResponseStatus, **facts: Any) -> ResponseReply:
        """Returns the response without its output."""
        body = self._body
        fields = body.model_dump(mode="json", by_alias=True, exclude_unset=True)
        return ResponseReply(
            id=self._response_id,
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
            text=fields.get("text") or {"format": {"type": "text"}},
            tool_choice=fields.get("tool_choice") or "auto",
            tools=fields.get("tools") or [],
            top_p=1.0 if body.top_p is None else body.top_p,
            max_tool_calls=body.max_tool_calls,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=body.reasoning,
            safety_identifier=body.safety_identifier,
            store=body.is_kept,
            top_logprobs=body.top_logprobs or 0,
            user=body.user,
            conversation=ConversationShown(name) if (name := body.conversation_id) else None,
            **facts,
        )

    def whole(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> ResponseReply:
        """Returns the response with its output, which finished at `ended_at_s`."""
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
        choice = chat_choice(self._chat, self._response_id, 0, result)
        message = choice.message
        calls = message.tool_calls if isinstance(message.tool_calls, list) else []
        is_last_cut = choice.finish_reason == "length"
        items: list[OutputItem] = []
        if message.content or not calls:
            encoded = self._logprobs(result.logprobs)
            texts = [OutputText(message.content or "", logprobs=encoded)]
            items.append(self._message(texts))
        items += [
            OutputCall(
                f"fc_{self._digits}_{number}", call.id, call.function.name, call.function.arguments
            )
            for number, call in enumerate(calls)
        ]
        if is_last_cut:
            items[-1].status = "incomplete"
        return items

    def _message(self, content: list[OutputText], status: str = "completed") -> OutputMessage:
        return OutputMessage(f"msg_{self._digits}", content, status)

    def opening(self, index: int, prompt: PromptSize) -> bytes | None:
        """Returns the event for a newly created response."""
        reply = self.reply("in_progress")
        return self._join_events(
            self._event(0, "response.created", response=reply),
            self._event(1, "response.in_progress", response=reply),
        )

    def delta(self, added: AddedText) -> bytes | None:
        """Returns the event for new text. Text that may start a tool call is held back."""
        visible_before, now = self._show_text(added.before), self._show_text(added.now)
        if now == visible_before:
            return None
        encoded = self._logprobs(added.logprobs)
        is_rest = added.ended > 0
        number = self._first_end + added.ended - 1 if is_rest else _PART + added.tokens
        begin = [] if visible_before else self._begin(_ITEM, _PART)
        return self._join_events(*begin, self._delta(number, now[len(visible_before) :], encoded))

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> list[LogprobOfText]:
        return [_format_logprob(token) for token in tokens] if self._body.has_logprobs else []

    def _show_text(self, text: str) -> str:
        return extract_message_text(text) if self._has_tools else text

    def _begin(self, item: int, part: int) -> list[bytes]:
        added = self._message([], "in_progress")
        return [
            self._event(item, "response.output_item.added", output_index=0, item=added),
            self._event(
                part, "response.content_part.added", **self._item_fields(), part=OutputText("")
            ),
        ]

    def _delta(self, number: int, text: str, logprobs: list[LogprobOfText]) -> bytes:
        kind = "response.output_text.delta"
        return self._event(number, kind, **self._item_fields(), delta=text, logprobs=logprobs)

    def _item_fields(self) -> dict[str, Any]:
        return {"item_id": f"msg_{self._digits}", "output_index": 0, "content_index": 0}

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """Returns held-back text and the items' final events, numbered after the previous event."""
        events: list[tuple[str, dict[str, Any]]] = []
        visible_text = self._show_text(result.text)
        for at, item in enumerate(self._output(result)):
            if isinstance(item, OutputMessage):
                events += self._message_end(item, visible_text)
            else:
                events += _call_events(item, at)
        first = self._first_end + 1
        self._last = first + len(events)
        return [
            self._event(first + at, kind, **facts, is_kept=True)
            for at, (kind, facts) in enumerate(events)
        ]

    def _message_end(
        self, item: OutputMessage, streamed_text: str
    ) -> list[tuple[str, dict[str, Any]]]:
        (part,), fields = item.content, self._item_fields()
        events: list[tuple[str, dict[str, Any]]] = []
        if not streamed_text:
            added = {"output_index": 0, "item": self._message([], "in_progress")}
            events.append(("response.output_item.added", added))
            events.append(("response.content_part.added", {**fields, "part": OutputText("")}))
        if rest := part.text[len(streamed_text) :]:
            facts = {**fields, "delta": rest, "logprobs": []}
            events.append(("response.output_text.delta", facts))
        done = {**fields, "text": part.text, "logprobs": part.logprobs}
        events.append(("response.output_text.done", done))
        events.append(("response.content_part.done", {**fields, "part": part}))
        events.append(("response.output_item.done", {"output_index": 0, "item": item}))
        return events

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        whole = self.whole(outcomes, ended_at_s)
        event = self._event(self._last, f"response.{whole.status}", response=whole)
        return [event] if event else []

    def failure(self, error: PenstockError) -> bytes:
        """Returns the event for a failed response."""
        failed = self.build_failed(error)
        return self._event(self._last, "response.failed", response=failed, is_kept=True)

    def build_failed(self, error: PenstockError) -> ResponseReply:
        """Returns the failed response, with its error."""
        if isinstance(error, Canceled):
            return self.reply("cancelled")
        error = as_asked(error)
        return self.reply("failed", error=ResponseError(error.code, error.public_message))

    def _event(self, number: int, kind: str, *, is_kept: bool = False, **facts: Any) -> bytes:
        """Returns an event, or an empty value if the reader already has it."""
        if number <= self._after and not is_kept:
            return b""
        event = {"type": kind, "sequence_number": number, **facts}
        return f"event: {kind}\n".encode() + b"data: " + _encode(event) + b"\n\n"

    def _join_events(self, *events: bytes) -> bytes | None:
        return b"".join(events) or None


def _format_logprob(logprob: TokenLogprob) -> LogprobOfText:
    tops = [LogprobOfText(top.token, top.logprob, list(top.data)) for top in logprob.top]
    return LogprobOfText(logprob.token, logprob.logprob, list(logprob.data), tops)


def _call_events(call: OutputCall, at: int) -> list[tuple[str, dict[str, Any]]]:
    """Returns the events for a call, which is sent in one piece."""
    fields = {"output_index": at, "item_id": call.id}
    opened_call = msgspec.structs.replace(call, arguments="", status="in_progress")
    written = {**fields, "arguments": call.arguments, "name": call.name}
    return [
        ("response.output_item.added", {"output_index": at, "item": opened_call}),
        ("response.function_call_arguments.delta", {**fields, "delta": call.arguments}),
        ("response.function_call_arguments.done", written),
        ("response.output_item.done", {"output_index": at, "item": call}),
    ]


def as_asked(error: PenstockError) -> PenstockError:
    """Returns the error, with the chat field's name replaced by the name that the client sent."""
    field = _FIELDS_OF_CHATS.get(error.field or "")
    if field is None:
        return error
    message = re.sub(rf"^{error.field}\b", field, error.public_message)
    return error_for_code(error.code, message, field)
