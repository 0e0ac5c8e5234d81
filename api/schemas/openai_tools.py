"""Tools in the bodies of requests for text, and which of them the model may or must call."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from api.schemas.openai import Body

TOOL_NAME = r"^[A-Za-z0-9_-]{1,64}$"


class FunctionTool(Body):
    """A function that the model may call."""

    name: str = Field(pattern=TOOL_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON schema of its arguments.")
    strict: bool | None = None


class Tool(Body):
    """A tool. There are only functions."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """The name of a function."""

    name: str


class ToolChoice(Body):
    """The one function that the model is to call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Some of the tools, of which the model may call one, or must."""

    mode: Literal["auto", "required"]
    tools: list[ToolChoice] = Field(min_length=1, max_length=128)


class AllowedToolChoice(Body):
    """The tools that count in this request."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


AnyToolChoice = Literal["none", "auto", "required"] | ToolChoice | AllowedToolChoice


def allowed_tools(tools: list[Tool] | None, choice: AnyToolChoice | None) -> list[Tool]:
    """The tools that the model may call."""
    if choice == "none" or not tools:
        return []
    if not isinstance(choice, AllowedToolChoice):
        return tools
    names = {one.function.name for one in choice.allowed_tools.tools}
    return [tool for tool in tools if tool.function.name in names]


def forced_tools(
    tools: list[Tool] | None, choice: AnyToolChoice | None
) -> list[FunctionTool] | None:
    """The tools of which the model must call one. None: it need not.

    Raises:
        ValueError: there is no tool that is chosen.
    """
    if choice is None or choice in ("none", "auto"):
        return None
    functions = [tool.function for tool in allowed_tools(tools, choice)]
    if isinstance(choice, ToolChoice):
        functions = [one for one in functions if one.name == choice.function.name]
    if not functions:
        raise ValueError("tool_choice: tools has no such tool")
    if isinstance(choice, AllowedToolChoice) and choice.allowed_tools.mode == "auto":
        return None
    return functions
