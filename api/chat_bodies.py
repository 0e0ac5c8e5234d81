"""Request bodies for chat completions and completions, with their tools.

The fields follow OpenAI's API (https://platform.openai.com/docs/api-reference/chat and
/completions). Extensions are marked. Response bodies are in api/openai/chat_replies.py.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import from_json

from api.bodies import (
    Body,
    CacheKey,
    EndUser,
    ItemId,
    Metadata,
    Option,
    Options,
    Tokens,
    shape_of,
)
from api.errors import WrongField
from api.validators import null_is

TOOL_NAME = r"^[A-Za-z0-9_-]{1,64}$"

MAX_TOOLS = 128
MAX_CHOICES, MAX_PROMPTS = 8, 512
MAX_TEXTS, MAX_STREAMED_TEXTS = 1024, 64
"""Maximum number of prompts times `n` in one request.

MAX_STREAMED_TEXTS equals MAX_ITEMS in shared/stores/token_streams.py.
"""
MAX_BIASES = 1024
TEMPLATE_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables whose values come from other fields."""
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
LogitBias = Annotated[dict[TokenId, Bias], Field(max_length=MAX_BIASES)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]
MAX_INT64 = 2**63 - 1

OF_A_CLIENT = "Accepted and discarded: clients add it to the answers that they send back."


class FunctionTool(Body):
    """A function that the model may call."""

    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON schema of the function's arguments."
    )
    strict: bool | None = None


class Tool(Body):
    """A tool. Only functions are supported."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """A function's name."""

    name: str


class ToolChoice(Body):
    """The one function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """The subset of tools that the model may or must call."""

    mode: Literal["auto", "required"]
    tools: list[ToolChoice] = Field(min_length=1, max_length=128)


class AllowedToolChoice(Body):
    """The tools allowed in this request."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def tag_choices(named: type, allowed: type) -> Discriminator:
    """Returns a discriminator whose errors refer to the variant the client intended."""

    def tag(choice: Any) -> str:
        if isinstance(choice, dict):
            return "allowed:" if choice.get("type") == "allowed_tools" else "named:"
        if isinstance(choice, allowed):
            return "allowed:"
        return "named:" if isinstance(choice, named) else "mode:"

    return Discriminator(tag)


AnyToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode:")]
    | Annotated[ToolChoice, Tag("named:")]
    | Annotated[AllowedToolChoice, Tag("allowed:")],
    tag_choices(ToolChoice, AllowedToolChoice),
]


def select_allowed_tools(tools: list[Tool] | None, choice: AnyToolChoice | None) -> list[Tool]:
    """Returns the tools that the model may call."""
    if choice == "none" or not tools:
        return []
    if not isinstance(choice, AllowedToolChoice):
        return tools
    names = {tool.function.name for tool in choice.allowed_tools.tools}
    return [tool for tool in tools if tool.function.name in names]


def select_forced_tools(
    tools: list[Tool] | None, choice: AnyToolChoice | None
) -> list[FunctionTool] | None:
    """Returns the tools, at least one of which the model must call.

    None if the model may respond without a call.

    Raises:
        ValueError: the chosen tool does not exist.
    """
    if choice is None or choice in ("none", "auto"):
        return None
    functions = [tool.function for tool in select_allowed_tools(tools, choice)]
    if isinstance(choice, ToolChoice):
        functions = [function for function in functions if function.name == choice.function.name]
    if not functions:
        raise WrongField("tool_choice", _no_such_tool(tools, choice))
    if isinstance(choice, AllowedToolChoice) and choice.allowed_tools.mode == "auto":
        return None
    return functions


def _no_such_tool(tools: list[Tool] | None, choice: AnyToolChoice) -> str:
    if not tools:
        return "requires tools; send tools or omit tool_choice"
    if isinstance(choice, ToolChoice):
        names = [choice.function.name]
    elif isinstance(choice, AllowedToolChoice):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
    else:
        names = []
    return f"{', '.join(map(repr, names))[:200]} not found in tools; use a name from tools"


def text_or_list(value: Any) -> str:
    """Returns a variant's tag, so that errors refer to the variant the client intended."""
    return "list:" if isinstance(value, list) else "text:"


class TextPart(Body):
    """A text part of a message. Text models read only text parts."""

    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))
    prompt_cache_breakpoint: Options | None = Field(
        None, exclude=True, description="Accepted, without effect."
    )


