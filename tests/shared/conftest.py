"""What tests of stores and of the Pub/Sub client share."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from infra.local.redis_server import RedisServer
from shared.pubsub.client import PubSubTransport
from tests.shared.scripted_pubsub import Opened, scripted_pubsub


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that a test may stop; what it holds is there when it starts again."""
    with RedisServer(tmp_path, tmp_path, persist=True) as server:
        yield server


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    """A Pub/Sub that does what the test says, and a transport that is connected to it."""
    async with scripted_pubsub() as script, PubSubTransport("p", script.endpoint) as transport:
        yield script, transport
