"""A broker on a clock that the test advances, with shorthand for making requests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pubsub_emulator.calls.broker import DEFAULT_STORAGE_BYTES, Broker
from pubsub_emulator.protos import PubsubMessage, PullResponse, message_class
from pubsub_emulator.state.consumers import Consumer
from pubsub_emulator.storage.data_dir import restore
from pubsub_emulator.storage.database import Database, opened_database
from pubsub_emulator.storage.durable import DurableJournal

PROJECT = "projects/test-project"


def topic_path(topic_id: str) -> str:
    return f"{PROJECT}/topics/{topic_id}"


def subscription_path(subscription_id: str) -> str:
    return f"{PROJECT}/subscriptions/{subscription_id}"


def snapshot_path(snapshot_id: str) -> str:
    return f"{PROJECT}/snapshots/{snapshot_id}"


def message(data: str = "", ordering_key: str = "", **attributes: str) -> PubsubMessage:
    return PubsubMessage(data=data.encode(), ordering_key=ordering_key, attributes=attributes)


@dataclass(frozen=True)
class Pulled:
    """A received message, in the form that tests check."""

    data: str
    ack_id: str
    delivery_attempt: int
    message: PubsubMessage


class World:
    """Time advances only through `advance`; timers run exactly when they are due."""

    def __init__(
        self, storage_bytes: int = DEFAULT_STORAGE_BYTES, bigquery_endpoint: str = ""
    ) -> None:
        self.now_s = 1_800_000_000.0
        self.broker = Broker(lambda: self.now_s, storage_bytes, bigquery_endpoint=bigquery_endpoint)

    def advance(self, seconds: float) -> None:
        target_s = self.now_s + seconds
        while (due_s := self.broker.timers.next_due_s) is not None and due_s <= target_s:
            self.now_s = max(self.now_s, due_s)
            self.broker.timers.run_due()
        self.now_s = target_s

    def call(self, name: str, kind: str, /, **fields: Any) -> Any:
        return self.broker.call(name, message_class(kind)(**fields))

    def topic(self, topic_id: str = "jobs", **fields: Any) -> str:
        return str(self.call("CreateTopic", "Topic", name=topic_path(topic_id), **fields).name)

    def subscription(
        self, subscription_id: str = "workers", topic_id: str = "jobs", **fields: Any
    ) -> str:
        request = {
            "name": subscription_path(subscription_id),
            "topic": topic_path(topic_id),
            **fields,
        }
        return str(self.call("CreateSubscription", "Subscription", **request).name)

    def publish(self, *messages: str | PubsubMessage, topic_id: str = "jobs") -> list[str]:
        protos = [message(item) if isinstance(item, str) else item for item in messages]
        response = self.call(
            "Publish", "PublishRequest", topic=topic_path(topic_id), messages=protos
        )
        return list(response.message_ids)

    def consumer(
        self, ack_deadline_s: float = 10, max_messages: int = 0, max_bytes: int = 0
    ) -> "Reader":
        return Reader(ack_deadline_s, max_messages, max_bytes)

    def busy(self, consumer: Consumer, subscription_id: str = "workers") -> None:
        """The consumer, having found nothing to take, starts writing something else."""
        self.broker.registry.subscriptions[subscription_path(subscription_id)].backlog.busy(
            consumer
        )

    def leave(self, consumer: Consumer, subscription_id: str = "workers") -> None:
        """The consumer disconnects, with or without outstanding messages."""
        self.broker.registry.subscriptions[subscription_path(subscription_id)].leave(consumer)

    def pull(self, subscription_id: str = "workers", max_messages: int = 1000) -> list[Pulled]:
        """Take the ready messages, like a Pull that returns immediately."""
        subscription = self.broker.pullable(subscription_path(subscription_id))
        consumer = Consumer(lambda: None, subscription.settings.ack_deadline_s)
        pulled = self.take(consumer, subscription_id, max_messages)
        subscription.leave(consumer)
        return pulled

    def take(
        self, consumer: Consumer, subscription_id: str = "workers", max_messages: int = 1000
    ) -> list[Pulled]:
        backlog = self.broker.registry.subscriptions[subscription_path(subscription_id)].backlog
        response = PullResponse.FromString(backlog.serialized(backlog.take(consumer, max_messages)))
        return [
            Pulled(
                received.message.data.decode(),
                received.ack_id,
                received.delivery_attempt,
                received.message,
            )
            for received in response.received_messages
        ]

    def pull_data(self, subscription_id: str = "workers") -> list[str]:
        return [message.data for message in self.pull(subscription_id)]

    def ack(self, pulled: Sequence[Pulled], subscription_id: str = "workers") -> None:
        ack_ids = [message.ack_id for message in pulled]
        path = subscription_path(subscription_id)
        self.call("Acknowledge", "AcknowledgeRequest", subscription=path, ack_ids=ack_ids)

    def modify(
        self, pulled: Sequence[Pulled], deadline_s: int, subscription_id: str = "workers"
    ) -> None:
        self.call(
            "ModifyAckDeadline",
            "ModifyAckDeadlineRequest",
            subscription=subscription_path(subscription_id),
            ack_ids=[message.ack_id for message in pulled],
            ack_deadline_seconds=deadline_s,
        )

    def nack(self, pulled: Sequence[Pulled], subscription_id: str = "workers") -> None:
        self.modify(pulled, 0, subscription_id)


class KeptWorld(World):
    """A world in a directory: `crash` restores the last flushed state, but keeps the time."""

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.database = database
        self.crash()

    def flush(self) -> None:
        self.journal.flush()

    def crash(self) -> None:
        self.journal = DurableJournal(self.database)
        self.broker = Broker(lambda: self.now_s, journal=self.journal)
        restore(self.broker.registry, self.database)

    def restart(self) -> None:
        self.flush()
        self.crash()

    def rows(self) -> int:
        """Returns the number of messages in the file, each held by a subscriber."""
        messages = {sequence for sequence, _ in self.database.messages()}
        assert messages == {sequence for sequence, *_ in self.database.held()}
        return len(messages)


@contextmanager
def kept_world(folder: Path) -> Iterator[KeptWorld]:
    with opened_database(folder, fsync=False) as database:
        yield KeptWorld(database)


class Reader(Consumer):
    """A consumer that counts how many times it was woken."""

    def __init__(self, ack_deadline_s: float, max_messages: int, max_bytes: int) -> None:
        super().__init__(self._count, ack_deadline_s, max_messages, max_bytes)
        self.wakes = 0

    def _count(self) -> None:
        self.wakes += 1
