"""The events of streamed chats and completions, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from api.endpoints.text import (
    chat_choice,
    chat_logprobs,
    completion_logprobs,
    results_of,
    usage_of,
)
from api.endpoints.tool_calls import shown_of
from api.errors import ERROR_MAPPINGS
from api.schemas.openai_replies import ErrorDetail, ErrorReply
from api.schemas.openai_text import (
    ChatBody,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    CompletionBody,
    CompletionChoice,
    CompletionReply,
)
from shared.catalog import Model
from shared.messages import ItemOutcome
from shared.tasks.text import GenerationResult, TokenLogprob

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def failure_event(code: str, message: str) -> bytes:
    """An error, as OpenAI's clients raise it."""
    mapping = ERROR_MAPPINGS.get(code, ERROR_MAPPINGS["internal"])
    detail = ErrorDetail(message, mapping.type, None, code)
    return _event(ErrorReply(detail))


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class ChatEvents:
    """The events of a chat. `made` is its id."""

    def __init__(self, body: ChatBody, made: str, created_at_s: float, model: Model) -> None:
        self._body = body
        self._made = made
        self._created = int(created_at_s)
        self._model = model
        self._has_tools = bool(body.allowed_tools)
        options = body.stream_options
        self._has_usage = options is not None and options.include_usage

    def opening(self, index: int) -> bytes:
        """Who speaks."""
        return self._chunk(ChatChunkChoice(index, ChatDelta("assistant", "")))

    def delta(
        self,
        index: int,
        before: str,
        text: str,
        logprobs: Sequence[TokenLogprob],
        at: tuple[int, int],
    ) -> bytes | None:
        """More of the message. What may become the call of a tool is held back."""
        if self._has_tools:
            text = shown_of(before + text)[len(shown_of(before)) :]
        told = chat_logprobs(logprobs) if self._body.logprobs and logprobs else None
        if not text and told is None:
            return None
        return self._chunk(ChatChunkChoice(index, ChatDelta(content=text), told))

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """What was held back, the calls of tools, and why the message ends."""
        choice = chat_choice(self._body, self._made, index, result)
        events = []
        content = choice.message.content or ""
        if self._has_tools and (rest := content[len(shown_of(result.text)) :]):
            events.append(self._chunk(ChatChunkChoice(index, ChatDelta(content=rest))))
        if isinstance(choice.message.tool_calls, list):
            for number, call in enumerate(choice.message.tool_calls):
                told = {"index": number} | msgspec.to_builtins(call)
                delta = ChatDelta(tool_calls=[told])
                events.append(self._chunk(ChatChunkChoice(index, delta)))
        ended = ChatChunkChoice(index, ChatDelta(), finish_reason=choice.finish_reason)
        return [*events, self._chunk(ended)]

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """The tokens, if they were asked for."""
        if not self._has_usage:
            return [DONE]
        usage = usage_of(results_of(outcomes, self._model), self._body.n or 1)
        chunk = ChatChunk(self._made, self._created, self._model.name, [], usage)
        return [_event(chunk), DONE]

    def failure(self, code: str, message: str) -> bytes:
        """An error."""
        return failure_event(code, message)

    def _chunk(self, choice: ChatChunkChoice) -> bytes:
        chunk = ChatChunk(self._made, self._created, self._model.name, [choice])
        if self._has_usage:
            chunk.usage = None
        return _event(chunk)


class CompletionEvents:
    """The events of a completion. `made` is its id."""

    def __init__(self, body: CompletionBody, made: str, created_at_s: float, model: Model) -> None:
        self._body = body
        self._made = made
        self._created = int(created_at_s)
        self._model = model
        options = body.stream_options
        self._has_usage = options is not None and options.include_usage

    def opening(self, index: int) -> None:
        """Nothing: a completion begins with its text."""

    def delta(
        self,
        index: int,
        before: str,
        text: str,
        logprobs: Sequence[TokenLogprob],
        at: tuple[int, int],
    ) -> bytes | None:
        """More of the text."""
        told = None
        if self._body.logprobs is not None and logprobs:
            told = completion_logprobs(logprobs, len(before))
        if not text and told is None:
            return None
        return self._chunk(CompletionChoice(index, text, None, told))

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """Why the text ends."""
        return [self._chunk(CompletionChoice(index, "", result.finish_reason))]

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """The tokens, if they were asked for."""
        if not self._has_usage:
            return [DONE]
        usage = usage_of(results_of(outcomes, self._model), self._body.n or 1)
        reply = CompletionReply(self._made, self._created, self._model.name, [], usage)
        return [_event(reply), DONE]

    def failure(self, code: str, message: str) -> bytes:
        """An error."""
        return failure_event(code, message)

    def _chunk(self, choice: CompletionChoice) -> bytes:
        reply = CompletionReply(self._made, self._created, self._model.name, [choice])
        if self._has_usage:
            reply.usage = None
        return _event(reply)
