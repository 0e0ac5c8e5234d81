"""A push body: the JSON envelope, or the raw data with metadata in headers.

Formats: https://cloud.google.com/pubsub/docs/push and
    https://cloud.google.com/pubsub/docs/payload-unwrapping
"""

import base64
import json
import re
from typing import Any

from pubsub_emulator.state.consumers import Delivery
from pubsub_emulator.state.subscription import SubscriptionState

_USER_AGENT = ("User-Agent", "CloudPubSub-Google")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\x20-\x7e\t]*[\x21-\x7e])?)?")
_OWN_HEADERS = frozenset(
    {"host", "content-length", "transfer-encoding", "connection", "user-agent"}
)


def push_payload(
    subscription: SubscriptionState, delivery: Delivery
) -> tuple[list[tuple[str, str]], bytes]:
    """Return the headers and body to POST for a delivery, per its push configuration."""
    push_config = subscription.proto.push_config
    if push_config.WhichOneof("wrapper") != "no_wrapper":
        return [_USER_AGENT, ("Content-Type", "application/json")], _envelope(
            subscription, delivery
        )
    headers = [_USER_AGENT]
    if push_config.no_wrapper.write_metadata:
        headers += _metadata(subscription, delivery)
    if not any(name.lower() == "content-type" for name, _ in headers):
        headers.append(("Content-Type", "application/octet-stream"))
    return headers, delivery.message.proto.data


def _envelope(subscription: SubscriptionState, delivery: Delivery) -> bytes:
    proto = delivery.message.proto
    published = proto.publish_time.ToJsonString()
    # The service's envelope spells the id and time two ways; receivers may read either.
    message: dict[str, Any] = {
        "messageId": proto.message_id,
        "message_id": proto.message_id,
        "publishTime": published,
        "publish_time": published,
    }
    if proto.data:
        message["data"] = base64.b64encode(proto.data).decode()
    if delivery.message.attributes:
        message["attributes"] = delivery.message.attributes
    if proto.ordering_key:
        message["orderingKey"] = proto.ordering_key
    envelope: dict[str, Any] = {"message": message, "subscription": subscription.path}
    if subscription.settings.max_delivery_attempts:
        envelope["deliveryAttempt"] = delivery.attempts
    return json.dumps(envelope).encode()


def _metadata(subscription: SubscriptionState, delivery: Delivery) -> list[tuple[str, str]]:
    proto = delivery.message.proto
    headers = [
        ("x-goog-pubsub-subscription-name", subscription.path),
        ("x-goog-pubsub-message-id", proto.message_id),
        ("x-goog-pubsub-publish-time", proto.publish_time.ToJsonString()),
    ]
    if proto.ordering_key:
        headers.append(("x-goog-pubsub-ordering-key", proto.ordering_key))
    headers += delivery.message.attributes.items()
    return [
        (name, value)
        for name, value in headers
        if _HEADER_NAME.fullmatch(name)
        and _HEADER_VALUE.fullmatch(value)
        and name.lower() not in _OWN_HEADERS
    ]
