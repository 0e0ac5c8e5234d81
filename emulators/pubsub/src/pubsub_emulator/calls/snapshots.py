"""The Subscriber service's snapshot and seek calls, on the broker's state."""

import uuid
from typing import Any

from pubsub_emulator.calls.paging import page_of
from pubsub_emulator.errors import FailedPrecondition, InvalidArgument, resource_exists
from pubsub_emulator.names import check_name, check_project, check_time
from pubsub_emulator.protos import Snapshot as SnapshotProto
from pubsub_emulator.protos import empty, message_class
from pubsub_emulator.state.delivery_settings import seconds_of
from pubsub_emulator.state.message import StoredMessage
from pubsub_emulator.state.registry import Registry
from pubsub_emulator.state.resources import checked_snapshot, merge_update
from pubsub_emulator.state.snapshot import Snapshot, check_expire_time, snapshot_expire_s
from pubsub_emulator.state.subscription import SubscriptionState

_ListSnapshotsResponse = message_class("ListSnapshotsResponse")
_SeekResponse = message_class("SeekResponse")


class SnapshotCalls:
    """Snapshots, and seeking to a snapshot or a time."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def create_snapshot(self, request: Any) -> Any:
        """Keep unacked messages and all later messages on the topic for up to 7 days."""
        subscription = self._registry.subscription(request.subscription)
        if subscription.topic is None or subscription.proto.detached:
            raise FailedPrecondition(
                f"The subscription has no topic (resource={request.subscription})."
            )
        project = request.subscription.rpartition("/subscriptions/")[0]
        name = request.name or f"{project}/snapshots/snapshot-{uuid.uuid4().hex}"
        check_name(name, "snapshots")
        if name in self._registry.snapshots:
            raise resource_exists(name)
        expire_s = snapshot_expire_s(subscription, self._registry.timers.now_s())
        proto = SnapshotProto(name=name, topic=subscription.topic.path, labels=request.labels)
        proto.expire_time.FromMicroseconds(int(expire_s * 1e6))
        journal, holder = self._registry.journal, self._registry.next_sequence()
        snapshot = Snapshot(checked_snapshot(proto), subscription.topic, journal, holder, expire_s)
        for message in subscription.backlog.messages:
            snapshot.add(message)
        self._registry.snapshots[name] = snapshot
        journal.save(snapshot)
        subscription.topic.attach(snapshot)
        subscription.touch()
        self._registry.remove_snapshot_at(snapshot, expire_s)
        return snapshot.proto

    def get_snapshot(self, request: Any) -> Any:
        return self._registry.snapshot(request.snapshot).proto

    def update_snapshot(self, request: Any) -> Any:
        """Change a snapshot's labels, or its expiration within the 7 days."""
        snapshot = self._registry.snapshot(request.snapshot.name)
        proto = checked_snapshot(
            merge_update(snapshot.proto, request.snapshot, request.update_mask)
        )
        check_time("expire_time", proto.expire_time)
        expire_s = seconds_of(proto.expire_time)
        if proto.expire_time != snapshot.proto.expire_time:
            check_expire_time(snapshot, expire_s, self._registry.timers.now_s())
            self._registry.remove_snapshot_at(snapshot, expire_s)
        snapshot.proto = proto
        self._registry.journal.save(snapshot)
        return proto

    def list_snapshots(self, request: Any) -> Any:
        check_project(request.project)
        named = (
            (path, snapshot.proto)
            for path, snapshot in self._registry.snapshots.items()
            if path.startswith(f"{request.project}/")
        )
        page, token = page_of(named, request.page_size, request.page_token)
        return _ListSnapshotsResponse(snapshots=page, next_page_token=token)

    def delete_snapshot(self, request: Any) -> Any:
        """Delete a snapshot and the messages held only by it."""
        self._registry.remove_snapshot(self._registry.snapshot(request.snapshot))
        return empty()

    def seek(self, request: Any) -> Any:
        """Move a subscription to a time or a snapshot: acks or redelivers messages in bulk."""
        subscription = self._registry.subscription(request.subscription)
        if subscription.proto.detached:
            raise FailedPrecondition(f"Subscription is detached (resource={request.subscription}).")
        subscription.touch()
        target = request.WhichOneof("target")
        if target == "time":
            check_time("time", request.time)
            self._seek_to_time(subscription, seconds_of(request.time))
        elif target == "snapshot":
            self._seek_to_snapshot(subscription, self._registry.snapshot(request.snapshot))
        else:
            raise InvalidArgument("A seek requires a target: either time or snapshot.")
        return _SeekResponse()

    def _seek_to_time(self, subscription: SubscriptionState, time_s: float) -> None:
        def is_unacked(message: StoredMessage) -> bool:
            return message.published_s >= time_s

        subscription.seek(is_unacked, subscription.topic.log if subscription.topic else ())

    def _seek_to_snapshot(self, subscription: SubscriptionState, snapshot: Snapshot) -> None:
        if snapshot.topic is None or snapshot.topic is not subscription.topic:
            raise FailedPrecondition(
                f"The snapshot's topic must be the subscription's topic (snapshot={snapshot.path}, "
                f"subscription={subscription.path})."
            )

        def is_unacked(message: StoredMessage) -> bool:
            return message.sequence in snapshot.messages

        subscription.seek(is_unacked, snapshot.messages.values())
