"""RabbitMQ when responses are lost: each wait has a time limit, after which the operation is
repeated.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from uuid import uuid4

import aiormq
import pytest
from pamqp.common import FieldValue

from infra.local.stack_processes import RabbitServer
from shared.broker.rabbitmq import connection
from shared.broker.rabbitmq.admin import RabbitAdmin
from shared.broker.rabbitmq.client import RabbitTransport
from shared.broker.rabbitmq.topology import exchange_name, queue_name
from shared.broker.transport import SubscriptionSettings
from shared.errors import Overloaded, Unavailable
from tests.amqp_link import (
    CONFIRMATION,
    CONSUME_OK,
    EXCHANGE_DECLARE_OK,
    QOS_OK,
    QUEUE_DECLARE_OK,
    AmqpLink,
    Method,
)
from tests.limits import WAIT_LIMIT_S
from tests.shared.receiving import take

pytestmark = [pytest.mark.slow(about_s=15), pytest.mark.anyio]

SOON_S = 0.2
"""Time before the first retry. It doubles, so a slow machine just means more retries."""
MANY = 1000
"""Enough that the connection breaks before they have all been written."""
LARGE_BYTES = 9_000_000
"""Three of these do not fit into a socket's buffers."""


@dataclass
class Linked:
    """A broker behind a link, with the "jobs" queue."""

    project: str
    link: AmqpLink
    admin: RabbitAdmin

    def transport(self, answer_limit_s: float = SOON_S) -> RabbitTransport:
        return RabbitTransport(self.project, self.link.url, answer_limit_s=answer_limit_s)


@pytest.fixture
async def linked(rabbitmq_server: RabbitServer) -> AsyncIterator[Linked]:
    project = f"waits-{uuid4().hex[:8]}"
    async with (
        AmqpLink(rabbitmq_server.port) as link,
        RabbitAdmin(project, rabbitmq_server.url) as admin,
    ):
        await admin.ensure_topic("jobs")
        delays = {"retry_min_s": SOON_S, "retry_max_s": SOON_S, "push_endpoint": "http://function"}
        await admin.ensure_subscription("jobs", SubscriptionSettings("jobs", **delays))  # type: ignore[arg-type]
        yield Linked(project, link, admin)


async def test_message_whose_confirmation_is_lost_is_sent_again_with_its_id(
    linked: Linked,
) -> None:
    linked.link.lose(CONFIRMATION)
    async with linked.transport() as transport:
        message_id = await transport.publish("jobs", b"1", {}, timeout_s=WAIT_LIMIT_S)
        assert linked.link.lost_all
        async with transport.subscribe("jobs", max_messages=10) as subscription:
            both = await take(subscription, 2)
    assert {message.message_id for message in both} == {message_id}


async def test_caller_in_a_hurry_has_a_second_chance_too(linked: Linked) -> None:
    linked.link.lose(CONFIRMATION)
    async with linked.transport(answer_limit_s=WAIT_LIMIT_S) as transport:
        assert await transport.publish("jobs", b"1", {}, timeout_s=6.0)
    assert linked.link.lost_all


async def test_others_are_confirmed_while_one_waits(linked: Linked) -> None:
    linked.link.lose(CONFIRMATION)
    async with linked.transport(answer_limit_s=WAIT_LIMIT_S) as transport:
        stuck = asyncio.create_task(transport.publish("jobs", b"stuck", {}, timeout_s=WAIT_LIMIT_S))
        async with transport.subscribe("jobs", max_messages=10) as subscription:
            await take(subscription, 1)
            await transport.publish("jobs", b"2", {})
        assert not stuck.done()
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)


async def test_publishing_goes_on_when_the_exchange_was_not_confirmed(linked: Linked) -> None:
    linked.link.lose(EXCHANGE_DECLARE_OK)
    async with linked.transport() as transport:
        assert await transport.publish("jobs", b"1", {}, timeout_s=WAIT_LIMIT_S)
    assert linked.link.lost_all


async def test_publishes_that_wait_for_room_are_sent_after_the_connection_broke(
    linked: Linked,
) -> None:
    """Nothing drains the queue to the socket anymore, but the channel is not closed yet."""
    async with linked.transport(answer_limit_s=WAIT_LIMIT_S) as transport:
        await transport.publish("jobs", b"first", {})
        linked.link.hang_up_unread()
        publishes = [
            asyncio.create_task(transport.publish("jobs", data, {}, timeout_s=WAIT_LIMIT_S))
            for data in [bytes(LARGE_BYTES)] * 3 + [b"1"] * MANY
        ]
        with pytest.raises(Unavailable):
            await transport.publish("jobs", b"in a hurry", {}, timeout_s=0.5)
        linked.link.cut()
        async with asyncio.timeout(WAIT_LIMIT_S / 2):
            await asyncio.gather(*publishes)


