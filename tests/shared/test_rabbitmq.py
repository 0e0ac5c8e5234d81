"""RabbitMQ features: connections that close, immediate redelivery, delays, routing."""

import asyncio
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.local.process import Process, free_port
from infra.local.stack_processes import RabbitServer, find_rabbitmq_server
from pubsub_emulator import parse_filter
from shared.broker import transport
from shared.broker.rabbitmq.admin import RabbitAdmin
from shared.broker.rabbitmq.broker_url import broker_url
from shared.broker.rabbitmq.client import RabbitTransport
from shared.broker.rabbitmq.subscriber import AckRuns
from shared.broker.rabbitmq.topology import binding_key, delays_between, message_keys
from shared.broker.transport import (
    BATCH_FILTER,
    INTERACTIVE_FILTER,
    SubscriptionSettings,
    slot_filter,
)
from shared.errors import BadInput, ConfigurationError, Unavailable
from tests.limits import WAIT_LIMIT_S
from tests.rabbitmq import needs_rabbitmq
from tests.shared.receiving import take

pytestmark = pytest.mark.slow(about_s=10)

JOBS = 100
MANY = 256
"""Enough acks that the broker does not forward them all at once."""
ROUNDS = 4

Pair = tuple[RabbitTransport, RabbitAdmin]


@pytest.fixture
async def rabbit(rabbitmq_server: RabbitServer) -> AsyncIterator[Pair]:
    project = f"rabbit-{uuid4().hex[:8]}"
    async with (
        RabbitTransport(project, rabbitmq_server.url) as transport,
        RabbitAdmin(project, rabbitmq_server.url) as admin,
    ):
        yield transport, admin


async def make(admin: RabbitAdmin, name: str = "jobs", **settings: object) -> None:
    await admin.ensure_topic(name)
    await admin.ensure_subscription(name, SubscriptionSettings(name, **settings))  # type: ignore[arg-type]


@pytest.fixture
async def own_server(tmp_path: Path) -> AsyncIterator[RabbitServer]:
    """A server that tests may kill, with the "jobs" queue in the "kills" project.

    It has been restarted once, because RabbitMQ 3.10 never elects a leader for a queue that is
    killed in its first few seconds.
    """
    needs_rabbitmq()
    with RabbitServer(tmp_path / "data", tmp_path) as server:
        async with RabbitAdmin("kills", server.url) as admin:
            await make(admin)
        await asyncio.to_thread(server.stop)
        await asyncio.to_thread(server.start)
        yield server


@pytest.mark.anyio
async def test_node_killed_while_messages_pass_loses_none(own_server: RabbitServer) -> None:
    """Confirmed messages arrive, and unconfirmed ones are published once the node is back."""
    server, wanted = own_server, {b"%d" % number for number in range(JOBS)}
    async with RabbitTransport("kills", server.url) as transport:
        confirmed = sorted(wanted)[: JOBS // 2]
        await asyncio.gather(*(transport.publish("jobs", data, {}) for data in confirmed))
        async with transport.subscribe("jobs", max_messages=10) as subscription:
            got = {message.data for message in await take(subscription, 10)}
            await asyncio.to_thread(server.kill)
            late = [
                asyncio.create_task(transport.publish("jobs", data, {}, timeout_s=WAIT_LIMIT_S))
                for data in wanted - set(confirmed)
            ]
            with pytest.raises(Unavailable):
                await transport.publish("jobs", b"in a hurry", {}, timeout_s=0.3)
            await asyncio.to_thread(server.start)
            await asyncio.gather(*late)
            assert len(got) == 10
            async with asyncio.timeout(WAIT_LIMIT_S):
                async for message in subscription:
                    subscription.ack(message)
                    got.add(message.data)
                    if wanted <= got:
                        break
            assert subscription.lost == 10


HOLDER = """
    import asyncio, sys
    from shared.broker.rabbitmq.client import RabbitTransport

    async def hold() -> None:
        async with RabbitTransport(sys.argv[1], sys.argv[2]) as transport:
            async with transport.subscribe("jobs", max_messages=16) as subscription:
                held = []
                async for message in subscription:
                    held.append(message)
                    if len(held) == 16:
                        print("holds 16", flush=True)

    asyncio.run(hold())
"""


@pytest.mark.anyio
async def test_messages_of_a_killed_process_come_again_at_once(
    rabbit: Pair, rabbitmq_server: RabbitServer, tmp_path: Path
) -> None:
    transport, admin = rabbit
    await make(admin)
    await asyncio.gather(*(transport.publish("jobs", b"%d" % n, {}) for n in range(16)))
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(HOLDER),
        transport.project,
        rabbitmq_server.url,
    ]
    with Process("holder", command, tmp_path) as holder:
        await asyncio.to_thread(
            holder.wait_ready, lambda: b"holds 16" in holder.log_path.read_bytes(), WAIT_LIMIT_S
        )
        await asyncio.to_thread(holder.kill)
        async with transport.subscribe("jobs", max_messages=16) as subscription:
            again = await take(subscription, 16)
    assert {message.data for message in again} == {b"%d" % number for number in range(16)}
    assert {message.delivery_attempt for message in again} == {2}


