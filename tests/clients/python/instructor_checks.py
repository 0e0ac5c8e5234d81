"""instructor: objects of a schema, in each of its modes that OpenAI's client has."""

from __future__ import annotations

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field

from tests.clients.python.checks import KEY, LIMIT_S, URL, check, main, needs_text


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=24)
    people: int = Field(ge=0, le=40_000_000)


def found(mode: instructor.Mode) -> City:
    client = openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY, timeout=LIMIT_S)
    made: City = instructor.from_openai(client, mode=mode).chat.completions.create(
        model=needs_text(),
        messages=[{"role": "user", "content": "A city in Spain?"}],
        response_model=City,
        temperature=0,
        max_tokens=96,
        max_retries=0,
    )
    return made


@check
def tools() -> None:
    assert isinstance(found(instructor.Mode.TOOLS), City)


@check
def tools_strict() -> None:
    assert isinstance(found(instructor.Mode.TOOLS_STRICT), City)


@check
def json_schema() -> None:
    assert isinstance(found(instructor.Mode.JSON_SCHEMA), City)


main()
