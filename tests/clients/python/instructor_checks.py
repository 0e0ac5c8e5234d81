"""instructor: objects that follow a schema, in each mode it has for OpenAI's and Anthropic's
clients.

A small model does not reliably return JSON from a prose request. If a mode doesn't enforce the
format itself, the check adds something that does: a grammar, or a tool that must be called.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
from instructor.v2.core.errors import IncompleteOutputException
from instructor.v2.core.provider_specs import PROVIDER_SPECS
from instructor.v2.core.providers import Provider
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.python.checks import KEY, LIMIT_S, URL, check, main, needs_text

warnings.simplefilter("ignore")  # about older mode names, and modes that request JSON in prose
Mode = instructor.Mode
ASKED = [{"role": "user", "content": "A city in Spain?"}]


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=24)
    people: int = Field(ge=0, le=40_000_000)


class AnyObject(BaseModel):
    """Any JSON object: `json_object` promises no more than that."""

    model_config = ConfigDict(extra="allow")


GRAMMAR = {
    "type": "json_schema",
    "json_schema": {"name": "City", "schema": City.model_json_schema()},
}
MESSAGES_GRAMMAR = {"format": {"type": "json_schema", "schema": City.model_json_schema()}}
FORCED = {"extra_body": {"tool_choice": "required"}}
OPENAI_MODES: dict[instructor.Mode, dict[str, Any]] = {
    Mode.TOOLS: {},
    Mode.TOOLS_STRICT: {},
    Mode.FUNCTIONS: {},
    Mode.JSON_SCHEMA: {},
    Mode.JSON_O1: {},
    Mode.JSON: {"extra_body": {"response_format": GRAMMAR}},
    Mode.MD_JSON: {"response_format": GRAMMAR},
    Mode.PARALLEL_TOOLS: FORCED,
    Mode.RESPONSES_TOOLS: {},
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS: {},
}
"""The modes, with the extra options that a small model needs."""
ANTHROPIC_MODES: dict[instructor.Mode, dict[str, Any]] = {
    Mode.TOOLS: {},
    Mode.ANTHROPIC_TOOLS: {},
    Mode.ANTHROPIC_REASONING_TOOLS: {},
    Mode.JSON_SCHEMA: {"output_config": MESSAGES_GRAMMAR},
    Mode.JSON: {"output_config": MESSAGES_GRAMMAR},
    Mode.ANTHROPIC_JSON: {"output_config": MESSAGES_GRAMMAR},
    Mode.PARALLEL_TOOLS: {"extra_body": {"tool_choice": {"type": "any"}}},
    Mode.ANTHROPIC_PARALLEL_TOOLS: {"extra_body": {"tool_choice": {"type": "any"}}},
}


def through_openai(mode: instructor.Mode, **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=LIMIT_S)
    return instructor.from_openai(client, mode=mode, **options)


def through_anthropic(mode: instructor.Mode) -> Any:
    client = anthropic.Anthropic(base_url=URL, api_key=KEY, timeout=LIMIT_S)
    return instructor.from_anthropic(client, mode=mode)


def asked(mode: instructor.Mode, **options: Any) -> dict[str, Any]:
    is_parallel = mode in (Mode.PARALLEL_TOOLS, Mode.ANTHROPIC_PARALLEL_TOOLS)
    return {
        "model": needs_text(),
        "messages": ASKED,
        "response_model": Iterable[City] if is_parallel else City,
        "max_tokens": 96,
        "max_retries": 0,
        **options,
    }


def first(made: Any) -> Any:
    return made if isinstance(made, BaseModel) else next(iter(made))


def modes_of(provider: Provider) -> set[instructor.Mode]:
    spec = PROVIDER_SPECS[provider]
    return {*spec.supported_modes, *spec.legacy_modes}


@check
def no_mode_is_left_out() -> None:
    needs_text()
    assert modes_of(Provider.OPENAI) == set(OPENAI_MODES)
    assert modes_of(Provider.ANTHROPIC) == set(ANTHROPIC_MODES)


def checked_in(provider: str, mode: instructor.Mode, more: dict[str, Any]) -> None:
    def in_a_mode() -> None:
        through = through_openai if provider == "openai" else through_anthropic
        given = asked(mode, **more)
        assert isinstance(first(through(mode).create(**given)), City)

    in_a_mode.__name__ = f"{provider}_{mode.name}"
    check(in_a_mode)


for one, more in OPENAI_MODES.items():
    checked_in("openai", one, more)
for one, more in ANTHROPIC_MODES.items():
    checked_in("anthropic", one, more)


@check
def json_mode_with_what_it_sends_itself() -> None:
    """A small model may never close its object.

    The client must then raise an error with the reason.
    """
    given = asked(Mode.JSON, response_model=AnyObject, temperature=0, max_tokens=250)
    try:
        made = through_openai(Mode.JSON).create(**given)
    except IncompleteOutputException as error:
        assert error.last_completion.choices[0].finish_reason == "length"  # noqa: PT017
    else:
        assert isinstance(made, AnyObject)


@check
def object_grows_while_it_is_streamed() -> None:
    for mode in (Mode.TOOLS, Mode.JSON_SCHEMA):
        given = asked(mode)
        del given["response_model"], given["max_retries"]
        seen = list(through_openai(mode).create_partial(response_model=City, **given))
        assert len(seen) > 1, mode
        City.model_validate(seen[-1].model_dump())


@check
def objects_are_streamed_one_by_one() -> None:
    given = asked(Mode.TOOLS, response_model=City)
    del given["max_retries"]
    sampled = {"max_tokens": 200, "temperature": 0}  # its tool does not accept a list either
    made = through_openai(Mode.TOOLS).create_iterable(**given | sampled)
    assert isinstance(next(iter(made)), City)


@check
async def asynchronously() -> None:
    async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=LIMIT_S) as client:
        made = await instructor.from_openai(client).create(**asked(Mode.TOOLS))
    assert isinstance(made, City)


main()
