"""A message of /v1/messages, whole and as events.

https://docs.claude.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from api.anthropic.errors import error_reply
from api.anthropic.schemas import (
    MessageReply,
    MessagesUsage,
    ShownBlock,
    ShownText,
    ShownToolUse,
    StopReason,
)
from api.chat_bodies import ChatBody, ChatChoice
from api.errors import encode_error
from api.openai.generation import chat_choice, results_of, shown_of
from shared.catalog import Model
from shared.errors import PenstockError
from shared.messages import ItemOutcome
from shared.tasks.text import GenerationResult, TokenLogprob


class MessageEvents:
    """The answer to one request, and its events.

    Args:
        chat: the chat that asks for the same.
        made: the id of the answer.
        model: the model that generates it.
    """

    def __init__(self, chat: ChatBody, made: str, model: Model) -> None:
        self._chat = chat
        self._made = made
        self._model = model
        self._has_tools = bool(chat.allowed_tools)

    def whole(self, outcomes: Sequence[ItemOutcome]) -> MessageReply:
        """Returns the answer."""
        (result,) = results_of(outcomes, self._model)
        choice = chat_choice(self._chat, self._made, 0, result)
        reason, stop = _end(choice, result)
        return MessageReply(
            self._made, self._model.name, _blocks(choice), reason, _usage(result), stop
        )

    def opening(self, index: int) -> bytes:
        """Returns the event for a message that begins. How long the prompt is comes at its end."""
        begun = MessageReply(self._made, self._model.name, [], None, MessagesUsage(0, 0))
        return _event("message_start", message=begun)

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
        return (b"" if shown else _begin(0, ShownText(""))) + _text_delta(now[len(shown) :])

    def ending(self, index: int, result: GenerationResult) -> list[bytes]:
        """Returns the text held back, the tool calls, the stop reason and the usage."""
        shown = self._shown(result.text)
        choice = chat_choice(self._chat, self._made, index, result)
        blocks, events = _blocks(choice), []
        text = blocks[0].text if blocks and isinstance(blocks[0], ShownText) else ""
        if text or shown:
            if not shown:
                events.append(_begin(0, ShownText("")))
            if rest := text[len(shown) :]:
                events.append(_text_delta(rest))
            events.append(_event("content_block_stop", index=0))
        for place, block in enumerate(blocks):
            if isinstance(block, ShownToolUse):
                events.append(_begin(place, msgspec.structs.replace(block, input={})))
                written = {"type": "input_json_delta", "partial_json": json.dumps(block.input)}
                events.append(_event("content_block_delta", index=place, delta=written))
                events.append(_event("content_block_stop", index=place))
        reason, stop = _end(choice, result)
        ended = {"stop_reason": reason, "stop_sequence": stop}
        return [*events, _event("message_delta", delta=ended, usage=_usage(result))]

    def closing(self, outcomes: Sequence[ItemOutcome], ended_at_s: float) -> list[bytes]:
        """Returns the end."""
        return [_event("message_stop")]

    def failure(self, error: PenstockError) -> bytes:
        """Returns an error."""
        return b"event: error\ndata: " + encode_error(error_reply(error)) + b"\n\n"

    def _shown(self, text: str) -> str:
        return shown_of(text) if self._has_tools else text


def _event(kind: str, **facts: Any) -> bytes:
    data = msgspec.json.encode({"type": kind, **facts})
    return f"event: {kind}\n".encode() + b"data: " + data + b"\n\n"


def _begin(place: int, block: ShownBlock) -> bytes:
    return _event("content_block_start", index=place, content_block=block)


def _text_delta(text: str) -> bytes:
    return _event("content_block_delta", index=0, delta={"type": "text_delta", "text": text})


def _blocks(choice: ChatChoice) -> list[ShownBlock]:
    """Returns the text, if there is any, and the calls behind it."""
    message = choice.message
    calls = message.tool_calls if isinstance(message.tool_calls, list) else []
    blocks: list[ShownBlock] = [ShownText(message.content)] if message.content else []
    return blocks + [
        ShownToolUse(f"toolu_{call.id.removeprefix('call_')}", call.function.name, _input(call))
        for call in calls
    ]


def _input(call: Any) -> dict[str, Any]:
    """Returns the arguments of a call. A model may write what is not an object, or be cut in it."""
    try:
        given = json.loads(call.function.arguments)
    except ValueError:
        return {}
    return given if isinstance(given, dict) else {"value": given}


def _end(choice: ChatChoice, result: GenerationResult) -> tuple[StopReason, str | None]:
    """Returns why the message ended, and the stop sequence that ended it, if one did."""
    if choice.finish_reason == "tool_calls":
        return "tool_use", None
    if choice.finish_reason == "length":
        return "max_tokens", None
    if result.stop_sequence:
        return "stop_sequence", result.stop_sequence
    return "end_turn", None


def _usage(result: GenerationResult) -> MessagesUsage:
    read = result.input_tokens - result.cached_tokens
    return MessagesUsage(read, result.output_tokens, result.cached_tokens)
