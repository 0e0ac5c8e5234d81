"""Validates topics, subscriptions and snapshots: ranges, defaults, updates.

Every request is checked here before it changes anything. Limits:
https://cloud.google.com/pubsub/quotas and the API's own field comments.
"""

import re
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit

from pubsub_emulator.errors import InvalidArgument, Unimplemented
from pubsub_emulator.names import (
    check_duration,
    check_name,
    check_range,
    plain_number,
)
from pubsub_emulator.protos import PushConfig, Snapshot, Subscription, Topic
from pubsub_emulator.state.bigquery_settings import complete_bigquery_config
from pubsub_emulator.state.delivery_settings import (
    DEFAULT_MAX_DELIVERY_ATTEMPTS,
    DEFAULT_MAXIMUM_BACKOFF_S,
    DEFAULT_MINIMUM_BACKOFF_S,
    seconds_of,
)
from pubsub_emulator.state.filter import parse_filter

DELETED_TOPIC = "_deleted-topic_"

_MINUTE_S = 60
_DAY_S = 86400
_SHORTEST_RETENTION_S = 10 * _MINUTE_S
_LONGEST_RETENTION_S = 31 * _DAY_S
_DEFAULT_RETENTION_S = 7 * _DAY_S
_DEFAULT_TTL_S = 31 * _DAY_S
_SHORTEST_TTL_S = _DAY_S
_MAX_LABELS = 64
_LABEL_KEY = re.compile(r"[^\W\d_A-Z](?:[^\WA-Z]|-){0,62}")
_LABEL_VALUE = re.compile(r"(?:[^\WA-Z]|-){0,63}")
_URL = re.compile(r"[\x21-\x7e]+")

_TOPIC_FIELDS_WITHOUT_EFFECT_HERE = (
    "ingestion_data_source_settings",
    "message_transforms",
)
_SUBSCRIPTION_FIELDS_WITHOUT_EFFECT_HERE = (
    "cloud_storage_config",
    "bigtable_config",
    "message_transforms",
)
_UPDATABLE_TOPIC_FIELDS = frozenset(
    {
        "labels",
        "message_storage_policy",
        "kms_key_name",
        "message_retention_duration",
        "schema_settings",
    }
)
_UPDATABLE_SUBSCRIPTION_FIELDS = frozenset(
    {
        "push_config",
        "ack_deadline_seconds",
        "retain_acked_messages",
        "message_retention_duration",
        "labels",
        "expiration_policy",
        "dead_letter_policy",
        "retry_policy",
        "enable_exactly_once_delivery",
        "bigquery_config",
    }
)
_UPDATABLE_SNAPSHOT_FIELDS = frozenset({"labels", "expire_time"})


def checked_topic(request: Topic) -> Topic:
    """Return a copy of a requested topic, as GetTopic will return it.

    Raises:
        InvalidArgument: a name, label or duration is out of range.
        Unimplemented: the topic uses a service feature that this server does not support.
    """
    topic = Topic()
    topic.CopyFrom(request)
    check_name(topic.name, "topics")
    _refuse_fields(topic, _TOPIC_FIELDS_WITHOUT_EFFECT_HERE)
    _check_labels(topic.labels)
    if topic.HasField("message_retention_duration"):
        _check_retention(topic.message_retention_duration)
    topic.ClearField("tags")
    topic.satisfies_pzs = False
    topic.state = Topic.State.Value("ACTIVE")
    return topic