class FunctionCall(Body):
    """A function call made by the assistant. `arguments` is JSON."""

    name: str
    arguments: str
    parsed_arguments: Any = Field(None, exclude=True, description=OF_A_CLIENT)
    provider_specific_fields: Any = Field(None, exclude=True, description=OF_A_CLIENT)


class ToolCall(Body):
    """A tool call in one of the assistant's earlier messages."""

    id: ItemId
    type: Annotated[Literal["function"], null_is("function")] = "function"
    function: FunctionCall
    index: int | None = Field(None, exclude=True, description=OF_A_CLIENT)
    provider_specific_fields: Any = Field(None, exclude=True, description=OF_A_CLIENT)


class Message(Body):
    """One message in a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        Annotated[
            Annotated[str, Tag("text:")]
            | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag("list:")],
            Discriminator(text_or_list),
        ]
        | None
    ) = None
    name: str | None = Field(None, max_length=64)
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: ItemId | None = None
    refusal: str | None = Field(None, description="The refusal of an earlier answer.")
    reasoning_content: str | None = Field(
        None,
        description="The reasoning that preceded this message, for chat templates that support it.",
    )
    annotations: list[Any] | None = Field(
        None, exclude=True, description="Accepted from earlier answers and discarded."
    )
    audio: None = None
    function_call: None = None
    parsed: Any = Field(None, exclude=True, description=OF_A_CLIENT)
    provider_specific_fields: Any = Field(None, exclude=True, description=OF_A_CLIENT)
    thinking_blocks: Any = Field(None, exclude=True, description=OF_A_CLIENT)

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise WrongField("content", "is required; send text or a list of text parts")
        if self.role == "tool" and self.tool_call_id is None:
            raise WrongField(
                "tool_call_id",
                "is required; send the ID of the tool call that this message responds to",
            )
        return self

    def to_template(self) -> dict[str, Any]:
        """Returns the message for chat templates: text in one piece, arguments as objects."""
        message: dict[str, Any] = {
            # Open models are not trained to use the developer role.
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": _parse_arguments(call.function)}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        return message

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.refusal or ""


def _parse_arguments(call: FunctionCall) -> dict[str, Any]:
    """Returns the call with its arguments as an object, or as text if they are not valid JSON."""
    try:
        # Uses the request-body parser, which limits nesting and rejects lone surrogates.
        arguments = from_json(call.arguments, allow_inf_nan=False)
    except ValueError:
        arguments = call.arguments
    return {"name": call.name, "arguments": arguments}


class JsonSchema(Body):
    """A schema that the response must match."""

    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The response format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise WrongField(
                "json_schema", "is required with type json_schema and not allowed with other types"
            )
        return self

    def to_schema(self) -> str:
        """Returns the response's JSON schema, serialized. Empty if any text is allowed."""
        if self.type == "text":
            return ""
        if self.json_schema is None or self.json_schema.schema_ is None:
            return '{"type":"object"}'
        return json.dumps(self.json_schema.schema_)


class StreamOptions(Body):
    """Stream options."""

    include_usage: Annotated[bool, null_is(False)] = False
    include_obfuscation: bool | None = Field(None, description="Accepted, without effect.")


class _SampledBody(Body):
    """Fields shared by all text requests."""

    model: str | None = Field(None, description="Default: the first text model in the catalog.")
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Share | None = None
    top_k: int | None = Field(
        None,
        ge=0,
        le=2**20,
        description="Extension: number of most likely tokens to sample from. 0: all tokens.",
    )
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    seed: int | None = Field(
        None,
        ge=-MAX_INT64 - 1,
        le=MAX_INT64,
        description="The same seed produces the same text. Choice i of n uses seed + i.",
    )
    stop: (
        Annotated[
            Annotated[Stop, Tag("text:")]
            | Annotated[list[Stop], Field(max_length=4), Tag("list:")],
            Discriminator(text_or_list),
        ]
        | None
    ) = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: EndUser | None = None
    safety_identifier: EndUser | None = None
    metadata: Metadata | None = Field(None, description="Saved with a stored chat.")
    store: bool | None = Field(
        None, description="true: the chat is stored, and can be listed, retrieved and deleted."
    )
    service_tier: Option | None = Field(None, description="Accepted, without effect.")
    prompt_cache_key: CacheKey | None = Field(None, description="Accepted, without effect.")
    prompt_cache_retention: Option | None = Field(None, description="Accepted, without effect.")
    prompt_cache_options: Options | None = Field(None, description="Accepted, without effect.")
    min_p: Share | None = Field(
        None,
        description="Extension: ignores tokens with less than this fraction of the top token's "
        "probability.",
    )
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] | None = Field(
        None,
        description="Extension: above 1, tokens already in the prompt or the text become less "
        "likely.",
    )
    logit_bias: LogitBias | None = Field(
        None, description="Token IDs of the model, each with a bias to add to its logit."
    )

    @model_validator(mode="after")
    def _options_are_of_a_stream(self) -> _SampledBody:
        if self.stream_options is not None and not self.stream:
            raise WrongField(
                "stream_options", "is only allowed with stream: true; omit it otherwise"
            )
        return self

    @property
    def biases(self) -> dict[int, float]:
        """The biases to add to token logits, in token ID order."""
        biases = {int(token): bias for token, bias in (self.logit_bias or {}).items()}
        return dict(sorted(biases.items()))

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


