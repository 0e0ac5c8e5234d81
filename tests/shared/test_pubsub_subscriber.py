"""Messages arrive over streams that may end, with leases kept or lost, and acks sent in batches."""

import asyncio
import itertools
from collections import deque
from contextlib import AsyncExitStack

import grpc
import pytest

from pubsub_emulator import serve
from shared.broker.pubsub import client as pubsub
from shared.broker.pubsub import subscriber as pubsub_subscribe
from shared.broker.pubsub.admin import PubSubAdmin
from shared.broker.pubsub.client import PubSubTransport
from shared.broker.transport import Subscription, SubscriptionSettings
from shared.errors import ConfigurationError, Unavailable
from tests.limits import WAIT_LIMIT_S
from tests.shared.receiving import take
from tests.shared.scripted_pubsub import Opened

pytestmark = pytest.mark.anyio

SHORT_LEASE_S, LEASE_S = 1, 3
"""Shorter than the service allows, so that a test sees leases expire or be extended beyond one
lease.
"""


async def test_first_request_says_what_we_can_hold(opened: Opened) -> None:
    script, transport = opened
    async with transport.subscribe("s", max_messages=7, max_bytes=1000, ack_deadline_s=30):
        [request] = await script.seen("StreamingPull", 1)
    assert request.subscription == "projects/p/subscriptions/s"
    assert (request.max_outstanding_messages, request.max_outstanding_bytes) == (7, 1000)
    assert request.stream_ack_deadline_seconds == 30
    assert request.client_id


async def test_stream_is_opened_again_after_each_end(opened: Opened) -> None:
    script, transport = opened
    async with transport.subscribe("s", max_messages=10) as subscription:
        for code in ("OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN"):
            script.deliveries.put_nowait([code.encode()])
            [message] = await take(subscription, 1)
            assert message.data == code.encode()
            script.deliveries.put_nowait(
                grpc.StatusCode[code] if code != "OK" else grpc.StatusCode.UNAVAILABLE
            )
    requests = script.requests["StreamingPull"]
    assert len({request.client_id for request in requests}) == 1, "the broker knows us again"


async def test_subscription_not_known_yet_is_tried_again(opened: Opened) -> None:
    script, transport = opened
    for what in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.NOT_FOUND, [b"1"]):
        script.deliveries.put_nowait(what)
    async with transport.subscribe("s", max_messages=10) as subscription:
        assert [message.data for message in await take(subscription, 1)] == [b"1"]


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("NOT_FOUND", Unavailable),
        ("FAILED_PRECONDITION", Unavailable),
        ("PERMISSION_DENIED", ConfigurationError),
        ("UNAUTHENTICATED", ConfigurationError),
        ("INVALID_ARGUMENT", ConfigurationError),
    ],
)
async def test_refusal_that_lasts_ends_the_iteration(
    opened: Opened, code: str, error: type[Exception]
) -> None:
    script, transport = opened
    # More than needed, because under load, gRPC sometimes ends a rejected stream with the code
    # INTERNAL.
    for _ in range(4 * pubsub_subscribe.FATAL_TRIES):
        script.deliveries.put_nowait(grpc.StatusCode[code])
    async with transport.subscribe("s", max_messages=10) as subscription:
        with pytest.raises(error, match=code):
            await take(subscription, 1)


async def test_lease_is_kept_until_the_ack(opened: Opened) -> None:
    script, transport = opened
    async with transport.subscribe("s", max_messages=10, ack_deadline_s=LEASE_S) as subscription:
        script.deliveries.put_nowait([b"slow", b"fast"])
        slow, fast = await take(subscription, 2)
        subscription.ack(fast)
        extensions = await script.seen("ModifyAckDeadline", 3)
        subscription.ack(slow)
        await script.seen("Acknowledge", 2)
    assert [list(request.ack_ids) for request in extensions[:3]] == [[slow.ack_id]] * 3
    assert not slow.lost
    assert subscription.lost == 0


async def test_lease_is_kept_after_a_time_with_none(opened: Opened) -> None:
    script, transport = opened
    async with transport.subscribe("s", max_messages=9, ack_deadline_s=LEASE_S) as subscription:
        for asked in (1, 2):
            script.deliveries.put_nowait([b"work"])
            [message] = await take(subscription, 1)
            await script.seen("ModifyAckDeadline", asked)
            subscription.ack(message)
            await script.seen("Acknowledge", asked)
    assert subscription.lost == 0


async def test_messages_of_the_dead_come_before_the_shortest_ack_deadline(opened: Opened) -> None:
    script, transport = opened
    async with transport.subscribe("s", max_messages=10, ack_deadline_s=10) as subscription:
        script.deliveries.put_nowait([b"in hand"])
        [message] = await take(subscription, 1)
        [extension] = await script.seen("ModifyAckDeadline", 1)
    assert list(extension.ack_ids) == [message.ack_id]
    assert extension.ack_deadline_seconds == 7


async def test_lease_that_cannot_be_kept_is_told(opened: Opened) -> None:
    script, transport = opened
    async with transport.subscribe(
        "s", max_messages=10, ack_deadline_s=SHORT_LEASE_S
    ) as subscription:
        script.failures["ModifyAckDeadline"] = deque([grpc.StatusCode.UNAVAILABLE] * 1000)
        script.deliveries.put_nowait([b"in hand", b"not taken yet"])
        [message] = await take(subscription, 1)
        async with asyncio.timeout(WAIT_LIMIT_S):
            await _lost(subscription, 2)
        assert message.lost
        script.failures.clear()
        script.deliveries.put_nowait([b"after"])
        assert [message.data for message in await take(subscription, 1)] == [b"after"], (
            "the lost one is passed over"
        )


