"""The number of messages waiting in RabbitMQ's queues is a metric, which is absent while the number
is unknown.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
from prometheus_client import REGISTRY

from infra.local.process import free_port
from infra.local.provision_servers import provision
from infra.local.stack_processes import RabbitServer
from shared.broker.rabbitmq.admin import RabbitAdmin
from shared.broker.rabbitmq.client import RabbitTransport
from shared.broker.transport import jobs_topic_id, workers_subscription_id
from shared.models.catalog_file import read_catalog
from tests.limits import WAIT_LIMIT_S
from workers.functions.consumer import MESSAGES, QueueDepths

CATALOG = read_catalog(Path("models.yaml"))
MODEL = CATALOG.deployed[0].name


def depth() -> float | None:
    labels = {"subscription": workers_subscription_id(MODEL)}
    return REGISTRY.get_sample_value("penstock_queue_messages", labels)


async def settled(depths: QueueDepths, wanted: int) -> float | None:
    """Returns the depth once it is `wanted`, or the latest depth when time runs out."""
    with suppress(TimeoutError):
        async with asyncio.timeout(WAIT_LIMIT_S):
            while depth() != wanted:
                await depths.look()
    return depth()


@pytest.mark.slow
@pytest.mark.anyio
async def test_depth_is_what_nobody_has_in_hand(rabbitmq_server: RabbitServer) -> None:
    project = f"depths-{uuid4().hex[:8]}"
    async with (
        RabbitTransport(project, rabbitmq_server.url) as transport,
        RabbitAdmin(project, rabbitmq_server.url) as admin,
    ):
        await provision(admin, CATALOG, 0, 1)
        depths = QueueDepths(admin, CATALOG)
        for _ in range(3):
            await transport.publish(jobs_topic_id(MODEL), b"job", {"lane": "interactive"})
        assert await settled(depths, 3) == 3
        async with transport.subscribe(workers_subscription_id(MODEL), max_messages=2) as taken:
            one = await asyncio.wait_for(anext(aiter(taken)), WAIT_LIMIT_S)
            assert await settled(depths, 1) == 1
            taken.ack(one)
        assert await settled(depths, 2) == 2


@pytest.mark.slow
@pytest.mark.anyio
async def test_no_depth_is_shown_of_a_queue_that_is_gone(rabbitmq_server: RabbitServer) -> None:
    MESSAGES.labels(workers_subscription_id(MODEL)).set(7)
    async with RabbitAdmin(f"depths-{uuid4().hex[:8]}", rabbitmq_server.url) as admin:
        await QueueDepths(admin, CATALOG).look()
    assert depth() is None


@pytest.mark.anyio
async def test_no_depth_is_shown_while_the_broker_is_away() -> None:
    MESSAGES.labels(workers_subscription_id(MODEL)).set(7)
    nowhere = f"rabbitmq://guest:guest@127.0.0.1:{free_port()}/"
    async with RabbitAdmin("depths", nowhere, timeout_s=0.3) as admin:
        await QueueDepths(admin, CATALOG).look()
    assert depth() is None
