"""Fixtures for tests of stores and the Pub/Sub client."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from infra.local.redis_server import RedisServer
from shared.broker.pubsub.client import PubSubTransport
from tests.google_emulator import find_emulator, running_emulator
from tests.shared.scripted_pubsub import Opened, scripted_pubsub


@pytest.fixture(scope="session")
def google_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """HOST:PORT of Google's Pub/Sub emulator, if it is installed."""
    command = find_emulator()
    if command is None:
        pytest.skip("Google's emulator or a Java is not on this machine")
    with running_emulator(command, tmp_path_factory.mktemp("google")) as endpoint:
        yield endpoint


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that a test may stop; it keeps its data across restarts."""
    with RedisServer(tmp_path, tmp_path, persist=True) as server:
        yield server


@pytest.fixture
async def opened() -> AsyncIterator[Opened]:
    """A scripted Pub/Sub and a transport that is connected to it."""
    async with scripted_pubsub() as script, PubSubTransport("p", script.endpoint) as transport:
        yield script, transport