@pytest.mark.anyio
async def test_acks_just_before_the_close_are_not_forgotten(rabbit: Pair) -> None:
    """When a channel closes, the broker drops any of its acks that haven't been forwarded yet."""
    transport, admin = rabbit
    for number in range(ROUNDS):
        name = f"jobs-{number}"
        await make(admin, name)
        await asyncio.gather(*(transport.publish(name, b"1", {}) for _ in range(MANY)))
        async with transport.subscribe(name, max_messages=MANY) as subscription:
            held = await take(subscription, MANY)
            await subscription.stop()
            for message in held:
                subscription.ack(message)
        async with transport.subscribe(name, max_messages=MANY) as subscription:
            await transport.publish(name, b"last", {})
            [message] = await take(subscription, 1)
        assert message.data == b"last"


@pytest.mark.anyio
async def test_only_what_was_handed_back_comes_again(rabbit: Pair) -> None:
    transport, admin = rabbit
    await make(admin)
    await asyncio.gather(*(transport.publish("jobs", b"%d" % n, {}) for n in range(16)))
    async with transport.subscribe("jobs", max_messages=16) as subscription:
        held = await take(subscription, 16)
        back = {held[number].data for number in (0, 5, 6, 15)}
        for message in reversed(held):
            if message.data not in back:
                subscription.ack(message)
    async with transport.subscribe("jobs", max_messages=16) as subscription:
        again = await take(subscription, len(back))
        await transport.publish("jobs", b"last", {})
        [last] = await take(subscription, 1)
    assert {message.data for message in again} == back
    assert last.data == b"last"


@given(st.lists(st.lists(st.tuples(st.integers(1, 30), st.booleans())), max_size=8))
def test_joined_acks_are_for_no_delivery_that_was_not_settled(
    turns: list[list[tuple[int, bool]]],
) -> None:
    runs, acked, nacked = AckRuns(), set[int](), set[int]()
    for turn in turns:
        fresh = {tag: is_done for tag, is_done in turn if tag not in acked | nacked}
        wanted = acked | {tag for tag, is_done in fresh.items() if is_done}
        for tag, multiple in runs.join(tag for tag, is_done in fresh.items() if is_done):
            acked |= (set(range(1, tag + 1)) - nacked) if multiple else {tag}
        assert acked == wanted
        for tag in (tag for tag, is_done in fresh.items() if not is_done):
            runs.settle(tag)
            nacked.add(tag)


@pytest.mark.anyio
async def test_removed_queue_ends_the_iteration(rabbit: Pair) -> None:
    transport, admin = rabbit
    await make(admin)
    async with transport.subscribe("jobs", max_messages=1) as subscription:
        assert subscription.is_connected
        await admin.delete_subscription("jobs")
        with pytest.raises(Unavailable):
            await take(subscription, 1)


