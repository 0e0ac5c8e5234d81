"""All of the broker's topics, subscriptions, snapshots and schemas, and references between them.

The API calls in the package `calls` share this registry.
"""

from collections.abc import Callable, Collection
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

from pubsub_emulator.errors import InvalidArgument, resource_not_found
from pubsub_emulator.names import check_name
from pubsub_emulator.protos import PubsubMessage
from pubsub_emulator.state.consumers import Delivery
from pubsub_emulator.state.journal import ChangeJournal
from pubsub_emulator.state.message import Storage, StoredMessage
from pubsub_emulator.state.policy import StoredPolicy
from pubsub_emulator.state.schema import StoredSchema
from pubsub_emulator.state.snapshot import Snapshot
from pubsub_emulator.state.subscription import SubscriptionState
from pubsub_emulator.state.timers import Timers
from pubsub_emulator.state.topic import Topic

MOST_ATTRIBUTE_BYTES = 1024
"""Source: https://cloud.google.com/pubsub/quotas#resource_limits"""

Resource = TypeVar("Resource")


class Registry:
    """The broker's memory: resources, how they are attached to each other, and the next id."""

    def __init__(self, timers: Timers, storage: Storage, journal: ChangeJournal) -> None:
        self.timers = timers
        self.storage = storage
        self.journal = journal
        self.topics: dict[str, Topic] = {}
        self.subscriptions: dict[str, SubscriptionState] = {}
        self.snapshots: dict[str, Snapshot] = {}
        self.schemas: dict[str, StoredSchema] = {}
        self.policies: dict[str, StoredPolicy] = {}
        """By resource path."""
        self.on_delivery_config: Callable[[SubscriptionState], None] = _nobody_delivers
        # Microseconds since the epoch, so that ids look like the service's and don't repeat after a
        # restart.
        self._next_sequence = int(timers.now_s() * 1e6)

    def next_sequence(self) -> int:
        """Return the next number for a message id, holder or delivery."""
        self._next_sequence += 1
        return self._next_sequence

    def continue_after(self, sequence: int) -> None:
        """Make all future numbers higher than a number used before a restart."""
        self._next_sequence = max(self._next_sequence, sequence)

    def topic(self, path: str) -> Topic:
        """Return a topic by its full name, or raise `InvalidArgument` or `NotFound`."""
        return _look_up(self.topics, path, "topics")

    def subscription(self, path: str) -> SubscriptionState:
        """Return a subscription by its full name, or raise `InvalidArgument` or `NotFound`."""
        return _look_up(self.subscriptions, path, "subscriptions")

    def snapshot(self, path: str) -> Snapshot:
        """Return a snapshot by its full name, or raise `InvalidArgument` or `NotFound`."""
        return _look_up(self.snapshots, path, "snapshots")

    def schema(self, path: str) -> StoredSchema:
        """Return a schema by its full name, or raise `InvalidArgument` or `NotFound`."""
        return _look_up(self.schemas, path, "schemas")

    def resource(self, path: str) -> object:
        """Return a resource of any kind, or raise `InvalidArgument` or `NotFound`."""
        kind = path.split("/")[2] if path.count("/") == 3 else ""
        look_up = {
            "topics": self.topic,
            "subscriptions": self.subscription,
            "snapshots": self.snapshot,
            "schemas": self.schema,
        }.get(kind)
        if look_up is None:
            raise InvalidArgument(f"Invalid resource name given (name={path}).")
        return look_up(path)

    def store(
        self, message: PubsubMessage, attributes: dict[str, str], now_s: float
    ) -> StoredMessage:
        """Assign an id and a time to a checked message, and store it as long as something holds it.

        Args:
            message: the message to publish. Its id and time are set.
            now_s: its time, in seconds since the epoch.
        """
        seconds = int(now_s)
        sequence = self.next_sequence()
        message.message_id = str(sequence)
        published = message.publish_time
        published.seconds = seconds
        published.nanos = int((now_s - seconds) * 1e6) * 1000
        stored = StoredMessage(message, attributes, sequence, now_s, self.storage)
        self.journal.keep(stored)
        return stored

    def forward_dead_letter(self, subscription: SubscriptionState, delivery: Delivery) -> bool:
        """Publish a message to the dead-letter topic, with the attributes that the service adds.

        Source: https://cloud.google.com/pubsub/docs/handling-failures#track-delivery-attempts

        Returns:
            False if that topic no longer exists. The message then stays where it is.
        """
        topic = self.topics.get(subscription.settings.dead_letter_topic)
        if topic is None:
            return False
        letter = delivery.message.proto
        _, project_id, _, subscription_id = subscription.path.split("/")
        published = datetime.fromtimestamp(delivery.message.published_s, UTC)
        letter.attributes["CloudPubSubDeadLetterSourceDeliveryCount"] = str(delivery.attempts)
        letter.attributes["CloudPubSubDeadLetterSourceSubscription"] = subscription_id
        letter.attributes["CloudPubSubDeadLetterSourceSubscriptionProject"] = project_id
        letter.attributes["CloudPubSubDeadLetterSourceTopicPublishTime"] = published.isoformat(
            timespec="milliseconds"
        )
        if delivery.failure:
            letter.attributes["CloudPubSubDeadLetterSourceDeliveryErrorMessage"] = (
                delivery.failure.encode(errors="replace")[:MOST_ATTRIBUTE_BYTES].decode(
                    errors="ignore"
                )
            )
        stored = self.store(letter, dict(letter.attributes), self.timers.now_s())
        for _ in topic.deliver(stored):
            pass
        return True

    def erase(self, path: str) -> None:
        """Record that a resource and its policy were deleted."""
        self.journal.erase(path)
        policy = self.policies.pop(path, None)
        if policy is not None:
            self.journal.erase(policy.path)

    def remove_subscription(self, subscription: SubscriptionState) -> None:
        """Remove a subscription. Its consumers are notified."""
        del self.subscriptions[subscription.path]
        if subscription.topic is not None:
            subscription.topic.detach(subscription)
        subscription.close(resource_not_found(subscription.path))
        self.erase(subscription.path)
        self.on_delivery_config(subscription)

    def remove_snapshot(self, snapshot: Snapshot) -> None:
        """Remove a snapshot and its messages."""
        del self.snapshots[snapshot.path]
        if snapshot.topic is not None:
            snapshot.topic.detach(snapshot)
        if snapshot.timer is not None:
            snapshot.timer.cancel()
        snapshot.close()
        self.erase(snapshot.path)

    def remove_snapshot_at(self, snapshot: Snapshot, expire_s: float) -> None:
        """Remove a snapshot when it expires. Replaces an earlier expiration."""
        if snapshot.timer is not None:
            snapshot.timer.cancel()
        snapshot.timer = self.timers.at(expire_s, partial(self.remove_snapshot, snapshot))

    def withdraw(self, sequences: Collection[int]) -> None:
        """Take messages back from all holders, as if they had never been published."""
        for holders in (self.topics, self.subscriptions, self.snapshots):
            for holder in holders.values():
                holder.withdraw(sequences)


def _look_up(resources: dict[str, Resource], path: str, kind: str) -> Resource:
    try:
        return resources[path]
    except KeyError:
        check_name(path, kind)
        raise resource_not_found(path) from None


def _nobody_delivers(subscription: SubscriptionState) -> None:
    """Used instead of the delivery loops when none are running."""
