"""When a publish's messages are delivered: before or after the response and commit, in slices."""

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from pubsub_emulator.errors import ServerUnavailable
from pubsub_emulator.protocols import delivery_order, slices
from pubsub_emulator.protocols.methods import Answer, unary_methods
from pubsub_emulator.protos import message_class
from pubsub_emulator.server import PubsubServer, serve
from pubsub_emulator.state.consumers import Consumer
from pubsub_emulator.state.topic import STEP_SINKS
from pubsub_emulator.storage.database import Database, WriteFailed
from tests.wire import TOPIC, Wire, connect, until

SUBSCRIPTION = "projects/p/subscriptions/one"
pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Caller:
    """A client, identified by the value of its `x-goog-api-client` header. Empty: no header."""

    library: str = ""

    def time_remaining(self) -> float | None:
        return None

    def invocation_metadata(self) -> list[tuple[str, str]]:
        named = [("x-goog-api-client", self.library)] if self.library else []
        return [("user-agent", "any"), *named]


PYTHON = Caller("gl-python/3.11.7 grpc/1.85.1 gax/2.25.1 gapic/2.44.0")
NODE = Caller("gl-node/20.20.2 gax/5.0.6 grpc/1.14.0 gccl/5.3.1")


def answer_of(server: PubsubServer, name: str) -> Answer:
    return next(method.answer for method in unary_methods(server.broker) if method.name == name)


def publish_request(*data: str, **fields: Any) -> Any:
    messages = [message_class("PubsubMessage")(data=text.encode(), **fields) for text in data]
    return message_class("PublishRequest")(topic=TOPIC, messages=messages)


def unacked(server: PubsubServer, path: str = SUBSCRIPTION) -> int:
    return len(server.broker.registry.subscriptions[path].backlog.messages)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize(
    ("caller", "order"),
    [
        (PYTHON, ["answered", "woken"]),
        (NODE, ["answered", "woken"]),
        (Caller(), ["woken", "answered"]),
    ],
)
async def test_libraries_of_google_are_answered_before_anybody_is_woken(
    is_kept: bool, caller: Caller, order: list[str], tmp_path: Path
) -> None:
    async with (
        serve(data_dir=tmp_path if is_kept else None) as server,
        connect(server.endpoint) as wire,
    ):
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
        events: list[str] = []
        consumer = Consumer(lambda: events.append("woken"), 10.0)
        backlog.consumers.join(consumer)
        assert backlog.take(consumer) == []
        publish = answer_of(server, "Publish")

        async def published() -> None:
            await publish(publish_request("a"), caller)
            events.append("answered")

        await published()
        await until(lambda: "woken" in events)
        assert events == order
        assert len(backlog.take(consumer)) == 1


