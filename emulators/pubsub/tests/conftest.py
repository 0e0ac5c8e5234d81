"""A broker with virtual time, or a separate server, for each test that requests one."""

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from pubsub_emulator.server import PubsubServer, serve
from tests.wire import TOPIC, Wire, connect
from tests.world import KeptWorld, World, kept_world

# Uses the same examples each time, so that any failure is caused by the change;
# `--hypothesis-profile=explore` tries others.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("repeatable")

# The servers run on this machine, and a proxy set in the environment could not reach them.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "localhost,127.0.0.1,::1"


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Returns a bytes parameter's length as its id.

    For other values, returning None lets pytest choose the id.

    Two processes collect the tests and must come up with the same names.
    """
    return f"{argname}-{len(val)}-bytes" if isinstance(val, bytes) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Makes all async tests run in one event loop, using anyio's `_one_event_loop` fixture."""
    for item in items:
        if isinstance(item, pytest.Function) and "anyio_backend" in item.fixturenames:
            item.fixturenames.insert(0, "_one_event_loop")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
async def _one_event_loop(anyio_backend: str) -> AsyncIterator[None]:
    """Keeps one event loop for all tests in a process.

    gRPC's poller serves all of a process's loops, so a closed loop's pending work would fail the
    next test with "Event loop is closed".
    """
    yield  # noqa: PT022  what follows a yield keeps the loop


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("GOOGLE_", "BIGQUERY_", "PUBSUB_")):
            monkeypatch.delenv(name)


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
