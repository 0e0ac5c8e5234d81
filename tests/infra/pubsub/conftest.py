"""A broker with virtual time for each test that asks for one."""

import pytest

from tests.infra.pubsub.world import World


@pytest.fixture
def world() -> World:
    """A world with the topic `jobs` and its subscription `workers`."""
    world = World()
    world.topic()
    world.subscription()
    return world
