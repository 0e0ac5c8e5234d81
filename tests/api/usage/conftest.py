"""The pipeline whose usage the tests read."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.api.usage.world import World, opened_world


@pytest.fixture
async def world(redis_url: str, tmp_path: Path, bigquery_endpoint: str) -> AsyncIterator[World]:
    async with opened_world(redis_url, tmp_path, bigquery_endpoint) as made:
        yield made
