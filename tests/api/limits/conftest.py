"""Fixtures for limit tests: a clock that Redis reads, and a Redis that keeps its data between a
property test's examples.
"""

from collections.abc import AsyncIterator, Iterator

import pytest

from infra.local.redis_server import RedisServer
from tests.api.limits.clocks import Clock


@pytest.fixture
async def clock(redis_url: str) -> AsyncIterator[Clock]:
    made = Clock(redis_url)
    yield made
    made.close()


@pytest.fixture(scope="module")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The module's own Redis, which is never emptied."""
    folder = tmp_path_factory.mktemp("redis")
    with RedisServer(folder, folder) as server:
        yield server.url