async def test_node_has_a_pause_to_see_the_end_of_its_publish(
    wire: Wire, server: PubsubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.subscription(SUBSCRIPTION, TOPIC)
    backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
    publish = answer_of(server, "Publish")
    monkeypatch.setattr(delivery_order, "NODE_PAUSE_S", 3600.0)
    await publish(publish_request("later"), NODE)
    monkeypatch.undo()
    # Calls run one after another on the same loop, so messages that arrive together have all
    # arrived before the last call.
    await publish(publish_request("now"), PYTHON)
    await wire.publish(TOPIC, "and now")
    deliveries = backlog.take(Consumer(lambda: None, 10.0))
    assert [received.message.proto.data for received in deliveries] == [b"now", b"and now"]
    await publish(publish_request("soon"), NODE)
    consumer = Consumer(lambda: None, 10.0)
    await until(lambda: backlog.take(consumer) != [])


@pytest.mark.parametrize(("caller", "delivered"), [(PYTHON, 0), (Caller(), 1)])
async def test_what_googles_libraries_publish_is_delivered_when_it_is_written_and_else_meanwhile(
    caller: Caller, delivered: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
        seen: list[int] = []
        write = Database.write

        def watched(database: Database, changes: Any) -> None:
            if changes.messages:
                seen.append(len(backlog.take(Consumer(lambda: None, 10.0))))
            write(database, changes)

        monkeypatch.setattr(Database, "write", watched)
        await answer_of(server, "Publish")(publish_request("a"), caller)
        assert seen == [delivered]
        await until(lambda: len(backlog.take(Consumer(lambda: None, 10.0))) == 1 - delivered)


async def test_delivery_whose_publish_was_not_written_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
        consumer = Consumer(lambda: None, 10.0)
        delivered: list[Any] = []
        write = Database.write

        def full(database: Database, changes: Any) -> None:
            delivered.extend(backlog.take(consumer))
            raise WriteFailed("database or disk is full")

        monkeypatch.setattr(Database, "write", full)
        with pytest.raises(ServerUnavailable, match="disk is full"):
            await answer_of(server, "Publish")(publish_request("a"), Caller())
        assert [received.message.proto.data for received in delivered] == [b"a"]
        assert unacked(server) == 0
        monkeypatch.setattr(Database, "write", write)
        await until(lambda: is_admitted(server))
        assert await wire.publish(TOPIC, "b") == await pulled(wire)
    async with serve(data_dir=tmp_path) as server:
        assert unacked(server) == 1


def is_admitted(server: PubsubServer) -> bool:
    try:
        server.broker.journal.admit()
    except ServerUnavailable:
        return False
    return True


async def pulled(wire: Wire) -> list[str]:
    received = (await wire.pull(SUBSCRIPTION)).received_messages
    return [delivery.message.message_id for delivery in received]


async def test_what_a_caller_published_before_it_gave_up_comes_all_the_same(
    tmp_path: Path,
) -> None:
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        publish = answer_of(server, "Publish")
        task = asyncio.ensure_future(publish(publish_request("a"), Caller()))
        await until(lambda: unacked(server) == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        (received,) = (await wire.pull(SUBSCRIPTION)).received_messages
        assert received.message.data == b"a"


async def test_seek_back_does_not_bring_what_has_no_answer_yet(tmp_path: Path) -> None:
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC, enable_message_ordering=True)
        for ordering_key in ("", "key"):
            publishing = server.broker.topics.begin_publish(
                publish_request("a", "b", ordering_key=ordering_key)
            )
            for _ in publishing.take_in():
                pass
            server.broker.call(
                "Seek", message_class("SeekRequest")(subscription=SUBSCRIPTION, time={"seconds": 1})
            )
            backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
            consumer = Consumer(lambda: None, 10.0)
            assert backlog.take(consumer) == []
            backlog.leave(consumer)
            for _ in publishing.let_out():
                pass
            received = (await wire.pull(SUBSCRIPTION)).received_messages
            assert [delivery.message.data for delivery in received] == [b"a", b"b"]
            await wire.ack(SUBSCRIPTION, received)


async def test_other_calls_are_answered_while_a_publish_reaches_many_subscriptions(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One message per slice, however fast this machine is.
    monkeypatch.setattr(slices, "SLICE_S", 0.0)
    for number in range(300):
        await wire.subscription(f"projects/p/subscriptions/sub{number}", TOPIC)
    publishing = asyncio.create_task(wire.publish(TOPIC, *map(str, range(300))))
    request = message_class("GetTopicRequest")(topic=TOPIC)
    answered = 0
    while not publishing.done():
        await wire.call("Publisher", "GetTopic", request, "Topic")
        answered += 1
    assert len(await publishing) == 300
    # If the publish had been processed all at once, at most the calls just before and after it
    # would have gotten a response.
    assert answered >= 5
    for number in (0, 299):
        pulled = await wire.pull(f"projects/p/subscriptions/sub{number}", max_messages=1000)
        assert [received.message.data for received in pulled.received_messages] == [
            b"%d" % number for number in range(len(pulled.received_messages))
        ]
        assert pulled.received_messages


async def test_subscription_that_is_deleted_during_a_publish_gets_nothing_more(
    wire: Wire, server: PubsubServer
) -> None:
    registry = server.broker.registry
    for number in range(3 * STEP_SINKS):
        await wire.subscription(f"projects/p/subscriptions/sub{number}", TOPIC)
    last = registry.subscriptions[f"projects/p/subscriptions/sub{3 * STEP_SINKS - 1}"]
    publishing = server.broker.topics.begin_publish(publish_request("a"))
    steps = publishing.take_in()
    next(steps)
    server.broker.call(
        "DeleteSubscription", message_class("DeleteSubscriptionRequest")(subscription=last.path)
    )
    assert list(steps) != []
    assert last.backlog.messages == []
    assert {unacked(server, path) for path in registry.subscriptions} == {1}


async def test_publish_that_is_closed_before_its_end_leaves_nothing(
    wire: Wire, server: PubsubServer
) -> None:
    registry = server.broker.registry
    for number in range(2 * STEP_SINKS):
        await wire.subscription(f"projects/p/subscriptions/sub{number}", TOPIC)
    steps = server.broker.topics.begin_publish(publish_request("a", "b")).take_in()
    next(steps)
    steps.close()
    assert {unacked(server, path) for path in registry.subscriptions} == {0}


@pytest.mark.parametrize("filters", ["", 'attributes:"k"'])
async def test_storage_limit_counts_what_each_subscription_adds(filters: str) -> None:
    async with (
        serve(storage_bytes=2 * 1024**2) as server,
        connect(server.endpoint) as wire,
    ):
        await wire.topic(TOPIC)
        paths = [f"projects/p/subscriptions/sub{number}" for number in range(50)]
        for path in paths:
            await wire.subscription(path, TOPIC, filter=filters)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await wire.publish(TOPIC, *map(str, range(500)), attributes={"k": "v"})
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [unacked(server, path) for path in paths] == [0] * 50
        assert server.broker.registry.storage.held_bytes < 100_000
