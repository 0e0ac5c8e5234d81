"""The bodies of answers of /v1/responses, as structs. Fields are those of OpenAI's API."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class LogprobOfText(msgspec.Struct):
    """The log probability of a token, in the text of an answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LogprobOfText] = []


class OutputText(msgspec.Struct):
    """What the model says."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[LogprobOfText] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    content: list[OutputText]
    status: str = "completed"
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call that the model asks for. `arguments` is JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "completed"


OutputItem = OutputMessage | OutputCall


class WrittenDetails(msgspec.Struct):
    """Tokens of a kind that these models do not write."""

    reasoning_tokens: int = 0


class InputDetails(msgspec.Struct):
    """Tokens whose keys and values had been computed before. What is kept costs nothing."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Tokens that were read and written."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: WrittenDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """Why there is no answer."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why the answer ends early."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(msgspec.Struct, kw_only=True):
    """An answer, whole or on its way."""

    id: str
    created_at: int
    model: str
    status: ResponseStatus
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    background: bool = False
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    temperature: float = 1.0
    text: dict[str, Any] = {}
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_p: float = 1.0
    truncation: Literal["disabled"] = "disabled"
    completed_at: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] | None = None
    safety_identifier: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    top_logprobs: int = 0
    user: str | None = None
    object: Literal["response"] = "response"


class ResponseDeleted(msgspec.Struct):
    """An answer that is gone."""

    id: str
    deleted: bool = True
    object: Literal["response"] = "response"
