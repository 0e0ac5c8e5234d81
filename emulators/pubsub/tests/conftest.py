"""A broker with virtual time, or a server of its own, for each test that asks for one."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from infra.emulators.pubsub.server import PubsubServer, serve
from tests.infra.pubsub.wire import TOPIC, Wire, connect
from tests.infra.pubsub.world import KeptWorld, World, kept_world


@pytest.fixture
def world() -> World:
    """A world with the topic `jobs` and its subscription `workers`."""
    world = World()
    world.topic()
    world.subscription()
    return world


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[KeptWorld]:
    """A world in a directory with the topics `jobs` and `dead`."""
    with kept_world(tmp_path) as world:
        world.topic()
        world.topic("dead")
        yield world


@pytest.fixture
async def server() -> AsyncIterator[PubsubServer]:
    async with serve() as server:
        yield server


@pytest.fixture
async def wire(server: PubsubServer) -> AsyncIterator[Wire]:
    """A connection to `server`, which has the topic `TOPIC`."""
    async with connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        yield wire
