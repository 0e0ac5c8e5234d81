"""A slow line does not hold up any other line, and no later response is lost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.batch_runner import answers as answers_module
from api.batches.store import BatchStore
from shared.errors import Unavailable
from tests.api.batches.batching import (
    answers,
    created,
    jsonl,
    line,
    running_runner,
    until,
    until_completed,
)
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio

LINES = 60
Hold = Callable[[Callable[[int], bool]], asyncio.Event]


def is_slow(number: int) -> bool:
    """True for the second line in each segment of seven."""
    return number % 7 == 2


SLOW = sum(is_slow(number) for number in range(1, LINES + 1))


async def check(client: Any, done: Any) -> None:
    """Compares the results with the lines."""
    assert done.request_counts.model_dump() == {"completed": LINES, "failed": 0, "total": LINES}
    found = await answers(client, done.output_file_id)
    assert [one["custom_id"] for one in found] == [str(n) for n in range(LINES)]


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("kept_bytes", [0, 1 << 24])
async def test_lines_and_counts_go_on_beside_slow_lines(
    api: ApiUnderTest, held_lines: Hold, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """Memory is bounded: requests that were logged are read again."""
    monkeypatch.setattr(answers_module, "KEPT_BYTES", kept_bytes)
    go, client = held_lines(is_slow), api.openai()
    batch = await created(client, jsonl(line(str(n)) for n in range(LINES)))
    await until_completed(client, batch, LINES - SLOW)
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    go.set()
    await check(client, await until(client, batch))
    store = api.dependencies.batches._store
    async with asyncio.timeout(WAIT_LIMIT_S):
        while await store.open():  # noqa: ASYNC110 - the runner closes it after its end
            await asyncio.sleep(0.02)
    left = await store._objects.listing("batches/runs", 100)
    assert not [one.key for one in left if not one.key.endswith(".json")]


@pytest.mark.usefixtures("small_segments")
async def test_next_runner_has_the_lines_that_ended_behind_a_slow_one(
    tmp_path: Path, redis_url: str, held_lines: Hold
) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url)
    async with running_api(settings) as api:
        client = api.openai()
        async with running_runner(api, settings):
            go = held_lines(is_slow)
            batch = await created(client, jsonl(line(str(n)) for n in range(LINES)))
            await until_completed(client, batch, LINES - SLOW)
        before = len(api.worker.jobs)
        go.set()
        async with running_runner(api, settings):
            await check(client, await until(client, batch))
        again = {job.envelope.request_id for job in api.worker.jobs[before:]}
        assert again == {f"{batch.id}-{n}" for n in range(1, LINES + 1) if is_slow(n)}


@pytest.mark.usefixtures("small_segments")
async def test_lines_that_ended_behind_a_slow_one_are_delivered_by_a_cancel(
    api: ApiUnderTest, held_lines: Hold
) -> None:
    held_lines(is_slow)
    client = api.openai()
    batch = await created(client, jsonl(line(str(n)) for n in range(LINES)))
    await until_completed(client, batch, LINES - SLOW)
    await client.batches.cancel(batch.id)
    done = await until(client, batch)
    assert (done.status, done.request_counts.completed) == ("cancelled", LINES - SLOW)
    undone = await answers(client, done.error_file_id)
    assert {one["error"]["code"] for one in undone} == {"batch_cancelled"}
    assert [int(one["custom_id"]) + 1 for one in undone] == [
        number for number in range(1, LINES + 1) if is_slow(number)
    ]


@pytest.mark.usefixtures("small_segments")
async def test_lines_in_flight_go_on_when_a_segment_can_not_be_written(
    api: ApiUnderTest, held_lines: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object store fails briefly. No line is started twice."""
    begun, failed, write = Counter[int](), asyncio.Event(), BatchStore.add_segment

    def is_held(number: int) -> bool:
        begun[number] += 1
        return number > 7

    async def add_segment(
        self: BatchStore, owner: str, batch_id: str, index: int, data: bytes
    ) -> bool:
        if not failed.is_set():
            failed.set()
            raise Unavailable
        return await write(self, owner, batch_id, index, data)

    go, client = held_lines(is_held), api.openai()
    monkeypatch.setattr(BatchStore, "add_segment", add_segment)
    batch = await created(client, jsonl(line(str(n)) for n in range(LINES)))
    async with asyncio.timeout(WAIT_LIMIT_S):
        await failed.wait()
    go.set()
    await check(client, await until(client, batch))
    assert begun == dict.fromkeys(range(1, LINES + 1), 1)
