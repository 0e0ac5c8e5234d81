"""An API over an in-memory broker, for tests that need nothing else.

It has no Redis unless a test provides one.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.api.inboxes import Broker, embedded, in_memory
from tests.record_stores import RecordStores


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    async with running_api(settings_for(tmp_path)) as running:
        yield running
        await running.until_idle()
        assert running.dependencies.dispatcher.in_flight == 0


@pytest.fixture
async def serve(tmp_path: Path, redis_url: str) -> AsyncIterator[Any]:
    from tests.api.serving_classes import serve_class

    async with AsyncExitStack() as opened:
        yield partial(serve_class, opened, tmp_path, redis_url)


@pytest.fixture
async def page(api: ApiUnderTest) -> dict[str, Any]:
    """The OpenAPI document, exactly as the API serves it."""
    found: dict[str, Any] = (await api.http.get("/openapi.json")).json()
    return found


@pytest.fixture
async def stores(redis_url: str) -> AsyncIterator[RecordStores]:
    async with RecordStores(redis_url) as opened:
        yield opened


@pytest.fixture(params=["memory", "embedded"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    if request.param == "memory":
        yield in_memory()
    else:
        async with embedded(request.getfixturevalue("pubsub_endpoint")) as opened:
            yield opened
