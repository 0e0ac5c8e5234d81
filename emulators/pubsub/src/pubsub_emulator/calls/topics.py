"""The Publisher service on the broker's state: one method per call, protobuf in and out."""

from collections.abc import Sequence
from typing import Any

from pubsub_emulator.calls.paging import page_of
from pubsub_emulator.calls.publishing import Publishing
from pubsub_emulator.errors import FailedPrecondition, resource_exists
from pubsub_emulator.names import check_project
from pubsub_emulator.protos import Topic as TopicProto
from pubsub_emulator.protos import empty, message_class
from pubsub_emulator.state.publishing import check_publish, measured
from pubsub_emulator.state.registry import Registry
from pubsub_emulator.state.resources import DELETED_TOPIC, checked_topic, merge_update
from pubsub_emulator.state.schema import MessageCheck
from pubsub_emulator.state.schema_settings import check_schema_settings, message_check
from pubsub_emulator.state.subscription import SubscriptionState
from pubsub_emulator.state.topic import Topic

_ListTopicsResponse = message_class("ListTopicsResponse")
_ListTopicSubscriptionsResponse = message_class("ListTopicSubscriptionsResponse")
_ListTopicSnapshotsResponse = message_class("ListTopicSnapshotsResponse")
_DetachSubscriptionResponse = message_class("DetachSubscriptionResponse")


class TopicCalls:
    """Creates, returns, changes, and deletes topics, and publishes to them."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def create_topic(self, request: TopicProto) -> Any:
        """Create a topic. Raises `AlreadyExists` if the name is taken."""
        proto = checked_topic(request)
        check_schema_settings(proto, None, self._registry.schema)
        if proto.name in self._registry.topics:
            raise resource_exists(proto.name)
        topic = Topic(
            proto, self._registry.timers, self._registry.journal, self._registry.next_sequence()
        )
        self._registry.topics[proto.name] = topic
        self._registry.journal.save(topic)
        return proto

    def get_topic(self, request: Any) -> Any:
        return self._registry.topic(request.topic).proto

    def update_topic(self, request: Any) -> Any:
        """Change those fields of an existing topic that are in the mask."""
        topic = self._registry.topic(request.topic.name)
        proto = checked_topic(merge_update(topic.proto, request.topic, request.update_mask))
        check_schema_settings(proto, topic.proto, self._registry.schema)
        topic.configure(proto)
        for subscription in self._subscriptions_of(topic):
            subscription.follow_topic(topic)
        self._registry.journal.save(topic)
        return topic.proto

    def list_topics(self, request: Any) -> Any:
        check_project(request.project)
        named = (
            (path, topic.proto)
            for path, topic in self._registry.topics.items()
            if path.startswith(f"{request.project}/")
        )
        page, token = page_of(named, request.page_size, request.page_token)
        return _ListTopicsResponse(topics=page, next_page_token=token)

    def list_topic_subscriptions(self, request: Any) -> Any:
        """List the names of a topic's subscriptions, in pages."""
        topic = self._registry.topic(request.topic)
        named = (
            (subscription.path, subscription.path)
            for subscription in self._subscriptions_of(topic)
            if not subscription.proto.detached
        )
        page, token = page_of(named, request.page_size, request.page_token)
        return _ListTopicSubscriptionsResponse(subscriptions=page, next_page_token=token)

    def list_topic_snapshots(self, request: Any) -> Any:
        """List the names of a topic's snapshots, in pages."""
        topic = self._registry.topic(request.topic)
        named = (
            (path, path)
            for path, snapshot in self._registry.snapshots.items()
            if snapshot.topic is topic
        )
        page, token = page_of(named, request.page_size, request.page_token)
        return _ListTopicSnapshotsResponse(snapshots=page, next_page_token=token)

    def delete_topic(self, request: Any) -> Any:
        """Delete a topic. Its subscriptions keep their backlog and show `_deleted-topic_`."""
        topic = self._registry.topic(request.topic)
        del self._registry.topics[topic.path]
        for subscription in self._subscriptions_of(topic):
            subscription.proto.topic = DELETED_TOPIC
            subscription.follow_topic(None)
            self._registry.journal.save(subscription)
        for snapshot in self._registry.snapshots.values():
            if snapshot.topic is topic:
                snapshot.topic = None
                snapshot.proto.topic = DELETED_TOPIC
                self._registry.journal.save(snapshot)
        topic.close()
        self._registry.erase(topic.path)
        return empty()

    def publish(self, request: Any) -> Any:
        """Publish messages in one step. Returns their IDs in the same order as in the request."""
        check = self.message_check(request)
        if check is None:
            publishing = self.begin_publish(request)
        else:
            revision_ids = check.run(message.data for message in request.messages)
            publishing = self.begin_checked_publish(request, check, revision_ids)
        for steps in (publishing.take_in(), publishing.let_out()):
            for _ in steps:
                pass
        return publishing.response

    def message_check(self, request: Any) -> MessageCheck | None:
        """Return the check for the messages. None: the topic has no schema."""
        topic = self._registry.topic(request.topic)
        if not topic.has_schema:
            return None
        check_publish(request)
        return message_check(topic.proto, self._registry.schema)

    def begin_publish(self, request: Any) -> Publishing:
        """Begin a publish to a topic without a schema. It continues in steps."""
        return Publishing(self._registry, request, check_publish(request))

    def begin_checked_publish(
        self, request: Any, check: MessageCheck, revision_ids: Sequence[str]
    ) -> Publishing:
        """Begin a publish of messages that match the schema's revisions."""
        for message, revision_id in zip(request.messages, revision_ids, strict=True):
            check.stamp(message, revision_id)
        return Publishing(self._registry, request, measured(request))

    def detach_subscription(self, request: Any) -> Any:
        """Detach a subscription from its topic and permanently drop its backlog."""
        subscription = self._registry.subscription(request.subscription)
        if not subscription.proto.detached:
            subscription.proto.detached = True
            if subscription.topic is not None:
                subscription.topic.detach(subscription)
            subscription.close(
                FailedPrecondition(f"Subscription is detached (resource={subscription.path}).")
            )
            self._registry.journal.save(subscription)
            self._registry.on_delivery_config(subscription)
        return _DetachSubscriptionResponse()

    def _subscriptions_of(self, topic: Topic) -> list[SubscriptionState]:
        return [
            subscription
            for subscription in self._registry.subscriptions.values()
            if subscription.topic is topic
        ]
