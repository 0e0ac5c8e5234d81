"""Flows end to end: an API and workers over a broker in memory and a real Redis."""

import pytest

from tests.flows.models import CHECK, JOIN, SPLIT
from tests.flows.world import world

pytestmark = pytest.mark.anyio

SPELL = {
    "name": "spell",
    "input": {"text": "string"},
    "steps": [
        {"id": "words", "model": SPLIT.name, "input": {"text": "$input.text"}},
        {
            "id": "check",
            "model": CHECK.name,
            "for_each": "$words",
            "input": {"word": "$item"},
        },
        {"id": "joined", "model": JOIN.name, "input": {"words": "$check.word"}},
    ],
    "output": {"text": "$joined", "sizes": "$check.size", "words": "$words"},
}


async def test_three_steps_give_the_output(redis_url: str) -> None:
    async with world(redis_url, SPELL) as flows:
        run = await flows.run("spell", {"text": "a cat on a mat"})
        rows = await flows.until_rows(7)
    assert run["status"] == "succeeded", run
    assert run["output"] == {
        "text": "A CAT ON A MAT",
        "sizes": [1, 3, 2, 1, 3],
        "words": ["a", "cat", "on", "a", "mat"],
    }
    assert {(row.flow, row.step, row.model) for row in rows} == {
        ("spell", "words", SPLIT.name),
        ("spell", "check", CHECK.name),
        ("spell", "joined", JOIN.name),
    }
    assert len({row.row_id for row in rows}) == len(rows) == 7
    assert sum(row.cost_usd or 0 for row in rows) == pytest.approx(run["metrics"]["cost_usd"])
