"""Request and response bodies for /v1/responses.

The fields follow OpenAI's API (https://platform.openai.com/docs/api-reference/responses). Each
request is converted to a chat request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AliasChoices, ConfigDict, Discriminator, Field, Tag, model_validator

from api.bodies import Body, CacheKey, EndUser, ItemId, Metadata, Off, Option, Options
from api.chat_bodies import MAX_TOOLS, TOOL_NAME, ChatBody, Share, tag_choices, text_or_list
from api.errors import WrongField
from api.predictions.conversations import MAX_PARTS, count_parts
from api.validators import null_is

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]

MAX_REASONING_CHARS = 256 * 1024
"""Maximum number of characters in one part of a reasoning item. It is stored with the response."""

ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning", "item_reference")
"""Item types that text models can use."""


class LogprobOfText(msgspec.Struct):
    """A token's log probability in generated text."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LogprobOfText] = []


class OutputText(msgspec.Struct):
    """The model's message."""

    text: str
    type: Literal["output_text"] = "output_text"
    annotations: list[Any] = []
    logprobs: list[LogprobOfText] = []


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """A message from the model."""

    id: str
    content: list[OutputText]
    status: str = "completed"
    role: Literal["assistant"] = "assistant"


class OutputCall(msgspec.Struct, tag_field="type", tag="function_call"):
    """A tool call made by the model. `arguments` is JSON."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str = "completed"


OutputItem = OutputMessage | OutputCall


class WrittenDetails(msgspec.Struct):
    """A kind of token that these models do not generate."""

    reasoning_tokens: int = 0


class InputDetails(msgspec.Struct):
    """Tokens whose keys and values were cached. Caching is free."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class ResponseUsage(msgspec.Struct):
    """Number of tokens read and generated."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: WrittenDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    """The reason a response failed."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """Why the response is incomplete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ConversationShown(msgspec.Struct):
    """The conversation to which a response was added."""

    id: str


class ResponseReply(msgspec.Struct, kw_only=True):
    """A response, complete or in progress."""

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
    conversation: ConversationShown | None = None
    store: bool = True
    top_logprobs: int = 0
    user: str | None = None
    object: Literal["response"] = "response"


class ResponseDeleted(msgspec.Struct):
    """A deleted response."""

    id: str
    deleted: bool = True
    object: Literal["response"] = "response"


class InputPart(Body):
    """Part of a message. Text models read only text."""

    type: Literal["input_text", "output_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))
    annotations: list[Any] | None = Field(
        None, exclude=True, description="Accepted from earlier answers and discarded."
    )
    logprobs: list[Any] | None = Field(
        None, exclude=True, description="Accepted from earlier answers and discarded."
    )
    prompt_cache_breakpoint: Options | None = Field(
        None, exclude=True, description="Accepted, without effect."
    )


Content = Annotated[
    Annotated[str, Tag("text:")] | Annotated[list[InputPart], Field(fail_fast=True), Tag("list:")],
    Discriminator(text_or_list),
]


class _ItemBody(Body):
    """Fields that appear in client types but have no effect on text models."""

    caller: Options | None = Field(None, exclude=True, description="Accepted, without effect.")
    created_by: None = Field(None, exclude=True)
    namespace: None = Field(None, exclude=True)
    async_: None = Field(None, validation_alias=AliasChoices("async", "async_"), exclude=True)


class InputMessage(Body):
    """A message, possibly from an earlier response."""

    type: Annotated[Literal["message"], null_is("message")] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: ItemId | None = None
    status: Option | None = None
    phase: Option | None = Field(None, description="Accepted from earlier answers.")

    def to_chat(self) -> dict[str, Any]:
        return {"role": self.role, "content": _text_of(self.content)}


class InputCall(_ItemBody):
    """A function call from an earlier response."""

    type: Literal["function_call"]
    call_id: ItemId
    name: str
    arguments: str
    id: ItemId | None = None
    status: Option | None = None

    def to_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "function": function}]}


class InputResult(_ItemBody):
    """A function's result."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: Content
    name: None = Field(None, exclude=True)
    id: ItemId | None = None
    status: Option | None = None

    def to_chat(self) -> dict[str, Any]:
        content = _text_of(self.output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": content}


class ReasoningPart(Body):
    """Part of the model's reasoning, or of the reasoning summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str = Field(max_length=MAX_REASONING_CHARS)