@pytest.mark.anyio
async def test_message_handed_back_waits_on_the_broker(rabbit: Pair) -> None:
    """The message doesn't hold up later ones, and keeps its id, its age, and its attempt count."""
    transport, admin = rabbit
    first_s, longest_s = 0.2, 0.4
    await make(admin, retry_min_s=first_s, retry_max_s=longest_s, push_endpoint="http://function")
    delays_s = delays_between(first_s, longest_s)
    async with transport.subscribe("jobs", max_messages=1, delays_s=delays_s) as subscription:
        await transport.publish("jobs", b"poor", {"to": "a receiver"})
        [tried] = await take(subscription, 1)
        subscription.nack(tried)
        await transport.publish("jobs", b"next", {})
        [following] = await take(subscription, 1)
        subscription.ack(following)
        seen = [tried]
        for _ in range(3):
            [again] = await take(subscription, 1)
            seen.append(again)
            subscription.nack(again)
    assert following.data == b"next"
    assert [one.delivery_attempt for one in seen] == [1, 2, 3, 4]
    assert {(one.message_id, one.publish_time_s, one.data) for one in seen} == {
        (tried.message_id, tried.publish_time_s, b"poor")
    }
    assert [dict(one.attributes) for one in seen] == [{"to": "a receiver"}] * 4


@pytest.mark.anyio
async def test_message_that_waits_too_long_is_a_dead_letter_that_says_so(rabbit: Pair) -> None:
    transport, admin = rabbit
    await make(admin, "dead")
    await make(admin, dead_letter_topic_id="dead", retention_s=1)
    await transport.publish("jobs", b"late", {"slot": "1"})
    async with transport.subscribe("dead", max_messages=1) as letters:
        [letter] = await take(letters, 1)
    assert letter.data == b"late"
    assert dict(letter.attributes) == {
        "slot": "1",
        "penstock_reason": "no worker picked it up in time",
    }


@pytest.mark.anyio
async def test_topic_without_subscriptions_takes_messages(rabbit: Pair) -> None:
    transport, admin = rabbit
    await admin.ensure_topic("heard by nobody")
    assert await transport.publish("heard by nobody", b"1", {})


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["x-death", "BCC", "CC", ""])
async def test_attribute_that_the_broker_would_read_is_refused(rabbit: Pair, name: str) -> None:
    transport, admin = rabbit
    await make(admin)
    with pytest.raises(BadInput, match="not a valid attribute name"):
        await transport.publish("jobs", b"1", {name: "elsewhere"})


@pytest.mark.anyio
async def test_as_many_and_as_long_attributes_as_allowed_arrive_whole(rabbit: Pair) -> None:
    transport, admin = rabbit
    await make(admin)
    attributes = {f"{number:03}".ljust(128, "n"): "v" * 1024 for number in range(100)}
    async with transport.subscribe("jobs", max_messages=1) as subscription:
        await transport.publish("jobs", b"1", attributes)
        [message] = await take(subscription, 1)
        with pytest.raises(BadInput, match="not a valid attribute name"):
            await transport.publish("jobs", b"1", {"n" * 129: ""})
    assert message.attributes == attributes


@pytest.mark.anyio
async def test_topic_that_no_routing_key_can_name_is_refused(rabbit: Pair) -> None:
    transport, _ = rabbit
    with pytest.raises(BadInput, match="must be at most 255 bytes"):
        await transport.publish("t" * 256, b"1", {})


@pytest.mark.anyio
async def test_names_and_filters_that_amqp_can_not_carry_are_refused(rabbit: Pair) -> None:
    _, admin = rabbit
    await make(admin)
    long_filter = slot_filter(10**255, 2)
    for refused in (
        admin.ensure_topic("t" * 256),
        admin.delete_subscription("s" * 256),
        admin.ensure_subscription("s" * 256, SubscriptionSettings("jobs")),
        admin.ensure_subscription("slot", SubscriptionSettings("jobs", filter=long_filter)),
    ):
        with pytest.raises(BadInput, match=r"long|exceeded"):
            await refused


