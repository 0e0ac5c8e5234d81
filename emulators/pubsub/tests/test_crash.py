"""A real server on a directory, killed mid-traffic and restarted, as seen by Google's client."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from google.api_core.exceptions import ServiceUnavailable
from google.api_core.retry import Retry, if_exception_type
from google.cloud.pubsub_v1 import PublisherClient, SchemaServiceClient, SubscriberClient
from google.cloud.pubsub_v1.subscriber.message import Message
from google.cloud.pubsub_v1.types import PublisherOptions
from google.pubsub_v1.types import Schema

from tests.kept_server import KeptServer
from tests.limits import WAIT_LIMIT_S
from tests.wire import connect

TOPIC, SUBSCRIPTION, SECOND = (
    "projects/p/topics/jobs",
    "projects/p/subscriptions/one",
    "projects/p/subscriptions/two",
)
# Like the client's own retry, which waits up to a minute between attempts.
AGAIN = Retry(if_exception_type(ServiceUnavailable), initial=0.1, maximum=0.3, timeout=WAIT_LIMIT_S)


@pytest.fixture
def kept_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptServer]:
    """A running server, which Google's clients find through their environment."""
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
            streaming.result(timeout=WAIT_LIMIT_S)


class Received:
    """Acks and counts messages; `wait_for` returns once all have arrived."""

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
            assert self._changed.wait_for(lambda: message_ids <= self.times.keys(), WAIT_LIMIT_S)


def make(server: KeptServer) -> None:
    with PublisherClient() as publisher, SubscriberClient() as subscriber:
        publisher.create_topic(name=TOPIC)
        for path in (SUBSCRIPTION, SECOND):
            subscriber.create_subscription(name=path, topic=TOPIC)


def test_every_answered_publish_is_delivered_though_the_server_is_killed_in_traffic(
    kept_server: KeptServer,
) -> None:
    make(kept_server)
    first, second = Received(), Received()
    answered: set[str] = set()
    with PublisherClient() as publisher:
        for _ in range(2):
            # The stream is not open while the server is down, because the client takes up to ten
            # seconds to reopen one.
            with received_by(SUBSCRIPTION, first.take):
                futures = [publisher.publish(TOPIC, b"x" * 200, retry=AGAIN) for _ in range(500)]
                futures[-100].result(timeout=WAIT_LIMIT_S)
            futures += [publisher.publish(TOPIC, b"x" * 200, retry=AGAIN) for _ in range(1500)]
            futures[-1200].result(timeout=WAIT_LIMIT_S)
            kept_server.kill()
            kept_server.start()
            # The client republishes messages that got no response.
            answered |= {future.result(timeout=WAIT_LIMIT_S) for future in futures}
    for subscription, received in ((SUBSCRIPTION, first), (SECOND, second)):
        with received_by(subscription, received.take):
            received.wait_for(answered)
    assert len(answered) == 4000


@pytest.mark.anyio
async def test_what_was_acked_before_an_answered_publish_does_not_come_again(
    kept_server: KeptServer,
) -> None:
    async with connect(kept_server.endpoint) as wire:
        await wire.topic(TOPIC)
        await wire.subscription(SUBSCRIPTION, TOPIC)
        await wire.publish(TOPIC, *"abcde")
        await wire.ack(SUBSCRIPTION, (await wire.pull(SUBSCRIPTION)).received_messages)
        await wire.publish(TOPIC, "f")
    kept_server.kill()
    kept_server.start()
    async with connect(kept_server.endpoint) as wire:
        (again,) = (await wire.pull(SUBSCRIPTION)).received_messages
        assert again.message.data == b"f"


@pytest.mark.anyio
async def test_confirmed_ack_of_exactly_once_delivery_outlives_the_server(
    kept_server: KeptServer,
) -> None:
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
        await wire.ack(SUBSCRIPTION, [second])
    kept_server.kill()
    kept_server.start()
    async with connect(kept_server.endpoint) as wire:
        await wire.publish(TOPIC, "c")
        assert [
            received.message.data for received in (await wire.pull(SUBSCRIPTION)).received_messages
        ] == [b"c"]


def test_ordered_publishes_come_in_order_after_a_kill(kept_server: KeptServer) -> None:
    options = PublisherOptions(enable_message_ordering=True)
    with PublisherClient(publisher_options=options) as publisher, SubscriberClient() as subscriber:
        publisher.create_topic(name=TOPIC)
        request: dict[str, Any] = {
            "name": SUBSCRIPTION,
            "topic": TOPIC,
            "enable_message_ordering": True,
        }
        subscriber.create_subscription(request=request)
        futures = [
            publisher.publish(TOPIC, str(number).encode(), ordering_key="k") for number in range(30)
        ]
        for future in futures:
            future.result(timeout=WAIT_LIMIT_S)
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
        assert done.wait(WAIT_LIMIT_S)
    assert order == [str(number).encode() for number in range(30)]


def test_schema_or_policy_that_was_answered_is_there_after_a_kill(
    kept_server: KeptServer,
) -> None:
    text = Schema(type_=Schema.Type.AVRO, definition='"string"')
    name = "projects/p/schemas/text"

    def killed_after(call: Callable[..., Any], **request: Any) -> None:
        call(request=request, retry=AGAIN)
        kept_server.kill()
        kept_server.start()

    with PublisherClient() as publisher, SchemaServiceClient() as schemas:
        killed_after(publisher.create_topic, name=TOPIC)
        killed_after(schemas.create_schema, parent="projects/p", schema=text, schema_id="text")
        killed_after(schemas.commit_schema, name=name, schema=text)
        assert len(list(schemas.list_schema_revisions(name=name, retry=AGAIN))) == 2
        policy = {"bindings": [{"role": "roles/pubsub.viewer", "members": ["user:a@b.c"]}]}
        killed_after(publisher.set_iam_policy, resource=TOPIC, policy=policy)
        stored = publisher.get_iam_policy(request={"resource": TOPIC}, retry=AGAIN)
        assert stored.bindings[0].role == "roles/pubsub.viewer"
        killed_after(schemas.delete_schema, name=name)
        assert list(schemas.list_schemas(parent="projects/p", retry=AGAIN)) == []
