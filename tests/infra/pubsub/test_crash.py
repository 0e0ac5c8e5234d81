"""A real server on a directory, killed in the middle of traffic, out of room, or refused its directory."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.api_core.exceptions import ServiceUnavailable
from google.api_core.retry import Retry, if_exception_type
from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient
from google.cloud.pubsub_v1.subscriber.message import Message
from google.cloud.pubsub_v1.types import PublisherOptions

from infra.local.process import free_port
from infra.local.pubsub.database import FILE_NAME
from infra.local.pubsub.protos import message_class
from infra.local.pubsub.server import PubsubServer, serve
from tests.infra.pubsub.wire import Wire, connect, until

LIMIT_S = 30.0
TOPIC, SUBSCRIPTION, SECOND = "projects/p/topics/jobs", "projects/p/subscriptions/one", "projects/p/subscriptions/two"
MIB = 1024**2
# As the client's own, which waits up to a minute between two tries.
PUBLISH_AGAIN = Retry(if_exception_type(ServiceUnavailable), initial=0.1, maximum=0.3, timeout=LIMIT_S)


class KeptServer:
    """A server process on one port and one directory, which `kill` and `start` may take turns at."""

    def __init__(self, data_dir: Path) -> None:
        self.port = free_port()
        self._data_dir = data_dir
        self._process: subprocess.Popen[str] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> int:
        """Return the process id of a server that listens."""
        command = [sys.executable, "-m", "infra.local.pubsub", f"--port={self.port}", f"--data-dir={self._data_dir}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip().endswith(self.endpoint)
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate(timeout=LIMIT_S)


@pytest.fixture
def kept_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptServer]:
    """A running server, which Google's clients find by their environment."""
    server = KeptServer(tmp_path)
    monkeypatch.setenv("PUBSUB_EMULATOR_HOST", server.endpoint)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def received_by(subscription: str, take: Callable[[Message], None]) -> Iterator[None]:
    with SubscriberClient() as subscriber:
        streaming = subscriber.subscribe(subscription, take)
        try:
            yield
        finally:
            streaming.cancel()
            streaming.result(timeout=LIMIT_S)


class Received:
    """Acks and counts; `wait_for` returns once it has them all."""

    def __init__(self) -> None:
        self.times: dict[str, int] = {}
        self._changed = threading.Condition()

    def take(self, message: Message) -> None:
        with self._changed:
            self.times[message.message_id] = self.times.get(message.message_id, 0) + 1
            self._changed.notify_all()
        message.ack()

    def wait_for(self, message_ids: set[str]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: message_ids <= self.times.keys(), LIMIT_S)


def make(server: KeptServer) -> None:
    with PublisherClient() as publisher, SubscriberClient() as subscriber:
        publisher.create_topic(name=TOPIC)
        for path in (SUBSCRIPTION, SECOND):
            subscriber.create_subscription(name=path, topic=TOPIC)


@pytest.mark.timeout(90)
def test_every_answered_publish_is_delivered_though_the_server_is_killed_in_traffic(kept_server: KeptServer) -> None:
    make(kept_server)
    first, second = Received(), Received()
    answered: set[str] = set()
    with PublisherClient() as publisher:
        for _ in range(2):
            # Not open while the server is away: the client takes up to ten seconds to come back to a stream.
            with received_by(SUBSCRIPTION, first.take):
                futures = [publisher.publish(TOPIC, b"x" * 200, retry=PUBLISH_AGAIN) for _ in range(500)]
                futures[-100].result(timeout=LIMIT_S)
            futures += [publisher.publish(TOPIC, b"x" * 200, retry=PUBLISH_AGAIN) for _ in range(1500)]
            futures[-1200].result(timeout=LIMIT_S)
            kept_server.kill()
            kept_server.start()
            # What had no answer yet is published again by the client.
            answered |= {future.result(timeout=LIMIT_S) for future in futures}
    for subscription, received in ((SUBSCRIPTION, first), (SECOND, second)):
        with received_by(subscription, received.take):
            received.wait_for(answered)
    assert len(answered) == 4000


