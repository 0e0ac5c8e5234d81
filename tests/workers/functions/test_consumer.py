"""Functions that get their messages from RabbitMQ."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from infra.local.process import Process, answers, free_port
from infra.local.provision_servers import TAKEN, provision
from infra.local.stack_processes import RabbitServer
from shared.broker.rabbitmq.admin import RabbitAdmin
from shared.broker.rabbitmq.client import RabbitTransport
from shared.broker.rabbitmq.topology import delays_between
from shared.broker.transport import (
    WEBHOOKS_SUBSCRIPTION_ID,
    WEBHOOKS_TOPIC_ID,
    ReceivedMessage,
    SubscriptionSettings,
)
from shared.errors import Unavailable, UndecodableMessage
from shared.models.catalog_file import read_catalog
from shared.settings import environment_with
from tests.limits import START_LIMIT_S, WAIT_LIMIT_S
from workers.functions.consumer import FunctionConsumer, MessageSource

pytestmark = pytest.mark.slow(about_s=3)

DELAYS_S = (0.1, 0.2)


class Receiver:
    """Fails the first `failures` deliveries, and records all of them."""

    def __init__(self, failures: int, error: Exception | None = None) -> None:
        self._failures = failures
        self._error = error or Unavailable("the receiver is away")
        self.seen: list[ReceivedMessage] = []
        self.done = asyncio.Event()

    async def __call__(self, message: ReceivedMessage) -> None:
        self.seen.append(message)
        if len(self.seen) <= self._failures:
            raise self._error
        self.done.set()


async def consume(server: RabbitServer, receiver: Receiver, *data: bytes) -> RabbitAdmin:
    """Publishes messages and hands them to `receiver` until it has processed one."""
    project = f"functions-{uuid4().hex[:8]}"
    settings = SubscriptionSettings(
        WEBHOOKS_TOPIC_ID, retry_min_s=DELAYS_S[0], retry_max_s=DELAYS_S[1], push_endpoint=TAKEN
    )
    async with (
        RabbitTransport(project, server.url) as transport,
        RabbitAdmin(project, server.url) as admin,
    ):
        await admin.ensure_topic(WEBHOOKS_TOPIC_ID)
        await admin.ensure_subscription(WEBHOOKS_SUBSCRIPTION_ID, settings)
        consumer = FunctionConsumer(transport, {"webhook": receiver})
        source = MessageSource(WEBHOOKS_SUBSCRIPTION_ID, "webhook", delays_between(*DELAYS_S))
        assert not consumer.is_connected
        async with asyncio.timeout(WAIT_LIMIT_S), consumer.running([source]):
            assert consumer.is_connected
            for one in data:
                await transport.publish(WEBHOOKS_TOPIC_ID, one, {})
            await receiver.done.wait()
        async with transport.subscribe(WEBHOOKS_SUBSCRIPTION_ID, max_messages=1) as left:
            await transport.publish(WEBHOOKS_TOPIC_ID, b"last", {})
            async with asyncio.timeout(WAIT_LIMIT_S):
                assert (await anext(aiter(left))).data == b"last", "all others were settled"
        return admin


@pytest.mark.anyio
async def test_message_that_failed_comes_again_later(rabbitmq_server: RabbitServer) -> None:
    receiver = Receiver(failures=3)
    await consume(rabbitmq_server, receiver, b"event")
    assert [message.data for message in receiver.seen] == [b"event"] * 4
    assert [message.delivery_attempt for message in receiver.seen] == [1, 2, 3, 4]
    assert len({message.publish_time_s for message in receiver.seen}) == 1, "its age counts on"


@pytest.mark.anyio
async def test_message_that_no_function_can_read_is_done_with(
    rabbitmq_server: RabbitServer,
) -> None:
    receiver = Receiver(failures=1, error=UndecodableMessage("no event"))
    await consume(rabbitmq_server, receiver, b"nonsense", b"event")
    assert [message.data for message in receiver.seen] == [b"nonsense", b"event"]


def test_process_is_ready_once_it_has_its_queues(
    rabbitmq_server: RabbitServer, redis_url: str, tmp_path: Path
) -> None:
    """The process listens only on this machine, and exits with status 0 on SIGTERM."""
    project, port = f"functions-{uuid4().hex[:8]}", free_port()
    asyncio.run(_provision(project, rabbitmq_server))
    settings = {
        "PENSTOCK_PROJECT": project,
        "PENSTOCK_BROKER": rabbitmq_server.url,
        "PENSTOCK_REDIS_URL": redis_url,
        "PENSTOCK_HEALTH_PORT": str(port),
        "PENSTOCK_MODELS_FILE": str(Path("models.yaml").resolve()),
    }
    with Process(
        "functions",
        [sys.executable, "-m", "workers.functions"],
        tmp_path,
        environment=environment_with(settings),
    ) as functions:
        functions.wait_ready(lambda: answers(port, "/readyz"), START_LIMIT_S)
        assert answers(port, "/metrics")
        listening = [
            one.laddr.ip
            for one in psutil.Process(functions.pid).net_connections("tcp")
            if one.status == psutil.CONN_LISTEN
        ]
        assert listening == ["127.0.0.1"]
        functions.ask_to_stop()
        functions.wait_done(WAIT_LIMIT_S)


async def _provision(project: str, server: RabbitServer) -> None:
    async with RabbitAdmin(project, server.url) as admin:
        await provision(admin, read_catalog(Path("models.yaml")), 0, 1, TAKEN)


def test_process_without_rabbitmq_says_why() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "workers.functions"],
        capture_output=True,
        text=True,
        timeout=WAIT_LIMIT_S,
        env={**os.environ},
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "penstock functions: functions only receive messages from RabbitMQ; Pub/Sub pushes them\n"
    )
