"""A task that runs alongside requests until it is stopped.

A task that exits on its own is logged as a bug.
"""

import asyncio
import logging

import pytest

from shared.process.concurrency import BackgroundTask

pytestmark = pytest.mark.anyio


async def test_runs_until_it_is_stopped(caplog: pytest.LogCaptureFixture) -> None:
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    told: list[str] = []
    background = BackgroundTask("waiting", run, lambda: told.append("ended"))
    await background.stop()
    background.start()
    await has_begun.wait()
    await background.stop()
    assert has_ended.is_set()
    assert not told
    assert not caplog.records


async def test_end_by_itself_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        raise ValueError("broken")

    told: list[str] = []
    background = BackgroundTask("looking", run, lambda: told.append("ended"))
    with caplog.at_level(logging.CRITICAL):
        background.start()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    (said,) = caplog.records
    assert (said.getMessage(), vars(said)["work"]) == ("work ended; this is a bug", "looking")
    assert said.exc_info is not None
    assert isinstance(said.exc_info[1], ValueError)
    assert told == ["ended"]
    await background.stop()
