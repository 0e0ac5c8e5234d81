"""Chat completion and completion responses, either complete or as stream events.

The fields follow OpenAI's API (https://platform.openai.com/docs/api-reference/chat and
/completions). Request bodies are defined in api/chat_bodies.py.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class PromptDetails(msgspec.Struct):
    """Prompt tokens whose keys and values were already computed."""

    cached_tokens: int = 0


class TextUsage(msgspec.Struct):
    """Number of tokens read and generated."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class CalledFunction(msgspec.Struct):
    """A called function, with its arguments as JSON."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct):
    """A tool call made by the model."""

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
    """One of n choices."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None


class ChatReply(msgspec.Struct):
    """A complete chat response."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TextUsage
    object: Literal["chat.completion"] = "chat.completion"
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Present only when a stored chat is retrieved."""


class ChatDelta(msgspec.Struct, omit_defaults=True):
    """Text added to a message since the previous event."""

    role: str = ""
    content: str | None = None
    tool_calls: list[dict[str, object]] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    """Changes to one choice."""

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
    """Log probabilities in the legacy format, with one list per property."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None for the first token of an echoed prompt."""
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One of n texts, or the text added since the previous event."""

    index: int
    text: str
    finish_reason: str | None = None
    logprobs: CompletionLogprobs | None = None


class CompletionReply(msgspec.Struct):
    """A complete text, or one stream event."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: TextUsage | msgspec.UnsetType | None = msgspec.UNSET
    object: Literal["text_completion"] = "text_completion"
