"""A broker whose state is in a directory, read at startup and written on every change."""

import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from pubsub_emulator.calls.broker import Broker
from pubsub_emulator.protos import PubsubMessage, SchemaRevisions, SetIamPolicyRequest
from pubsub_emulator.protos import Snapshot as SnapshotProto
from pubsub_emulator.protos import Subscription as SubscriptionProto
from pubsub_emulator.protos import Topic as TopicProto
from pubsub_emulator.state.ack_ids import AckIds
from pubsub_emulator.state.delivery_settings import seconds_of
from pubsub_emulator.state.message import StoredMessage
from pubsub_emulator.state.policy import KIND, StoredPolicy
from pubsub_emulator.state.registry import Registry
from pubsub_emulator.state.schema import StoredSchema
from pubsub_emulator.state.snapshot import Snapshot
from pubsub_emulator.state.subscription import SubscriptionState
from pubsub_emulator.state.topic import Topic
from pubsub_emulator.storage.database import Database, WriteFailed, opened_database
from pubsub_emulator.storage.durable import DurableJournal

USE_NOTED_EVERY_S = 3600.0
"""Maximum amount by which a restart may set back a subscription's last-use time."""

MOST_NAMED = 10
_log = logging.getLogger(__name__)

Restore = Callable[[StoredMessage, int, int], None]


@asynccontextmanager
async def durable_broker(
    data_dir: Path,
    now_s: Callable[[], float],
    storage_bytes: int,
    bigquery_endpoint: str = "",
    *,
    fsync: bool,
) -> AsyncIterator[Broker]:
    """Run a broker on a directory's contents, storing its changes there until the block ends.

    Args:
        data_dir: created if it is missing.
        bigquery_endpoint: see `Broker`.
        fsync: True if each commit waits for the disk, to survive power failures too.

    Raises:
        OSError: the directory is not writable, another server uses it, or the file has a different
        format.
    """
    with opened_database(data_dir, fsync=fsync) as database:
        journal = DurableJournal(database)
        broker = Broker(now_s, storage_bytes, journal, bigquery_endpoint)
        try:
            restore(broker.registry, database)
        except sqlite3.Error as error:
            raise OSError(f"Pub/Sub can't read {data_dir}: {error}") from error
        _note_use(broker.registry)
        try:
            journal.flush()
        except WriteFailed as error:
            raise OSError(f"Pub/Sub can't write to {data_dir}: {error}") from error
        async with journal.running(broker.registry.withdraw):
            yield broker


def restore(registry: Registry, database: Database) -> None:
    """Fill an empty registry with the last process's final state, no matter how it exited.

    Damaged messages are skipped and logged.

    Raises:
        OSError: a topic, a subscription or a snapshot is damaged.
        sqlite3.Error: the file can't be read.
    """
    registry.continue_after(database.highest_number())
    holders: dict[int, Restore] = {}
    # In creation order, so topics come before their subscriptions, and subscriptions before their
    # snapshots.
    for path, holder, moment_s, data in database.resources():
        if data is None:
            raise OSError(f"Pub/Sub can't use its data directory: {path} in it is corrupt")
        holders[holder] = _RESTORE[path.split("/")[2]](registry, holder, moment_s, data)
    messages = {
        sequence: _stored(PubsubMessage.FromString(data), sequence, registry)
        for sequence, data in database.messages()
        if data is not None
    }
    damaged = set[int]()
    for sequence, holder, number, attempts in database.held():
        if sequence in messages:
            holders[holder](messages[sequence], number, attempts)
        else:
            damaged.add(sequence)
    if damaged:
        database.remove(damaged)
        ids = ", ".join(map(str, sorted(damaged)[:MOST_NAMED]))
        more = ", ..." if len(damaged) > MOST_NAMED else ""
        _log.error("%d damaged messages were dropped (ids %s%s)", len(damaged), ids, more)


def _restore_topic(registry: Registry, holder: int, moment_s: float, data: bytes) -> Restore:
    topic = Topic(TopicProto.FromString(data), registry.timers, registry.journal, holder)
    registry.topics[topic.path] = topic
    return lambda message, number, attempts: topic.restore(message)


def _restore_subscription(registry: Registry, holder: int, moment_s: float, data: bytes) -> Restore:
    proto = SubscriptionProto.FromString(data)
    subscription = SubscriptionState(proto, registry.topics.get(proto.topic), registry, holder)
    if subscription.settings.exactly_once:
        # Otherwise, an attempt recorded too late would reuse its ack id, and the old and new ids
        # would both count as current.
        subscription.backlog.ack_ids = AckIds(registry.next_sequence())
    subscription.restore_last_use(min(moment_s + USE_NOTED_EVERY_S, registry.timers.now_s()))
    registry.subscriptions[subscription.path] = subscription
    if subscription.topic is not None and not proto.detached:
        subscription.topic.attach(subscription)
    return subscription.restore


def _restore_snapshot(registry: Registry, holder: int, moment_s: float, data: bytes) -> Restore:
    proto = SnapshotProto.FromString(data)
    snapshot = Snapshot(proto, registry.topics.get(proto.topic), registry.journal, holder, moment_s)
    registry.snapshots[snapshot.path] = snapshot
    if snapshot.topic is not None:
        snapshot.topic.attach(snapshot)
    registry.remove_snapshot_at(snapshot, seconds_of(proto.expire_time))
    return lambda message, number, attempts: snapshot.restore(message)


def _restore_policy(registry: Registry, holder: int, moment_s: float, data: bytes) -> Restore:
    policy = StoredPolicy(SetIamPolicyRequest.FromString(data), holder)
    registry.policies[policy.proto.resource] = policy
    return _holds_no_messages


def _restore_schema(registry: Registry, holder: int, moment_s: float, data: bytes) -> Restore:
    revisions = SchemaRevisions.FromString(data)
    schema = StoredSchema(revisions.schemas[0].name, revisions, holder)
    registry.schemas[schema.path] = schema
    return _holds_no_messages


def _holds_no_messages(message: StoredMessage, number: int, attempts: int) -> None:
    """Do nothing, because the resources in these rows never hold messages."""


_RESTORE: dict[str, Callable[[Registry, int, float, bytes], Restore]] = {
    "topics": _restore_topic,
    "subscriptions": _restore_subscription,
    "snapshots": _restore_snapshot,
    "schemas": _restore_schema,
    KIND: _restore_policy,
}


def _stored(proto: PubsubMessage, sequence: int, registry: Registry) -> StoredMessage:
    published_s = seconds_of(proto.publish_time)
    return StoredMessage(proto, dict(proto.attributes), sequence, published_s, registry.storage)


def _note_use(registry: Registry) -> None:
    """Save each subscription once an hour, because calls that merely use it are not recorded."""
    for subscription in registry.subscriptions.values():
        registry.journal.save(subscription)
    registry.timers.at(registry.timers.now_s() + USE_NOTED_EVERY_S, partial(_note_use, registry))
