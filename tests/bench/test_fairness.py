"""The workers with a model that only takes time serve jobs as others do."""

import asyncio
from pathlib import Path

import pytest

from bench.fairness.timed import JOB_ITEMS, servers, timed_workers
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio


async def test_request_of_several_jobs_is_answered_with_its_work(tmp_path: Path) -> None:
    with servers(tmp_path) as where:
        async with timed_workers(*where, workers=2) as callers, asyncio.timeout(WAIT_LIMIT_S):
            assert await callers.ask("tenant", [2] * (JOB_ITEMS + 1), weight=2.0) == 2 * 17
            assert await callers.ask("tenant", [3], priority="batch") == 3
