"""Converts messages to AMQP properties and back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiormq import spec
from aiormq.abc import DeliveredMessage

from shared.broker.transport import ReceivedMessage
from shared.errors import BadInput

ATTRIBUTE_LIMIT, NAME_LIMIT_BYTES, VALUE_LIMIT_BYTES = 100, 128, 1024
"""Pub/Sub's limits, so that both brokers accept the same messages.

AMQP allows 128 bytes for a name, and pamqp silently truncates longer ones. This is how many
attributes fit in the single frame allotted to headers.
"""
KEY_LIMIT_BYTES = 255
_OWN = ("x-", "CC", "BCC")
"""Headers with these prefixes are used by the broker or by Penstock."""
_PUBLISHED_US, _ORDERING_KEY, _ATTEMPT = "x-published-us", "x-ordering-key", "x-attempt"
_DELIVERY_COUNT = "x-delivery-count"
_DEATHS = "x-death"
_REASON = "penstock_reason"
_EXPIRED = "no worker picked it up in time"
"""The attribute's value for a message that waited longer than its queue's retention time.

Not set for a message that used up its attempts, because the broker does not report the number of
attempts.
"""


def properties_of(
    attributes: Mapping[str, str], keys: Sequence[str], message_id: str, ordering_key: str
) -> spec.Basic.Properties:
    """Returns a new message's properties.

    Args:
        keys: all routing keys. The first attempt is the publish itself.

    Raises:
        BadInput: an attribute is too long or has a name reserved by the broker.
    """
    _check(attributes)
    headers: dict[str, Any] = {**attributes, _PUBLISHED_US: time.time_ns() // 1000}
    if len(keys) > 1:
        headers["BCC"] = list(keys[1:])
    if ordering_key:
        headers[_ORDERING_KEY] = ordering_key
    return spec.Basic.Properties(headers=headers, delivery_mode=2, message_id=message_id)


def build_returned_properties(delivered: DeliveredMessage, attempt: int) -> spec.Basic.Properties:
    """Returns the properties for a message sent to a delay queue after `attempt` attempts."""
    old = delivered.header.properties
    headers = {
        name: value
        for name, value in (old.headers or {}).items()
        if name not in (_DEATHS, _DELIVERY_COUNT) and not name.startswith("x-first-death")
    }
    headers[_ATTEMPT] = attempt
    return spec.Basic.Properties(headers=headers, delivery_mode=2, message_id=old.message_id)


def message_of(delivered: DeliveredMessage, ack_id: str, now_s: float) -> ReceivedMessage:
    """Returns the message in a delivery."""
    properties = delivered.header.properties
    headers: Mapping[str, Any] = properties.headers or {}
    attributes = {
        name: value
        for name, value in headers.items()
        if isinstance(value, str) and not name.startswith(_OWN)
    }
    attempt = 1 + _number(headers, _DELIVERY_COUNT) + _number(headers, _ATTEMPT)
    if _ATTEMPT not in headers and headers.get("x-first-death-reason") == "expired":
        attributes.setdefault(_REASON, _EXPIRED)
    return ReceivedMessage(
        delivered.body,
        attributes,
        properties.message_id or "",
        ack_id,
        publish_time_s=_number(headers, _PUBLISHED_US) * 1e-6,
        delivery_attempt=attempt,
        ordering_key=str(headers.get(_ORDERING_KEY, "")),
        received_at_s=now_s,
    )


def check_topic(topic_id: str) -> None:
    """Rejects topic IDs that AMQP can't use as a routing key.

    Raises:
        BadInput: the topic ID is too long.
    """
    if len(topic_id.encode()) > KEY_LIMIT_BYTES:
        raise BadInput(f"topic {topic_id[:64]!r}… must be at most {KEY_LIMIT_BYTES} bytes")


def _check(attributes: Mapping[str, str]) -> None:
    if len(attributes) > ATTRIBUTE_LIMIT:
        raise BadInput(
            f"a message must have at most {ATTRIBUTE_LIMIT} attributes, got {len(attributes)}"
        )
    for name, value in attributes.items():
        if not name or name.startswith(_OWN) or len(name.encode()) > NAME_LIMIT_BYTES:
            raise BadInput(f"{name[:64]!r} is not a valid attribute name")
        if len(value.encode()) > VALUE_LIMIT_BYTES:
            raise BadInput(f"attribute {name[:64]!r} must be at most {VALUE_LIMIT_BYTES} bytes")


def _number(headers: Mapping[str, Any], name: str) -> int:
    value = headers.get(name, 0)
    return value if isinstance(value, int) else 0
