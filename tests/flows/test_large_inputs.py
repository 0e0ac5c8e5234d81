"""Data passed between steps that exceeds a message's size limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from shared.messages import MAX_DATA_BYTES
from tests.flows.models import Compute, class_entry
from tests.flows.world import world

pytestmark = pytest.mark.anyio

STRING = {"type": "string"}
GROW = class_entry("grow", {"letter": STRING}, STRING, batch={"max_items": 16})
SIZE = class_entry("size", {"text": STRING}, {"type": "integer"}, batch={"max_items": 16})
TOTAL = class_entry(
    "total", {"texts": {"type": "array", "items": STRING}}, {"type": "integer"}, price={}
)
LETTERS, CHARS = list("abcdefghijklm"), 750_000
assert len(LETTERS) * CHARS > MAX_DATA_BYTES
GROWN = {
    "id": "grown",
    "model": GROW.name,
    "for_each": "$input.letters",
    "input": {"letter": "$item"},
}


class Grows(Compute):
    """Turns a letter into a long text."""

    def output(self, name: str, values: Mapping[str, Any]) -> Any:
        if name == GROW.name:
            return values["letter"] * CHARS
        return len(values["text"]) if name == SIZE.name else sum(map(len, values["texts"]))


def flow_of(**step: Any) -> dict[str, Any]:
    """A flow that grows letters and measures the texts in its last step."""
    return {
        "name": "long",
        "input": {"letters": ["string"]},
        "steps": [GROWN, {"id": "last", "default": -1} | step],
        "output": "$last",
    }


async def ran(redis_url: str, flow: Mapping[str, Any], letters: list[str]) -> dict[str, Any]:
    async with world(redis_url, flow, models=(GROW, SIZE, TOTAL), computes=Grows) as flows:
        return await flows.run("long", {"letters": letters})


async def test_items_go_into_as_many_messages_as_they_need(redis_url: str) -> None:
    last = {"model": SIZE.name, "for_each": "$grown", "input": {"text": "$item"}}
    run = await ran(redis_url, flow_of(**last), LETTERS)
    assert (run["status"], run["output"]) == ("succeeded", [CHARS] * len(LETTERS))


async def test_an_item_that_is_too_large_fails_as_any_that_fails(redis_url: str) -> None:
    last = {"model": TOTAL.name, "input": {"texts": "$grown"}}
    run = await ran(redis_url, flow_of(**last), LETTERS)
    assert (run["status"], run["output"]) == ("succeeded", -1)
    without = flow_of(**last)
    del without["steps"][1]["default"]
    run = await ran(redis_url, without, LETTERS)
    assert run["status"] == "failed"
    assert run["error"].startswith("step 'last': the input is 97501")
    assert run["error"].endswith("bytes as JSON, which exceeds the maximum of 9371648")


async def test_no_items_give_an_empty_list(redis_url: str) -> None:
    last = {"model": SIZE.name, "for_each": "$grown", "input": {"text": "$item"}}
    run = await ran(redis_url, flow_of(**last), [])
    assert (run["status"], run["output"]) == ("succeeded", [])
