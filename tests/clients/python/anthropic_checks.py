"""Anthropic's client, with its defaults: messages, streams, tools, counts and errors."""

from __future__ import annotations

from typing import Any

import anthropic

from tests.clients.python.checks import (
    KEY,
    LIMIT_S,
    URL,
    WRONG_KEY,
    check,
    fresh,
    main,
    needs_keys,
    needs_text,
    raises,
)

ASKED = [{"role": "user", "content": "What is a mill?"}]
COLOR: Any = {
    "name": "paint",
    "description": "Paints a wall.",
    "input_schema": {
        "type": "object",
        "properties": {"color": {"type": "string", "enum": ["red", "green"]}},
        "required": ["color"],
        "additionalProperties": False,
    },
}


def client(**options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(**{"base_url": URL, "api_key": KEY, "timeout": LIMIT_S, **options})


def asked(**options: Any) -> Any:
    given = {"model": needs_text(), "max_tokens": 16, "messages": ASKED}
    # This version of the client does not have a `temperature` parameter.
    return given | {"extra_body": {"temperature": 0}} | options


@check
def message() -> None:
    made = client().messages.create(**asked(system="Be brief."))
    (block,) = made.content
    assert block.type == "text"
    assert block.text
    assert made.stop_reason in ("end_turn", "max_tokens")
    assert made.usage.input_tokens + made.usage.cache_read_input_tokens > 5


@check
def stream_is_the_message() -> None:
    # A cached text arrives in one piece, so use a text that has not been requested before.
    given = asked(messages=[{"role": "user", "content": fresh(1)[0]}])
    with client().messages.stream(**given) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    whole = client().messages.create(**given).content[0].text
    assert len(pieces) > 1
    assert "".join(pieces) == final.content[0].text == whole
    assert final.usage.output_tokens > 3
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens > 5


@check
async def stream_asynchronously() -> None:
    async with anthropic.AsyncAnthropic(base_url=URL, api_key=KEY, timeout=LIMIT_S) as made:
        events = [event async for event in await made.messages.create(**asked(stream=True))]
    assert events[0].type == "message_start"
    assert events[-1].type == "message_stop"


@check
def agent_calls_a_tool_and_reads_its_result() -> None:
    messages: list[Any] = [{"role": "user", "content": "Paint the wall red."}]
    for step in range(3):
        choice = {"type": "any"} if step < 2 else {"type": "none"}
        with client().messages.stream(
            **asked(messages=messages, tools=[COLOR], tool_choice=choice, max_tokens=48)
        ) as stream:
            final = stream.get_final_message()
        messages.append({"role": "assistant", "content": final.content})
        calls = [block for block in final.content if block.type == "tool_use"]
        assert bool(calls) == (step < 2), final
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": "It is painted."}
            for call in calls
        ]
        for call in calls:
            assert call.input["color"] in ("red", "green")
        messages.append({"role": "user", "content": results or "Thanks."})


@check
def tokens_are_counted() -> None:
    counted = client().messages.count_tokens(model=needs_text(), messages=ASKED, tools=[COLOR])
    made = client().messages.create(**asked(tools=[COLOR], tool_choice={"type": "auto"}))
    usage = made.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@check
def too_long_prompt_is_told_in_streams_too() -> None:
    long = [{"role": "user", "content": "the turbine turns " * 2000}]
    for stream in (False, True):
        with raises(anthropic.BadRequestError) as caught:
            client().messages.create(**asked(messages=long, stream=stream))
        assert "prompt is too long" in str(caught.error)


@check
def unknown_model_is_told() -> None:
    needs_text()
    with raises(anthropic.NotFoundError) as caught:
        client().messages.create(**asked(model="no-such-model"))
    assert "no-such-model" in str(caught.error)


@check
def wrong_key_is_refused() -> None:
    needs_keys()
    with raises(anthropic.AuthenticationError):
        client(api_key=WRONG_KEY).messages.create(**asked())


main()
