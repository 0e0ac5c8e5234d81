"""No matter what headers and bodies are sent, every published job can be read, and no request gets
a 500.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import pytest
import redis
from hypothesis import HealthCheck, given, settings

from infra.local.redis_server import RedisServer
from shared.broker.in_memory import InMemoryBroker
from shared.broker.transport import jobs_topic_id
from shared.messages import decode_job
from tests.api.asked import Asked, Headers, headers, requests
from tests.api.harness import CATALOG, ApiUnderTest, running_api, settings_for
from tests.tiers import examples

pytestmark = pytest.mark.anyio

EXAMPLES = examples(500)
LATE = {503, 504}
JOBS = {jobs_topic_id(model.name) for model in CATALOG.models}
MAX_DATA_BYTES, MAX_NAME_BYTES, MAX_VALUE_BYTES = 10_000_000, 256, 1024
"""Pub/Sub's limits for a message: https://cloud.google.com/pubsub/quotas."""


class Listening(InMemoryBroker):
    """Keeps the jobs published since the last check."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[tuple[bytes, dict[str, str]]] = []

    async def publish(
        self, topic_id: str, data: bytes, attributes: Mapping[str, str], **given: Any
    ) -> str:
        if topic_id in JOBS:
            self.jobs.append((data, dict(attributes)))
        return await super().publish(topic_id, data, attributes, **given)


@pytest.fixture(scope="module")
async def api(
    tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer
) -> AsyncIterator[ApiUnderTest]:
    broker, known = (
        Listening(),
        settings_for(tmp_path_factory.mktemp("api"), redis_url=redis_server.url, secret="s"),
    )
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    async with running_api(known, broker, broker) as running:
        running.broker = broker
        yield running
        assert broker.published > EXAMPLES / 5, "hardly anything got as far as the broker"


async def answer_to(api: ApiUnderTest, asked: Asked, more: Headers) -> tuple[int, bytes]:
    """Calls the app directly, so no server in between rejects invalid HTTP."""
    raw = [
        (name.encode(), value.encode("latin-1", "replace")) for name, value in asked.headers + more
    ]
    path, address = asked.path.encode("utf-8", "replace").decode(), ("127.0.0.1", 80)
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "server": address,
    }
    scope |= {"path": path, "raw_path": quote(path).encode(), "root_path": "", "query_string": b""}
    scope |= {"client": address, "headers": raw, "state": {}}
    messages, answer, status = iter([{"type": "http.request", "body": asked.body}]), bytearray(), 0

    async def receive() -> Any:
        for message in messages:
            return message
        await asyncio.get_running_loop().create_future()  # never hangs up

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        answer.extend(message.get("body", b""))

    await api.app(scope, receive, send)
    return status, bytes(answer)


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests, headers)
async def test_every_job_that_is_published_can_be_read(
    api: ApiUnderTest, asked: Asked, more: Headers
) -> None:
    broker = api.broker
    assert isinstance(broker, Listening)
    status, answer = await answer_to(api, asked, more)
    sent, broker.jobs = broker.jobs, []
    for data, attributes in sent:
        assert decode_job(data, attributes).body.items
        assert len(data) < MAX_DATA_BYTES
        assert max(len(name.encode()) for name in attributes) <= MAX_NAME_BYTES
        assert max(len(value.encode()) for value in attributes.values()) <= MAX_VALUE_BYTES
    assert 200 <= status < 500 or status in LATE, answer[:500]