class ChatBody(_SampledBody):
    """A conversation to continue."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is a mill?"}],
                "max_tokens": 16,
                "temperature": 0,
            }
        },
    )

    messages: list[Message] = Field(min_length=1, max_length=2048)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: AnyToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Accepted, without effect.")
    reasoning_effort: Option | None = Field(None, description="Accepted, without effect.")
    verbosity: Option | None = Field(None, description="Accepted, without effect.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=8)] | None = None
    chat_template_kwargs: Options | None = Field(
        None, description="Extension: variables of the model's chat template."
    )
    audio: None = None
    function_call: None = None
    functions: None = None
    moderation: None = None
    prediction: None = None
    web_search_options: None = None

    @property
    def allowed_tools(self) -> list[Tool]:
        """The tools that the model may call."""
        return select_allowed_tools(self.tools, self.tool_choice)

    @property
    def forced_tools(self) -> list[FunctionTool]:
        """The tools, at least one of which the model must call.

        Empty if the model may respond without a call.
        """
        return select_forced_tools(self.tools, self.tool_choice) or []

    @model_validator(mode="after")
    def _can_be_forced(self) -> ChatBody:
        # A forced call is not a message, so response_format does not apply to it.
        select_forced_tools(self.tools, self.tool_choice)
        return self

    @model_validator(mode="after")
    def _options_are_of_the_template(self) -> ChatBody:
        if reserved := sorted(TEMPLATE_VARIABLES & (self.chat_template_kwargs or {}).keys()):
            raise WrongField(
                "chat_template_kwargs", f"{reserved[0]} is set by other fields; omit it"
            )
        return self

    @model_validator(mode="after")
    def _alternatives_need_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise WrongField("top_logprobs", "requires logprobs: true")
        return self

    @model_validator(mode="after")
    def _has_one_length(self) -> ChatBody:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise WrongField(
                "max_completion_tokens", "send either max_tokens or max_completion_tokens, not both"
            )
        return self


class CompletionBody(_SampledBody):
    """A prompt to continue, without a chat template."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "A mill is", "max_tokens": 16, "temperature": 0}},
    )

    prompt: Annotated[
        Annotated[str, Field(min_length=1), Tag("text:")]
        | Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
            Tag("texts:"),
        ]
        | Annotated[Tokens, Tag("tokens:")]
        | Annotated[
            list[Tokens],
            Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
            Tag("token_lists:"),
        ],
        Discriminator(shape_of),
    ]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: bool | None = Field(
        None,
        description="Include the prompt before the text. With logprobs, the prompt's tokens have "
        "logprobs too.",
    )
    best_of: Literal[1] | None = None
    suffix: None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, as text or as token IDs."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if tokens := [token for token in self.prompt if isinstance(token, int)]:
            return [tokens]
        return self.prompt  # type: ignore[return-value] # a list of one kind, as was checked

    @model_validator(mode="after")
    def _texts_fit(self) -> CompletionBody:
        texts, max_texts = len(self.prompts) * (self.n or 1), MAX_TEXTS
        if self.stream:
            max_texts = MAX_STREAMED_TEXTS
        if texts > max_texts:
            how = "a stream" if self.stream else "a request"
            raise WrongField(
                "prompt",
                f"{texts} texts (prompts times n) exceed the maximum of {max_texts} for {how}",
            )
        return self

    @model_validator(mode="after")
    def _echoes_no_stream(self) -> CompletionBody:
        if self.echo and self.stream:
            raise WrongField("echo", "a stream can't include the prompt; omit echo or stream")
        return self