class InputReasoning(Body):
    """Reasoning that preceded an earlier response, for chat templates that support it."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None
    encrypted_content: str | None = Field(
        None, max_length=MAX_REASONING_CHARS, description="Stored, but not used."
    )
    status: Option | None = None

    @property
    def text(self) -> str:
        """The reasoning if present, otherwise its summary."""
        return "".join(part.text for part in self.content or self.summary or ())


class ItemReference(Body):
    """A reference, by ID, to an item in a stored response."""

    type: Literal["item_reference"] | None = None
    id: ItemId


def _messages_of(items: Sequence[StoredItem]) -> Iterator[dict[str, Any]]:
    """Yields the equivalent chat messages.

    Reasoning is attached to the message or call that follows it.
    """
    thought = ""
    for item in items:
        if isinstance(item, InputReasoning):
            thought += item.text
            continue
        message = item.to_chat()
        if thought and message["role"] == "assistant":
            message["reasoning_content"] = thought
        thought = ""
        yield message


def _text_of(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _item_tag(item: Any) -> str:
    """Returns the tag of an item's variant.

    An item without a type is either a message or a reference.
    """
    is_dict = isinstance(item, dict)
    kind = item.get("type") if is_dict else getattr(item, "type", None)
    if kind is None:
        is_reference = is_dict and "id" in item and "role" not in item
        return "item_reference:" if is_reference else "message:"
    return f"{kind}:"


StoredItem = InputMessage | InputCall | InputResult | InputReasoning
InputItem = Annotated[
    Annotated[InputMessage, Tag("message:")]
    | Annotated[InputCall, Tag("function_call:")]
    | Annotated[InputResult, Tag("function_call_output:")]
    | Annotated[InputReasoning, Tag("reasoning:")]
    | Annotated[ItemReference, Tag("item_reference:")],
    Discriminator(
        _item_tag,
        custom_error_type="item_type",
        custom_error_message=f"type must be one of {', '.join(ITEM_TYPES)}",
    ),
]


class ResponseTool(Body):
    """A function that the model may call. Other tools are not supported."""

    type: Literal["function"]
    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the function's arguments."
    )
    strict: bool | None = None
    allowed_callers: None = Field(None, exclude=True)
    defer_loading: Off | None = Field(None, exclude=True)
    output_schema: None = Field(None, exclude=True)

    def to_chat(self) -> dict[str, Any]:
        """Returns the tool in the format of a chat request."""
        return {
            "type": "function",
            "function": self.model_dump(exclude={"type"}, exclude_none=True),
        }


class NamedTool(Body):
    """The one function that the model must call."""

    type: Literal["function"]
    name: str


def _to_chat_tool(tool: NamedTool) -> dict[str, Any]:
    """Returns the tool in the format of a chat request."""
    return {"type": "function", "function": {"name": tool.name}}


class AllowedResponseTools(Body):
    """The subset of tools that the model may or must call."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode:")]
    | Annotated[NamedTool, Tag("named:")]
    | Annotated[AllowedResponseTools, Tag("allowed:")],
    tag_choices(NamedTool, AllowedResponseTools),
]


class TextFormat(Body):
    """The text format."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, pattern=TOOL_NAME)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> TextFormat:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise WrongField(
                "schema", "is required with type json_schema and not allowed with other types"
            )
        return self

    def to_chat(self) -> dict[str, Any]:
        """Returns the equivalent `response_format` of a chat."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {"name": self.name or "answer", "schema": self.schema_}
        return {"type": self.type, "json_schema": schema}


class TextOptions(Body):
    """Text options."""

    format: TextFormat | None = None
    verbosity: Option | None = Field(None, description="Accepted, without effect.")


class ResponseStreamOptions(Body):
    """Stream options."""

    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")


class ConversationNamed(Body):
    """A conversation, by ID."""

    id: ItemId


def _name_tag(conversation: Any) -> str:
    return "object:" if isinstance(conversation, dict | ConversationNamed) else "text:"


Conversation = Annotated[
    Annotated[ItemId, Tag("text:")] | Annotated[ConversationNamed, Tag("object:")],
    Discriminator(_name_tag),
]


