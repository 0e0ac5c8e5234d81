"""pydantic-ai: agents using chats, responses and Anthropic's messages."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.clients.python.checks import KEY, URL, check, main, needs_text


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=24)
    people: int = Field(ge=0, le=40_000_000)


def models() -> dict[str, Any]:
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY)
    return {
        "chats": OpenAIChatModel(needs_text(), provider=openai),
        "responses": OpenAIResponsesModel(needs_text(), provider=openai),
        "messages": AnthropicModel(
            needs_text(), provider=AnthropicProvider(base_url=URL, api_key=KEY)
        ),
    }


SETTINGS = ModelSettings(max_tokens=24)
FILLED = ModelSettings(max_tokens=64)


@check
def agent_answers() -> None:
    for name, model in models().items():
        result = Agent(model, model_settings=SETTINGS).run_sync("What is a mill?")
        assert result.output, name


@check
async def agent_streams() -> None:
    for name, model in models().items():
        async with Agent(model, model_settings=SETTINGS).run_stream("Name a river.") as stream:
            pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
        assert "".join(pieces), name


@check
def agent_fills_a_schema() -> None:
    for name, model in models().items():
        agent = Agent(model, output_type=City, model_settings=FILLED, retries=2)
        assert isinstance(agent.run_sync("A city in Spain?").output, City), name


@check
def conversation_goes_on() -> None:
    for name, model in models().items():
        agent = Agent(model, model_settings=SETTINGS)
        first = agent.run_sync("What is a mill?")
        again = agent.run_sync("And a river?", message_history=first.all_messages())
        assert again.output, name


main()