async def _lost(subscription: Subscription, count: int) -> None:
    while True:
        if subscription.lost == count:
            return
        await asyncio.sleep(0.02)


async def test_acks_go_together_while_one_is_in_flight(opened: Opened) -> None:
    script, transport = opened
    async with transport.subscribe("s", max_messages=3000) as subscription:
        script.gate.clear()
        script.deliveries.put_nowait([b"%d" % number for number in range(2501)])
        first, *rest = await take(subscription, 2501)
        subscription.ack(first)
        await script.seen("Acknowledge", 1)
        for message in rest:
            subscription.ack(message)
        script.gate.set()
        requests = await script.seen("Acknowledge", 4)
    assert [len(request.ack_ids) for request in requests] == [1, 1000, 1000, 500]


async def test_acks_linger_for_company_where_asked(opened: Opened) -> None:
    script, transport = opened
    async with transport.subscribe("s", max_messages=100, ack_linger_s=0.2) as subscription:
        for number in range(5):
            script.deliveries.put_nowait([b"%d" % number])
            subscription.ack((await take(subscription, 1))[0])
        [request] = await script.seen("Acknowledge", 1)
        assert len(request.ack_ids) == 5
        script.deliveries.put_nowait([b"last"])
        subscription.ack((await take(subscription, 1))[0])
    assert len(script.requests["Acknowledge"]) == 2, "what lingers is sent at close"


async def test_ack_is_tried_again_and_given_up_in_the_end(opened: Opened) -> None:
    script, transport = opened
    script.failures["Acknowledge"] = deque(
        [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INVALID_ARGUMENT]
    )
    async with transport.subscribe("s", max_messages=10) as subscription:
        script.deliveries.put_nowait([b"1"])
        subscription.ack((await take(subscription, 1))[0])
        await script.seen("Acknowledge", 2)
        script.deliveries.put_nowait([b"2"])
        subscription.ack((await take(subscription, 1))[0])
        requests = await script.seen("Acknowledge", 3)
    assert len({tuple(request.ack_ids) for request in requests}) == 2


async def test_close_hands_back_within_its_limit(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, transport = opened
    monkeypatch.setattr(pubsub, "CLOSE_S", 0.1)
    monkeypatch.setattr(pubsub_subscribe, "HALF_CLOSE_S", 0.1)
    script.ignores_half_close = True
    async with asyncio.timeout(WAIT_LIMIT_S):
        async with transport.subscribe("s", max_messages=10) as subscription:
            script.deliveries.put_nowait([b"taken", b"not taken"])
            await take(subscription, 1)
            script.gate.clear()
        [request] = await script.seen("ModifyAckDeadline", 1)
    assert (len(request.ack_ids), request.ack_deadline_seconds) == (2, 0)
    script.gate.set()


async def test_idle_stream_has_a_heartbeat(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    script, transport = opened
    monkeypatch.setattr(pubsub_subscribe, "HEARTBEAT_S", 0.05)
    async with transport.subscribe("s", max_messages=10):
        requests = await script.seen("StreamingPull", 3)
    assert [request.ByteSize() for request in requests[1:3]] == [0, 0]


async def test_more_streams_than_fit_on_a_connection_take_another(opened: Opened) -> None:
    script, transport = opened
    async with AsyncExitStack() as stack:
        async with asyncio.TaskGroup() as group:
            for number in range(pubsub_subscribe.STREAMS_PER_CHANNEL + 1):
                group.create_task(
                    stack.enter_async_context(transport.subscribe(f"s{number}", max_messages=1))
                )
        await script.seen("StreamingPull", pubsub_subscribe.STREAMS_PER_CHANNEL + 1)
        assert len(script.peers) == 2


async def test_broker_that_restarts_is_found_again() -> None:
    received: list[bytes] = []
    async with AsyncExitStack() as stack:
        async with serve() as server:
            port = server.port
            transport = await stack.enter_async_context(PubSubTransport("p", server.endpoint))
            await _make(server.endpoint)
            subscription = await stack.enter_async_context(
                transport.subscribe("jobs.s", max_messages=10)
            )
            await transport.publish("jobs", b"before", {})
            received += [message.data for message in await take(subscription, 1)]
        publishing = asyncio.create_task(transport.publish("jobs", b"meanwhile", {}, timeout_s=0.2))
        with pytest.raises(Unavailable):
            await publishing
        async with serve(port=port) as server:
            await _make(server.endpoint)
            await transport.publish("jobs", b"after", {})
            received += [message.data for message in await take(subscription, 1)]
            assert subscription.is_connected
            await stack.aclose()
    assert received == [b"before", b"after"]


async def _make(endpoint: str) -> None:
    async with PubSubAdmin("p", endpoint) as admin:
        await admin.ensure_topic("jobs")
        await admin.ensure_subscription("jobs.s", SubscriptionSettings("jobs"))


async def test_hundreds_of_messages_through_small_windows(pubsub_endpoint: str) -> None:
    async with AsyncExitStack() as stack:
        transport = await stack.enter_async_context(PubSubTransport("windows", pubsub_endpoint))
        admin = await stack.enter_async_context(PubSubAdmin("windows", pubsub_endpoint))
        await admin.ensure_topic("jobs")
        await admin.ensure_subscription("jobs.s", SubscriptionSettings("jobs"))
        subscription = await stack.enter_async_context(
            transport.subscribe("jobs.s", max_messages=3)
        )
        sending = [
            asyncio.create_task(transport.publish("jobs", b"%d" % number, {}))
            for number in range(500)
        ]
        seen = []
        for _ in itertools.repeat(None, 500):
            [message] = await take(subscription, 1)
            seen.append(int(message.data))
            subscription.ack(message)
        await asyncio.gather(*sending)
    assert sorted(seen) == list(range(500))
