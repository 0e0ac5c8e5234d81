"""A broker with virtual time, or a server of its own, for each test that asks for one."""

from collections.abc import AsyncIterator

import pytest

from infra.local.pubsub.server import PubsubServer, serve
from tests.infra.pubsub.wire import TOPIC, Wire, connect
from tests.infra.pubsub.world import World


@pytest.fixture
def world() -> World:
    """A world with the topic `jobs` and its subscription `workers`."""
    world = World()
    world.topic()
    world.subscription()
    return world


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