class ResponseBody(Body):
    """Text to continue, along with everything before it, as items."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"input": "What is a mill?", "max_output_tokens": 16, "temperature": 0}
        },
    )

    input: Annotated[
        Annotated[str, Field(min_length=1), Tag("text:")]
        | Annotated[list[InputItem], Field(min_length=1, max_length=2048), Tag("list:")],
        Discriminator(text_or_list),
    ]
    model: str | None = Field(None, description="Default: the first text model in the catalog.")
    instructions: str | None = None
    background: bool | None = Field(
        None, description="True to answer at once and generate the text in the background."
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Share | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Accepted, without effect.")
    max_tool_calls: int | None = Field(
        None, ge=1, description="Accepted, without effect: there are no built-in tools."
    )
    metadata: Metadata | None = None
    include: (
        Annotated[
            list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]],
            Field(max_length=8),
        ]
        | None
    ) = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    previous_response_id: ItemId | None = Field(
        None, description="ID of a stored response whose input and output precede `input`."
    )
    truncation: Literal["disabled"] | None = None
    reasoning: Options | None = Field(None, description="Accepted, without effect.")
    store: bool | None = Field(
        None, description="false: the response can't be read again or continued. Default: true."
    )
    user: EndUser | None = None
    safety_identifier: EndUser | None = None
    service_tier: Option | None = Field(None, description="Accepted, without effect.")
    prompt_cache_key: CacheKey | None = Field(None, description="Accepted, without effect.")
    prompt_cache_retention: Option | None = Field(None, description="Accepted, without effect.")
    prompt_cache_options: Options | None = Field(None, description="Accepted, without effect.")
    context_management: None = None
    conversation: Conversation | None = Field(
        None, description="Conversation whose items precede `input`. Input and output are appended."
    )
    moderation: None = None
    prompt: None = None

    @model_validator(mode="after")
    def _is_read_later(self) -> ResponseBody:
        if self.background and self.store is False:
            raise WrongField(
                "background",
                "requires store: true because a background response is retrieved later; omit "
                "store or set it to true",
            )
        return self

    @model_validator(mode="after")
    def _continues_one_thing(self) -> ResponseBody:
        if self.conversation is not None and self.previous_response_id is not None:
            raise WrongField(
                "conversation", "send either conversation or previous_response_id, not both"
            )
        return self

    @model_validator(mode="after")
    def _has_few_parts(self) -> ResponseBody:
        parts = count_parts(vars(item) for item in self.items)
        if parts > MAX_PARTS:
            raise WrongField(
                "input",
                f"the input has {parts} parts, including those from earlier items, which exceeds "
                f"the maximum of {MAX_PARTS}; send longer texts in fewer parts",
            )
        return self

    @property
    def is_kept(self) -> bool:
        """Returns whether the response can be retrieved later by ID."""
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        """Returns whether the response includes log probabilities."""
        includes_logprobs = "message.output_text.logprobs" in (self.include or ())
        return includes_logprobs or self.top_logprobs is not None

    @property
    def items(self) -> list[StoredItem]:
        """Returns the input as items. References must already be resolved."""
        if isinstance(self.input, str):
            return [InputMessage(role="user", content=self.input)]
        return [item for item in self.input if not isinstance(item, ItemReference)]

    @property
    def references(self) -> list[str]:
        """Returns the IDs of the items the input refers to."""
        items = () if isinstance(self.input, str) else self.input
        return [item.id for item in items if isinstance(item, ItemReference)]

    def with_items(self, referenced: Mapping[str, dict[str, Any]]) -> ResponseBody:
        """Returns a copy with references replaced by the items they refer to."""
        fields = self.model_dump(mode="json", exclude_unset=True, by_alias=True)
        fields["input"] = [
            referenced[item.id] if isinstance(item, ItemReference) else item_fields
            for item, item_fields in zip(self.input, fields["input"], strict=True)
        ]
        return type(self).model_validate(fields)

    @property
    def dumped_items(self) -> list[dict[str, Any]]:
        """Returns the input items as JSON."""
        return [item.model_dump(mode="json", exclude_unset=True) for item in self.items]

    @property
    def conversation_id(self) -> str:
        """The conversation's ID. Empty if there is none."""
        conversation = self.conversation
        return (
            conversation.id if isinstance(conversation, ConversationNamed) else conversation or ""
        )

    def behind(self, items: Sequence[dict[str, Any]]) -> ResponseBody:
        """Returns a copy with `items` inserted before the body's items.

        Raises:
            pydantic.ValidationError: there are too many items.
        """
        fields = self.model_dump(mode="json", exclude_unset=True, by_alias=True)
        fields["input"] = [*items, *self.dumped_items]
        return type(self).model_validate(fields)

    def to_chat(self) -> ChatBody:
        """Returns the equivalent chat request.

        Raises:
            pydantic.ValidationError: some of the fields conflict with each other.
        """
        instructions = (
            [{"role": "system", "content": self.instructions}] if self.instructions else []
        )
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [*instructions, *_messages_of(self.items)],
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [tool.to_chat() for tool in self.tools] if self.tools else None,
            "tool_choice": self.tool_choice,
            "stream": bool(self.stream or self.background),
        }
        if self.has_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if isinstance(self.tool_choice, NamedTool):
            fields["tool_choice"] = _to_chat_tool(self.tool_choice)
        elif isinstance(self.tool_choice, AllowedResponseTools):
            named = [_to_chat_tool(tool) for tool in self.tool_choice.tools]
            allowed = {"mode": self.tool_choice.mode, "tools": named}
            fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = self.text.format.to_chat()
        return ChatBody.model_validate(fields)
