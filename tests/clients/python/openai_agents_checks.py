"""openai-agents, with its defaults: responses, tools, handoffs and chained responses."""

from __future__ import annotations

from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    Runner,
    function_tool,
    handoff,
    set_default_openai_client,
    set_tracing_disabled,
)
from pydantic import BaseModel

from tests.clients.python.checks import KEY, LIMIT_S, URL, check, main, needs_text

set_tracing_disabled(True)
painted: list[str] = []


def _paint(color: str) -> str:
    """Paints the wall."""
    painted.append(color)
    return "It is painted."


paint = function_tool(_paint, name_override="paint")


class Greeting(BaseModel):
    """An agent's greeting."""

    word: Literal["hello", "goodbye"]


def agent(name: str, **options: Any) -> Agent[Any]:
    # Each check has its own event loop, and a client belongs to one loop.
    client = openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=LIMIT_S)
    set_default_openai_client(client, use_for_tracing=False)
    settings = ModelSettings(max_tokens=250, temperature=0, tool_choice=options.pop("choice", None))
    return Agent(name=name, model=needs_text(), model_settings=settings, **options)


@check
async def agent_answers() -> None:
    result = await Runner.run(agent("plain", instructions="Be brief."), "Say hello.")
    assert result.final_output


@check
async def agent_calls_a_tool() -> None:
    painted.clear()
    one = agent("painter", tools=[paint], choice="required")
    result = await Runner.run(one, "Paint the wall red.", max_turns=4)
    assert painted
    assert result.final_output is not None


@check
async def responses_are_chained_on_their_own() -> None:
    painted.clear()
    one = agent("painter", tools=[paint], choice="required")
    result = await Runner.run(
        one, "Paint the wall red.", max_turns=4, auto_previous_response_id=True
    )
    assert painted
    assert len(result.raw_responses) > 1
    again = await Runner.run(
        agent("plain"), "And now?", previous_response_id=result.last_response_id
    )
    assert again.final_output


@check
async def streamed_agent_chains_responses() -> None:
    one = agent("painter", tools=[paint], choice="required")
    result = Runner.run_streamed(
        one, "Paint the wall green.", max_turns=4, auto_previous_response_id=True
    )
    kinds = [event.type async for event in result.stream_events()]
    assert "run_item_stream_event" in kinds


@check
async def agent_hands_off_to_another() -> None:
    # A small model keeps writing, and this client treats a truncated response as an error.
    other = agent("plain", instructions="Be brief.", output_type=Greeting)
    first = agent("first", handoffs=[handoff(other)], choice="required")
    result = await Runner.run(first, "Say hello.", max_turns=4)
    assert result.last_agent.name == "plain"
    assert result.final_output


main()
