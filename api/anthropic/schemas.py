"""Request and response bodies for /v1/messages.

The fields follow Anthropic's API (https://docs.claude.com/en/api/messages). Each request is
converted to a chat request.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from api.bodies import Body, EndUser, ItemId, Off, Option, Options
from api.chat_bodies import MAX_TOOLS, TOOL_NAME, ChatBody, Share, text_or_list
from api.errors import WrongField

MAX_STOPS = 4
"""Maximum number of stop sequences, the same as for chats."""

BLOCK_TYPES = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")

_UNKNOWN_BLOCK = (
    f"type must be one of {', '.join(BLOCK_TYPES)}; text models don't accept other types"
)

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class CacheControl(Body):
    """Marks the end of a cacheable prefix.

    Has no effect, because every prefix is cacheable.
    """

    type: Literal["ephemeral"]
    ttl: Option | None = None


class _Block(Body):
    cache_control: CacheControl | None = Field(
        None, exclude=True, description="Accepted, without effect."
    )


class TextBlock(_Block):
    """A text part of a message."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = Field(None, exclude=True, description="Accepted and discarded.")


class ToolUseBlock(_Block):
    """A tool call from an earlier response."""

    type: Literal["tool_use"]
    id: ItemId
    name: str
    input: dict[str, Any]
    caller: Options | None = Field(None, exclude=True, description="Accepted, without effect.")


class ThinkingBlock(_Block):
    """Reasoning that preceded an earlier response, for chat templates that support it."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(None, exclude=True)


class RedactedThinkingBlock(_Block):
    """Encrypted reasoning, which is ignored."""

    type: Literal["redacted_thinking"]
    data: str


def _block_tag(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else getattr(block, "type", None)
    return f"{kind}:"


TextContent = Annotated[
    Annotated[str, Tag("text:")] | Annotated[list[TextBlock], Field(fail_fast=True), Tag("list:")],
    Discriminator(text_or_list),
]


class ToolResultBlock(_Block):
    """A tool call's result."""

    type: Literal["tool_result"]
    tool_use_id: ItemId
    content: TextContent | None = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("text:")]
    | Annotated[ToolUseBlock, Tag("tool_use:")]
    | Annotated[ToolResultBlock, Tag("tool_result:")]
    | Annotated[ThinkingBlock, Tag("thinking:")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking:")],
    Discriminator(_block_tag, custom_error_type="block_type", custom_error_message=_UNKNOWN_BLOCK),
]
MessageContent = Annotated[
    Annotated[str, Tag("text:")] | Annotated[list[Block], Field(fail_fast=True), Tag("list:")],
    Discriminator(text_or_list),
]


class AnthropicInputMessage(Body):
    """A message in a conversation."""

    role: Literal["user", "assistant"]
    content: MessageContent

    def to_chat(self) -> Iterator[dict[str, Any]]:
        """Yields the equivalent chat messages. Each tool result becomes a separate message."""
        blocks = self.content
        if isinstance(blocks, str):
            yield {"role": self.role, "content": blocks}
            return
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                content = _text_of(block.content)
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
        calls = [_call_of(block) for block in blocks if isinstance(block, ToolUseBlock)]
        thought = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        message: dict[str, Any] = {"role": self.role, "content": text}
        if calls:
            message |= {"tool_calls": calls, "content": text or None}
        if thought:
            message["reasoning_content"] = thought
        if text or calls or not any(isinstance(block, ToolResultBlock) for block in blocks):
            yield message