@pytest.mark.anyio
async def test_what_was_acked_before_an_answered_publish_does_not_come_again(kept_server: KeptServer) -> None:
    async with connect(kept_server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        await wire.publish(TOPIC, *"abcde")
        await ack(wire, (await wire.pull(SUBSCRIPTION)).received_messages)
        await wire.publish(TOPIC, "f")
    kept_server.kill()
    kept_server.start()
    async with connect(kept_server.endpoint) as wire:
        (again,) = (await wire.pull(SUBSCRIPTION)).received_messages
        assert again.message.data == b"f"


@pytest.mark.anyio
async def test_push_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        push = {"push_endpoint": f"http://127.0.0.1:{free_port()}/push"}
        await wire.subscription(SUBSCRIPTION, TOPIC, push_config=push)
        await wire.publish(TOPIC, "a")
    async with serve(data_dir=tmp_path) as server:
        backlog = server.broker.registry.subscriptions[SUBSCRIPTION].backlog
        await until(lambda: backlog.attempts_of_oldest > 0)


@pytest.mark.anyio
async def test_confirmed_ack_of_exactly_once_delivery_outlives_the_server(kept_server: KeptServer) -> None:
    async with connect(kept_server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC, enable_exactly_once_delivery=True)
        await wire.publish(TOPIC, "a", "b")
        stream = wire.stream()
        await stream.open(SUBSCRIPTION, max_outstanding_messages=1)
        (first,) = (await stream.receive()).received_messages
        await stream.send(ack_ids=[first.ack_id])
        while not (response := await stream.receive()).acknowledge_confirmation.ack_ids:
            pass
        (second,) = response.received_messages or (await stream.receive()).received_messages
        await ack(wire, [second])
    kept_server.kill()
    kept_server.start()
    async with connect(kept_server.endpoint) as wire:
        await wire.publish(TOPIC, "c")
        assert [each.message.data for each in (await wire.pull(SUBSCRIPTION)).received_messages] == [b"c"]


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process's files by prlimit")
@pytest.mark.anyio
@pytest.mark.timeout(60)
async def test_full_disk_refuses_and_loses_nothing_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    server = KeptServer(tmp_path)
    process = psutil.Process(server.start())
    answered: list[str] = []
    try:
        async with connect(server.endpoint) as wire:
            await wire.topic(TOPIC)
            await wire.subscription(SUBSCRIPTION, TOPIC)
            process.rlimit(psutil.RLIMIT_FSIZE, (2 * MIB, psutil.RLIM_INFINITY))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await publish_for_ever(wire, answered)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "can't keep anything new in its data directory" in str(refused.value.details())
            assert len(answered) > 10
            # What is acked while nothing can be written must not come again either.
            leased = (await wire.pull(SUBSCRIPTION, 3)).received_messages
            await ack(wire, leased)
            process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
            answered += await published_at_last(wire, "x" * 50_000)
    finally:
        server.kill()
    try:
        server.start()
        async with connect(server.endpoint) as wire:
            again: list[str] = []
            while len(again) < len(answered) - len(leased):
                again += [each.message.message_id for each in (await wire.pull(SUBSCRIPTION)).received_messages]
            assert again == answered[len(leased) :]
    finally:
        server.kill()


async def publish_for_ever(wire: Wire, answered: list[str]) -> None:
    while True:
        answered += await wire.publish(TOPIC, "x" * 50_000)


async def published_at_last(wire: Wire, data: str) -> list[str]:
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return await wire.publish(TOPIC, data)
        except grpc.aio.AioRpcError:
            assert time.monotonic() < deadline_s


@pytest.mark.anyio
async def test_file_shrinks_when_everything_is_acked(tmp_path: Path) -> None:
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        for _ in range(4):
            await wire.publish(TOPIC, *["x" * 100_000] * 50)
        assert held_bytes(tmp_path) > 15 * MIB
        await ack_all(wire, server)
        await until(lambda: held_bytes(tmp_path) < 8 * MIB)


@pytest.mark.anyio
async def test_file_does_not_grow_with_traffic_that_is_acked(tmp_path: Path) -> None:
    async with serve(data_dir=tmp_path) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        for _ in range(40):
            await wire.publish(TOPIC, *["x" * 10_000] * 100)
            await ack_all(wire, server)
        assert held_bytes(tmp_path) < 25 * MIB


async def ack_all(wire: Wire, server: PubsubServer) -> None:
    while server.broker.registry.subscriptions[SUBSCRIPTION].backlog.oldest is not None:
        await ack(wire, (await wire.pull(SUBSCRIPTION, 1000)).received_messages)


async def ack(wire: Wire, received: Iterable[Any]) -> None:
    ack_ids = [each.ack_id for each in received]
    request = message_class("AcknowledgeRequest")(subscription=SUBSCRIPTION, ack_ids=ack_ids)
    await wire.call("Subscriber", "Acknowledge", request, "Empty")


def held_bytes(data_dir: Path) -> int:
    return sum(path.stat().st_size for path in data_dir.iterdir())


@pytest.mark.anyio
async def test_directory_of_a_running_server_is_refused(tmp_path: Path) -> None:
    async with serve(data_dir=tmp_path):
        with pytest.raises(OSError, match="is another server using it"):
            async with serve(data_dir=tmp_path):
                pass


@pytest.mark.anyio
async def test_file_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text("not a database, but more than a hundred bytes of something else. " * 20)
    with pytest.raises(OSError, match="file is not a database"):
        async with serve(data_dir=tmp_path):
            pass


@pytest.mark.anyio
async def test_directory_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        async with serve(data_dir=tmp_path / "file"):
            pass


@pytest.mark.anyio
async def test_fsync_keeps_the_same(tmp_path: Path) -> None:
    async with serve(data_dir=tmp_path, fsync=True) as server, connect(server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        await wire.publish(TOPIC, "a")
    async with serve(data_dir=tmp_path, fsync=True) as server, connect(server.endpoint) as wire:
        assert [each.message.data for each in (await wire.pull(SUBSCRIPTION)).received_messages] == [b"a"]


def test_ordered_publishes_come_in_order_after_a_kill(kept_server: KeptServer) -> None:
    options = PublisherOptions(enable_message_ordering=True)
    with PublisherClient(publisher_options=options) as publisher, SubscriberClient() as subscriber:
        publisher.create_topic(name=TOPIC)
        request: dict[str, Any] = {"name": SUBSCRIPTION, "topic": TOPIC, "enable_message_ordering": True}
        subscriber.create_subscription(request=request)
        futures = [publisher.publish(TOPIC, str(number).encode(), ordering_key="k") for number in range(30)]
        for future in futures:
            future.result(timeout=LIMIT_S)
    kept_server.kill()
    kept_server.start()
    order: list[bytes] = []
    done = threading.Event()

    def take(message: Message) -> None:
        order.append(message.data)
        message.ack()
        if len(order) == 30:
            done.set()

    with received_by(SUBSCRIPTION, take):
        assert done.wait(LIMIT_S)
    assert order == [str(number).encode() for number in range(30)]