def test_server_of_another_version_can_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_rabbitmq()
    script = tmp_path / "rabbitmq-server"
    monkeypatch.setenv("PENSTOCK_RABBITMQ_SERVER", str(script))
    with pytest.raises(ConfigurationError, match="PENSTOCK_RABBITMQ_SERVER"):
        find_rabbitmq_server()
    script.touch(0o755)
    assert find_rabbitmq_server() == script


def test_server_listens_on_this_machine_only(rabbitmq_server: RabbitServer) -> None:
    """Neither clients nor nodes on other machines may reach it, because its password is public."""
    listening = {
        one.laddr.ip
        for one in psutil.Process(rabbitmq_server.pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
    assert listening == {"127.0.0.1"}


@pytest.mark.anyio
async def test_wrong_password_says_so(rabbitmq_server: RabbitServer) -> None:
    url = rabbitmq_server.url.replace("guest:guest", "guest:wrong")
    async with RabbitAdmin("refused", url) as admin:
        with pytest.raises(ConfigurationError) as caught:
            await admin.ensure_topic("jobs")
    assert "wrong" not in str(caught.value)
    async with (
        RabbitTransport("refused", url) as transport,
        transport.subscribe("jobs", max_messages=1) as subscription,
    ):
        with pytest.raises(ConfigurationError):
            await take(subscription, 1)


@pytest.mark.anyio
async def test_broker_that_hangs_up_is_unavailable() -> None:
    """A proxy hangs up like this if its broker is down."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", free_port())
    async with server:
        url = f"rabbitmq://guest:guest@127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with RabbitAdmin("away", url, timeout_s=0.5) as admin:
            with pytest.raises(Unavailable):
                await admin.ensure_topic("jobs")
        async with RabbitTransport("away", url) as transport:
            with pytest.raises(Unavailable):
                await transport.publish("jobs", b"1", {}, timeout_s=0.5)


FILTERS = ["", INTERACTIVE_FILTER, BATCH_FILTER, *(slot_filter(slot, 8) for slot in range(8))]


@given(
    st.dictionaries(
        st.sampled_from(["slot", "lane", "model"]),
        st.sampled_from(["batch", "interactive", *map(str, range(8))]),
    ),
    st.sampled_from(FILTERS),
)
def test_routing_keys_agree_with_filters(attributes: dict[str, str], text: str) -> None:
    matching = parse_filter(text)
    passes = matching is None or matching.matches(attributes)
    wanted = transport.parse_filter(text)
    assert (wanted is None or wanted.matches(attributes)) == passes
    assert (binding_key("topic", text) in message_keys("topic", attributes)) == passes


@pytest.mark.parametrize(
    "text", ["attributes:slot", 'attributes.model = "m"', 'NOT attributes.slot = "1"']
)
def test_other_filters_are_refused(text: str) -> None:
    with pytest.raises(BadInput, match="filter"):
        binding_key("topic", text)


@pytest.mark.parametrize(
    ("broker", "url"),
    [
        ("rabbitmq://u:p@host:5673/v", "amqp://u:p@host:5673/v"),
        ("rabbitmqs://u:p@host", "amqps://u:p@host"),
        ("amqp://host/", "amqp://host/"),
    ],
)
def test_broker_setting_names_an_amqp_url(broker: str, url: str) -> None:
    assert str(broker_url(broker)) == url


@pytest.mark.parametrize(
    "broker", ["pubsub", "http://host", "rabbitmq://", "rabbitmq://host:x/", "rabbitmq://\u200b/"]
)
def test_wrong_broker_setting_is_refused_with_its_field(broker: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        broker_url(broker)
    assert caught.value.field == "broker"


def test_pauses_double_up_to_the_longest() -> None:
    assert delays_between(5, 600) == (5, 10, 20, 40, 80, 160, 320, 600)
