"""Batches in one process: an API, a runner, and a fake worker for both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.batch_runner.runner import BatchRunner, open_runner
from shared.models.catalog import Catalog
from shared.settings import ApiSettings
from shared.usage.row import Row
from shared.usage.row_list import RowList
from tests.api.harness import (
    CATALOG,
    TEXT_MODEL,
    ApiUnderTest,
    already_open,
    running_api,
    settings_for,
)
from tests.limits import WAIT_LIMIT_S

ENDPOINT = "/v1/embeddings"
OVER = {"completed", "failed", "expired", "cancelled"}


def line(custom_id: str, text: str = "", **body: Any) -> dict[str, Any]:
    """A batch line that embeds some text."""
    given = {"model": TEXT_MODEL.name, "input": text or f"text {custom_id}", **body}
    return {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": given}


def jsonl(lines: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def created(client: Any, data: bytes, endpoint: str = ENDPOINT, **given: Any) -> Any:
    """A batch whose input file has these bytes."""
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **given
    )


async def until(client: Any, batch: Any, *statuses: str) -> Any:
    """Returns the batch once it has one of these statuses or has finished."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            found = await client.batches.retrieve(batch.id)
            if found.status in (statuses or OVER):
                return found
            assert not statuses or found.status not in OVER, found
            await asyncio.sleep(0.02)


async def until_completed(client: Any, batch: Any, lines: int) -> None:
    """Waits until `count` lines are completed."""
    async with asyncio.timeout(WAIT_LIMIT_S):
        while True:
            counts = (await client.batches.retrieve(batch.id)).request_counts
            if counts.completed >= lines:
                return
            await asyncio.sleep(0.02)


async def answers(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    """The lines in an output or error file."""
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    return [json.loads(one) for one in text.splitlines()]


@dataclass
class Running:
    """A runner and its rows."""

    runner: BatchRunner
    task: asyncio.Task[None]
    rows: list[Row]


@asynccontextmanager
async def running_runner(
    api: ApiUnderTest, settings: ApiSettings, lease_s: float = 15.0, catalog: Catalog = CATALOG
) -> AsyncIterator[Running]:
    """A runner alongside an API, sharing its broker and object store."""
    rows = RowList()
    async with open_runner(
        settings,
        catalog,
        already_open(api.broker),
        already_open(api.broker),
        rows,
        lease_s=lease_s,
    ) as runner:
        task = asyncio.create_task(runner.run())
        try:
            yield Running(runner, task, rows.rows)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def batching(
    tmp_path: Path, redis_url: str, *, catalog: Catalog = CATALOG, **settings: object
) -> AsyncIterator[tuple[ApiUnderTest, Running]]:
    given = settings_for(tmp_path, redis_url=redis_url, **settings)
    async with (
        running_api(given, catalog=catalog) as api,
        running_runner(api, given, catalog=catalog) as running,
    ):
        yield api, running