def checked_subscription(request: Subscription) -> Subscription:
    """Return a copy of a requested subscription with the service's defaults.

    Raises:
        InvalidArgument: a name, filter, label, number or duration is out of range.
        Unimplemented: the subscription uses a service feature that this server does not support.
    """
    subscription = Subscription()
    subscription.CopyFrom(request)
    check_name(subscription.name, "subscriptions")
    if subscription.topic != DELETED_TOPIC:
        check_name(subscription.topic, "topics")
    _refuse_fields(subscription, _SUBSCRIPTION_FIELDS_WITHOUT_EFFECT_HERE)
    parse_filter(subscription.filter)
    _check_labels(subscription.labels)
    subscription.ack_deadline_seconds = subscription.ack_deadline_seconds or 10
    check_range("ack_deadline_seconds", subscription.ack_deadline_seconds, 10, 600)
    _complete_retention(subscription)
    _complete_retry_policy(subscription)
    _complete_dead_letter_policy(subscription)
    if subscription.HasField("bigquery_config"):
        complete_bigquery_config(subscription)
    checked_push_config(subscription.push_config, subscription)
    subscription.push_config.SetInParent()
    for field in ("tags", "topic_message_retention_duration", "analytics_hub_subscription_info"):
        subscription.ClearField(field)
    subscription.state = Subscription.State.Value("ACTIVE")
    return subscription


def checked_snapshot(request: Snapshot) -> Snapshot:
    """Check a snapshot's labels and return a copy of it, or raise `InvalidArgument`."""
    snapshot = Snapshot()
    snapshot.CopyFrom(request)
    _check_labels(snapshot.labels)
    return snapshot


def checked_push_config(push_config: PushConfig, subscription: Subscription) -> PushConfig:
    """Check a subscription's push configuration. An empty one means no push.

    Raises:
        InvalidArgument: the endpoint is not an http(s) URL, or push is combined with exactly-once
        delivery or BigQuery.
    """
    if not push_config.push_endpoint:
        return push_config
    if not is_http_url(push_config.push_endpoint):
        raise InvalidArgument(
            f"Invalid push endpoint given (endpoint={push_config.push_endpoint})."
        )
    if subscription.HasField("bigquery_config"):
        raise InvalidArgument("Only one of push_config and bigquery_config may be set.")
    if subscription.enable_exactly_once_delivery:
        raise InvalidArgument(
            "Exactly-once delivery is only supported for pull subscriptions, not with push_config."
        )
    return push_config


def is_http_url(endpoint: str) -> bool:
    """True if this is an http or https URL with a host, and HTTP can send each of its characters.

    Other characters, such as spaces, must be escaped.
    """
    if not _URL.fullmatch(endpoint):
        return False
    try:
        url = urlsplit(endpoint)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def merge_update(current: Any, update: Any, update_mask: Any) -> Any:
    """Return a copy of `current` with the masked fields from `update`.

    Raises:
        InvalidArgument: the mask is empty, or a field is unknown or can't be changed.
    """
    kind = current.DESCRIPTOR.name
    if not update_mask.paths:
        raise InvalidArgument(
            f"The update_mask in the Update{kind}Request must be set, and must contain a non-empty "
            "paths list."
        )
    for path in update_mask.paths:
        _check_update_path(path, current, _updatable_fields(kind))
    merged = type(current)()
    merged.CopyFrom(current)
    update_mask.MergeMessage(
        update, merged, replace_message_field=True, replace_repeated_field=True
    )
    return merged


def _updatable_fields(kind: str) -> frozenset[str]:
    return {
        "Topic": _UPDATABLE_TOPIC_FIELDS,
        "Subscription": _UPDATABLE_SUBSCRIPTION_FIELDS,
        "Snapshot": _UPDATABLE_SNAPSHOT_FIELDS,
    }[kind]


def _check_update_path(path: str, current: Any, updatable: Collection[str]) -> None:
    kind = current.DESCRIPTOR.name
    field = path.partition(".")[0]
    if field not in current.DESCRIPTOR.fields_by_name:
        raise InvalidArgument(
            f"Invalid update_mask provided in the Update{kind}Request: {path} is not a known "
            f"{kind} field. Note that field paths must be of the form 'push_config' rather than "
            "'pushConfig'."
        )
    if field not in updatable:
        raise InvalidArgument(
            f"Invalid update_mask provided in the Update{kind}Request: the {field} field in the "
            f"{kind} is not mutable."
        )
    if not _is_path(path, current.DESCRIPTOR):
        raise InvalidArgument(
            f"Invalid update_mask provided in the Update{kind}Request: {path} is not a path "
            f"to a {kind} field. Maps and lists are replaced as a whole."
        )