@pytest.mark.slow
async def test_publish_outlives_a_connection_that_falls_silent(
    linked: Linked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEARTBEAT_S", 1)
    async with linked.transport() as transport:
        await transport.publish("jobs", b"first", {})
        linked.link.fall_silent()
        assert await transport.publish("jobs", b"second", {}, timeout_s=WAIT_LIMIT_S)


async def test_message_that_its_queue_refuses_is_sent_once_there_is_room(
    linked: Linked, rabbitmq_server: RabbitServer
) -> None:
    full, exchange = queue_name(linked.project, "full"), exchange_name(linked.project)
    limits: dict[str, FieldValue] = {"x-max-length": 1, "x-overflow": "reject-publish"}
    raw = await aiormq.connect(rabbitmq_server.url.replace("rabbitmq:", "amqp:"))
    channel = await raw.channel()
    await channel.queue_declare(full, durable=True, arguments=limits)
    await channel.queue_bind(full, exchange, "full")
    await raw.close()
    async with linked.transport() as transport:
        await transport.publish("full", b"1", {})
        second = asyncio.create_task(transport.publish("full", b"2", {}, timeout_s=WAIT_LIMIT_S))
        with pytest.raises(Overloaded, match="the queue is full"):
            await transport.publish("full", b"in a hurry", {}, timeout_s=2.0)
        async with transport.subscribe("full", max_messages=1) as subscription:
            for wanted in (b"1", b"2"):
                [message] = await take(subscription, 1)
                assert message.data == wanted
                subscription.ack(message)
        await second


@pytest.mark.parametrize("answer", [QOS_OK, CONSUME_OK])
async def test_consumer_asks_again_when_the_answer_is_lost(linked: Linked, answer: Method) -> None:
    linked.link.lose(answer)
    async with (
        linked.transport() as transport,
        transport.subscribe("jobs", max_messages=1) as subscription,
    ):
        assert subscription.is_connected
        assert linked.link.lost_all
        await transport.publish("jobs", b"1", {})
        [message] = await take(subscription, 1)
        subscription.ack(message)


async def test_acks_go_on_after_the_connection_broke_while_they_waited_for_room(
    linked: Linked,
) -> None:
    async with linked.transport(answer_limit_s=WAIT_LIMIT_S) as transport:
        await asyncio.gather(*(transport.publish("jobs", b"1", {}) for _ in range(MANY)))
        async with transport.subscribe("jobs", max_messages=MANY) as subscription:
            held = await take(subscription, MANY)
            linked.link.cut()
            for message in held:
                subscription.ack(message)
            for message in await take(subscription, MANY):
                subscription.ack(message)
            # Only as many arrive as have been acked.
            await transport.publish("jobs", b"last", {})
            [message] = await take(subscription, 1)
    assert message.data == b"last"


async def test_message_whose_return_was_not_confirmed_does_not_stop_those_behind_it(
    linked: Linked,
) -> None:
    async with (
        linked.transport() as transport,
        transport.subscribe("jobs", max_messages=1, delays_s=(SOON_S,)) as subscription,
    ):
        await transport.publish("jobs", b"poor", {})
        await transport.publish("jobs", b"next", {})
        [poor] = await take(subscription, 1)
        linked.link.lose(CONFIRMATION)
        subscription.nack(poor)
        seen: list[bytes] = []
        while not {b"next", b"poor"} <= set(seen):
            [message] = await take(subscription, 1)
            subscription.ack(message)
            seen.append(message.data)
    assert linked.link.lost_all


@pytest.mark.parametrize("answer", [EXCHANGE_DECLARE_OK, QUEUE_DECLARE_OK])
async def test_admin_asks_again_when_the_answer_is_lost(linked: Linked, answer: Method) -> None:
    async with RabbitAdmin(linked.project, linked.link.url, timeout_s=6.0) as admin:
        linked.link.lose(answer)
        await admin.ensure_topic("more")
        await admin.ensure_subscription("more", SubscriptionSettings("more"))
        assert linked.link.lost_all
        assert await admin.subscription_exists("more")
