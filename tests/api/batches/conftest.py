"""Fixtures for batch tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from api.batch_runner import run, segments
from api.batch_runner import runner as runner_module
from api.batch_runner.execution import LineExecutor
from api.batch_runner.lines import BatchLine
from api.batch_runner.turn_progress import TurnProgress
from api.batches.documents import BatchCreated, LineAnswer
from shared.tenants.plan import Caller
from tests.api.batches.batching import (
    Running,
    batching,
)
from tests.api.harness import ApiUnderTest


@pytest.fixture
async def both(tmp_path: Path, redis_url: str) -> AsyncIterator[tuple[ApiUnderTest, Running]]:
    async with batching(tmp_path, redis_url) as running:
        yield running


@pytest.fixture
def api(both: tuple[ApiUnderTest, Running]) -> ApiUnderTest:
    return both[0]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner_module, "POLL_S", 0.05)
    monkeypatch.setattr(segments, "FLUSH_S", 0.05)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SEGMENT_LINES", 7)


@pytest.fixture
def held_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Callable[[int], bool]], asyncio.Event]:
    """Makes lines with the chosen numbers wait for the event."""

    def hold(is_held: Callable[[int], bool]) -> asyncio.Event:
        go, run_line = asyncio.Event(), LineExecutor.run

        async def run(
            self: LineExecutor,
            batch: BatchCreated,
            caller: Caller,
            line: BatchLine,
            progress: TurnProgress,
            *rest: Any,
        ) -> LineAnswer | None:
            if is_held(line.number):
                await go.wait()
            return await run_line(self, batch, caller, line, progress, *rest)

        monkeypatch.setattr(LineExecutor, "run", run)
        return go

    return hold


@pytest.fixture
def held_after(
    held_lines: Callable[[Callable[[int], bool]], asyncio.Event],
) -> Callable[[int], asyncio.Event]:
    """Makes lines with numbers above this one wait for the event."""
    return lambda number: held_lines(lambda one: one > number)
