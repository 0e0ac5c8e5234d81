"""Replies of chat completions and completions, whole and as events of a stream.

Fields are those of OpenAI's API (https://platform.openai.com/docs/api-reference/chat and
/completions). api/chat_bodies.py has the requests.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class PromptDetails(msgspec.Struct):
    """Tokens of the prompt whose keys and values had been computed before."""

    cached_tokens: int = 0


class TextUsage(msgspec.Struct):
    """Tokens that were read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CalledFunction(msgspec.Struct):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct):
    """A call that the model asks for."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct):
    """The model's message."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[CalledTool] | msgspec.UnsetType = msgspec.UNSET


class ShownLogprob(msgspec.Struct):
    """A token, the bytes of its text, and its log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ShownTokenLogprob(ShownLogprob):
    """A token of the text, with the most likely alternatives at its position."""

    top_logprobs: list[ShownLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities of all tokens."""

    content: list[ShownTokenLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One of n answers."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatReply(msgspec.Struct):
    """A whole answer."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TextUsage
    object: Literal["chat.completion"] = "chat.completion"
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Only of one that is read again."""


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """The addition to a message since the last event."""

    role: str = ""
    content: str | None = None
    tool_calls: list[dict[str, object]] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    """The news of one choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: TextUsage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities in the old form: one list for each fact."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One of n texts, or what it has more than before."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class CompletionReply(msgspec.Struct):
    """A whole text, or one event of a stream."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TextUsage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"
