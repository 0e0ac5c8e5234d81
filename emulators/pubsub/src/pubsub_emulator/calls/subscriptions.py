"""The Subscriber service on the broker's state.

Pull and StreamingPull are in the `streaming` module.
"""

from typing import Any

from pubsub_emulator.calls.paging import page_of
from pubsub_emulator.errors import (
    AckIdsRefused,
    FailedPrecondition,
    InvalidArgument,
    Unimplemented,
    resource_exists,
)
from pubsub_emulator.names import check_project, check_range
from pubsub_emulator.protos import Subscription as SubscriptionProto
from pubsub_emulator.protos import empty, message_class
from pubsub_emulator.state.ack_calls import (
    acknowledge,
    check_ack_request_size,
    modify_ack_deadline,
)
from pubsub_emulator.state.registry import Registry
from pubsub_emulator.state.resources import (
    checked_push_config,
    checked_subscription,
    merge_update,
)
from pubsub_emulator.state.subscription import SubscriptionState, not_pullable

_ListSubscriptionsResponse = message_class("ListSubscriptionsResponse")


class SubscriptionCalls:
    """Creates, returns, changes, and deletes subscriptions, and handles acks and deadlines.

    Args:
        has_bigquery: True if this server can write to BigQuery.
    """

    def __init__(self, registry: Registry, *, has_bigquery: bool) -> None:
        self._registry = registry
        self._has_bigquery = has_bigquery

    def create_subscription(self, request: SubscriptionProto) -> Any:
        """Create a subscription. The subscription receives messages published from then on."""
        proto = checked_subscription(request)
        if proto.name in self._registry.subscriptions:
            raise resource_exists(proto.name)
        topic = self._registry.topic(proto.topic)
        self._check_surroundings(proto)
        proto.detached = False
        subscription = SubscriptionState(
            proto, topic, self._registry, self._registry.next_sequence()
        )
        self._registry.subscriptions[proto.name] = subscription
        self._registry.journal.save(subscription)
        topic.attach(subscription)
        self._registry.on_delivery_config(subscription)
        return _shown(subscription)

    def get_subscription(self, request: Any) -> Any:
        subscription = self._registry.subscription(request.subscription)
        subscription.touch()
        return _shown(subscription)

    def update_subscription(self, request: Any) -> Any:
        """Change those fields of a subscription that are in the mask.

        Its filter, topic, and ordering can't be changed.
        """
        subscription = self._registry.subscription(request.subscription.name)
        merged = merge_update(subscription.proto, request.subscription, request.update_mask)
        proto = checked_subscription(merged)
        self._check_surroundings(proto)
        subscription.touch()
        subscription.configure(proto)
        self._registry.journal.save(subscription)
        self._registry.on_delivery_config(subscription)
        return _shown(subscription)

    def list_subscriptions(self, request: Any) -> Any:
        check_project(request.project)
        named = (
            (path, subscription)
            for path, subscription in self._registry.subscriptions.items()
            if path.startswith(f"{request.project}/")
        )
        page, token = page_of(named, request.page_size, request.page_token)
        return _ListSubscriptionsResponse(
            subscriptions=[_shown(subscription) for subscription in page], next_page_token=token
        )

    def delete_subscription(self, request: Any) -> Any:
        """Delete a subscription and its backlog. Its open streams end with NOT_FOUND."""
        self._registry.remove_subscription(self._registry.subscription(request.subscription))
        return empty()

    def modify_push_config(self, request: Any) -> Any:
        """Change the push endpoint. An empty configuration means pull."""
        subscription = self._registry.subscription(request.subscription)
        push_config = checked_push_config(request.push_config, subscription.proto)
        subscription.proto.push_config.CopyFrom(push_config)
        subscription.touch()
        subscription.configure(subscription.proto)
        self._registry.journal.save(subscription)
        self._registry.on_delivery_config(subscription)
        return empty()

    def acknowledge(self, request: Any) -> Any:
        """Ack messages.

        With exactly-once delivery, raises `AckIdsRefused` for IDs that are no longer valid.
        """
        subscription = self.consumable(request.subscription)
        check_ack_request_size(request)
        if not request.ack_ids:
            raise InvalidArgument("No ack ids specified.")
        refused = acknowledge(subscription.backlog, request.ack_ids)
        if refused:
            raise AckIdsRefused(refused)
        return empty()

    def modify_ack_deadline(self, request: Any) -> Any:
        """Set leases to end 0 to 600 seconds from now."""
        subscription = self.consumable(request.subscription)
        check_ack_request_size(request)
        if not request.ack_ids:
            raise InvalidArgument("No ack ids specified.")
        check_range("ack_deadline_seconds", request.ack_deadline_seconds, 0, 600)
        deadlines_s = [request.ack_deadline_seconds] * len(request.ack_ids)
        refused = modify_ack_deadline(subscription.backlog, request.ack_ids, deadlines_s)
        if refused:
            raise AckIdsRefused(refused)
        return empty()

    def consumable(self, path: str, *, for_pull: bool = False) -> SubscriptionState:
        """Return a subscription to pull from (`for_pull`) or to ack on, and record its use.

        Raises:
            NotFound: the subscription does not exist.
            FailedPrecondition: the subscription is detached, or `for_pull` is set and it can't be
                pulled from.
        """
        subscription = self._registry.subscription(path)
        if subscription.proto.detached:
            raise FailedPrecondition(f"Subscription is detached (resource={path}).")
        if for_pull and subscription.settings.kind != "PULL":
            raise not_pullable(path, subscription.settings.kind)
        subscription.touch()
        return subscription

    def _check_surroundings(self, proto: SubscriptionProto) -> None:
        if proto.HasField("bigquery_config") and not self._has_bigquery:
            raise Unimplemented(
                "The embedded Pub/Sub has no BigQuery to write to, which bigquery_config "
                "requires. Start it with --bigquery-endpoint."
            )
        if proto.HasField("dead_letter_policy"):
            self._registry.topic(proto.dead_letter_policy.dead_letter_topic)


def _shown(subscription: SubscriptionState) -> Any:
    proto, topic = subscription.proto, subscription.topic
    proto.ClearField("topic_message_retention_duration")
    if topic is not None and topic.proto.HasField("message_retention_duration"):
        proto.topic_message_retention_duration.CopyFrom(topic.proto.message_retention_duration)
    return proto