def _call_of(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _text_of(content: str | Sequence[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(block.text for block in content)


class MessageTool(_Block):
    """A tool that the model may call. Anthropic's built-in tools are not supported."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    input_schema: dict[str, Any] = Field(description="JSON schema of the tool's input.")
    strict: bool | None = None
    eager_input_streaming: bool | None = Field(None, description="Accepted, without effect.")
    input_examples: list[Any] | None = Field(None, description="Accepted, without effect.")
    defer_loading: Off | None = None
    allowed_callers: Annotated[list[Option], Field(fail_fast=True)] | None = Field(
        None, description="Accepted, without effect."
    )

    def to_chat(self) -> dict[str, Any]:
        """Returns the tool in the format of a chat request."""
        function: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function}


class MessageToolChoice(Body):
    """Whether the model may, must, or must not call a tool.

    `any`: the model must call at least one of the tools.
    """

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = Field(None, description="Accepted, without effect.")

    @model_validator(mode="after")
    def _has_a_name(self) -> MessageToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise WrongField("name", "is required with type tool and not allowed with other types")
        return self

    def to_chat(self) -> Any:
        """Returns the equivalent `tool_choice` for a chat."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class MessageMetadata(Body):
    """Facts about the request."""

    user_id: EndUser | None = None


class Thinking(Body):
    """True to ask the model to think first. Accepted, but has no effect."""

    type: Option
    budget_tokens: int | None = None
    display: Option | None = None


class JsonFormat(Body):
    """A JSON schema that the text must match."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The output format."""

    format: JsonFormat | None = None
    effort: Option | None = Field(None, description="Accepted, without effect.")
    task_budget: Options | None = Field(None, description="Accepted, without effect.")


class CountBody(Body):
    """The messages whose tokens should be counted."""

    messages: list[AnthropicInputMessage] = Field(min_length=1, max_length=2048)
    model: str | None = Field(None, description="Default: the first text model in the catalog.")
    system: TextContent | None = None
    tools: list[MessageTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: MessageToolChoice | None = None
    thinking: Thinking | None = Field(None, description="Accepted, without effect.")
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = Field(
        None, description="The `format` of `output_config`, as older clients send it."
    )
    cache_control: CacheControl | None = Field(None, description="Accepted, without effect.")
    speed: Option | None = Field(None, description="Accepted, without effect.")
    user_profile_id: EndUser | None = Field(None, description="Accepted, without effect.")
    workspace_id: EndUser | None = Field(None, description="Accepted, without effect.")
    context_management: None = None
    mcp_servers: None = None

    @property
    def _text_format(self) -> JsonFormat | None:
        config = self.output_config
        return self.output_format if config is None or config.format is None else config.format

    def to_chat(self, **more: Any) -> ChatBody:
        """Returns the equivalent chat request.

        Raises:
            pydantic.ValidationError: some of the fields contradict each other.
        """
        system = _text_of(self.system)
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [
                *([{"role": "system", "content": system}] if system else []),
                *(chat for message in self.messages for chat in message.to_chat()),
            ],
            "tools": [tool.to_chat() for tool in self.tools] if self.tools else None,
        }
        if self.tool_choice is not None:
            fields["tool_choice"] = self.tool_choice.to_chat()
        if (text_format := self._text_format) is not None:
            schema = {"name": "answer", "schema": text_format.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatBody.model_validate(fields | more)


class MessagesBody(CountBody):
    """A conversation to continue."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "max_tokens": 16,
                "messages": [{"role": "user", "content": "What is a mill?"}],
                "temperature": 0,
            }
        },
    )

    max_tokens: int = Field(ge=1)
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Share | None = None
    top_k: int | None = Field(None, ge=0, le=2**20)
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        None, max_length=MAX_STOPS
    )
    metadata: MessageMetadata | None = None
    service_tier: Option | None = Field(None, description="Accepted, without effect.")
    inference_geo: Option | None = Field(None, description="Accepted, without effect.")
    diagnostics: Options | None = Field(None, description="Accepted, without effect.")
    container: None = None

    @field_validator("max_tokens", mode="before")
    @classmethod
    def _is_not_only_read(cls, value: object) -> object:
        if value == 0:
            raise ValueError(
                "must be at least 1; prompt-cache warmup (max_tokens 0) is not supported"
            )
        return value

    def to_generation(self) -> ChatBody:
        """Returns the equivalent chat request.

        Raises:
            pydantic.ValidationError: some of the fields conflict with each other.
        """
        return self.to_chat(
            max_completion_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=self.stop_sequences or None,
            stream=bool(self.stream),
        )


class ShownText(msgspec.Struct, tag_field="type", tag="text"):
    """The model's message."""

    text: str
    citations: None = None


class ShownToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A tool call made by the model."""

    id: str
    name: str
    input: dict[str, Any]


ShownBlock = ShownText | ShownToolUse


class MessagesUsage(msgspec.Struct):
    """Tokens read and generated. `input_tokens` does not include cached tokens."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageReply(msgspec.Struct):
    """A complete response."""

    id: str
    model: str
    content: list[ShownBlock]
    stop_reason: StopReason | None
    usage: MessagesUsage
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    type: Literal["message"] = "message"


class TokenCountReply(msgspec.Struct):
    """Number of tokens the model would read."""

    input_tokens: int


class AnthropicError(msgspec.Struct):
    """An error's type and message."""

    type: str
    message: str


class AnthropicErrorReply(msgspec.Struct):
    """The body of every error response."""

    error: AnthropicError
    request_id: str | None = None
    type: Literal["error"] = "error"