def _is_path(path: str, descriptor: Any) -> bool:
    """True if each part of a path names a field of the message that the previous part names."""
    for part in path.split("."):
        field = descriptor.fields_by_name.get(part) if descriptor is not None else None
        if field is None:
            return False
        descriptor = None if field.is_repeated else field.message_type
    return True


def _refuse_fields(resource: Any, fields: Collection[str]) -> None:
    used = {descriptor.name for descriptor, _ in resource.ListFields()}
    for field in fields:
        if field in used:
            raise Unimplemented(
                f"The embedded Pub/Sub does not support {field}. Use Google's Pub/Sub for it."
            )


def _check_labels(labels: Any) -> None:
    check_range("labels count", len(labels), 0, _MAX_LABELS)
    for key, value in labels.items():
        if not _LABEL_KEY.fullmatch(key):
            raise InvalidArgument(f"Invalid label key given (key={key}).")
        if not _LABEL_VALUE.fullmatch(value):
            raise InvalidArgument(f"Invalid label value given (key={key}, value={value}).")


def _check_retention(duration: Any) -> None:
    check_duration("message_retention_duration", duration)
    check_range(
        "message_retention_duration",
        seconds_of(duration),
        _SHORTEST_RETENTION_S,
        _LONGEST_RETENTION_S,
    )


def _complete_retention(subscription: Subscription) -> None:
    if not subscription.HasField("message_retention_duration"):
        subscription.message_retention_duration.seconds = _DEFAULT_RETENTION_S
    _check_retention(subscription.message_retention_duration)
    if not subscription.HasField("expiration_policy"):
        subscription.expiration_policy.ttl.seconds = _DEFAULT_TTL_S
    if subscription.expiration_policy.HasField("ttl"):
        check_duration("expiration_policy.ttl", subscription.expiration_policy.ttl)
        ttl_s = seconds_of(subscription.expiration_policy.ttl)
        check_range("expiration_policy.ttl", ttl_s, _SHORTEST_TTL_S, float("inf"))
        if ttl_s < seconds_of(subscription.message_retention_duration):
            raise InvalidArgument(
                "The value for expiration_policy.ttl must not be less than "
                f"message_retention_duration. You passed {plain_number(ttl_s)} and "
                f"{plain_number(seconds_of(subscription.message_retention_duration))} seconds."
            )


def _complete_retry_policy(subscription: Subscription) -> None:
    if not subscription.HasField("retry_policy"):
        return
    policy = subscription.retry_policy
    if not policy.HasField("minimum_backoff"):
        policy.minimum_backoff.seconds = int(DEFAULT_MINIMUM_BACKOFF_S)
    if not policy.HasField("maximum_backoff"):
        policy.maximum_backoff.seconds = int(DEFAULT_MAXIMUM_BACKOFF_S)
    check_duration("retry_policy.minimum_backoff", policy.minimum_backoff)
    check_duration("retry_policy.maximum_backoff", policy.maximum_backoff)
    minimum_s, maximum_s = seconds_of(policy.minimum_backoff), seconds_of(policy.maximum_backoff)
    check_range("retry_policy.minimum_backoff", minimum_s, 0, 600)
    check_range("retry_policy.maximum_backoff", maximum_s, 0, 600)
    if minimum_s > maximum_s:
        raise InvalidArgument(
            "The value for retry_policy.minimum_backoff must not be more than maximum_backoff. "
            f"You passed {plain_number(minimum_s)} and {plain_number(maximum_s)} seconds."
        )


def _complete_dead_letter_policy(subscription: Subscription) -> None:
    if not subscription.HasField("dead_letter_policy"):
        return
    policy = subscription.dead_letter_policy
    check_name(policy.dead_letter_topic, "topics")
    policy.max_delivery_attempts = policy.max_delivery_attempts or DEFAULT_MAX_DELIVERY_ATTEMPTS
    check_range("max_delivery_attempts", policy.max_delivery_attempts, 5, 100)
