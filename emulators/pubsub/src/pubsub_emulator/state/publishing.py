"""Limits on a Publish request, checked before any of it is stored.

Limits: https://cloud.google.com/pubsub/quotas#resource_limits
"""

from collections.abc import Mapping
from typing import NamedTuple

from pubsub_emulator.errors import InvalidArgument
from pubsub_emulator.names import check_range
from pubsub_emulator.protos import PublishRequest

MAX_REQUEST_BYTES = 10 * 1024 * 1024
MAX_MESSAGES = 1000
MAX_ATTRIBUTES = 100
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 1024
MAX_ORDERING_KEY_BYTES = 1024
# A character has at most four bytes, so sufficiently short strings can be checked without encoding
# them.
_SHORT_KEY = MAX_KEY_BYTES // 4
_SHORT_VALUE = MAX_VALUE_BYTES // 4


class Measured(NamedTuple):
    """Data that a check has read from a request.

    Reading it again would take as long as all the checks combined.
    """

    size_bytes: int
    attributes: list[dict[str, str]]
    """Each message's attributes, in order."""


def measured(request: PublishRequest) -> Measured:
    """Read a publish request's size and attributes."""
    return Measured(request.ByteSize(), [dict(message.attributes) for message in request.messages])


def check_publish(request: PublishRequest) -> Measured:
    """Check a publish request's messages. Returns the data read from them.

    Raises:
        InvalidArgument: there are too many messages, or they are too large, are empty, have an
            invalid attribute, or have different ordering keys.
    """
    messages = request.messages
    check_range("message_count", len(messages), 1, MAX_MESSAGES)
    read = measured(request)
    size_bytes = read.size_bytes
    if size_bytes > MAX_REQUEST_BYTES:
        raise InvalidArgument(
            f"Request payload size exceeds the limit: {MAX_REQUEST_BYTES} bytes. You passed "
            f"{size_bytes} bytes."
        )
    ordering_key = messages[0].ordering_key
    check_range("ordering_key size in bytes", len(ordering_key.encode()), 0, MAX_ORDERING_KEY_BYTES)
    for message, attributes in zip(messages, read.attributes, strict=True):
        if message.ordering_key != ordering_key:
            raise InvalidArgument(
                "In a publish request, all messages must have no ordering key or they must all "
                "have the same ordering key."
            )
        if attributes:
            _check_attributes(attributes)
        elif not message.data:
            raise InvalidArgument(
                "Some messages in the publish request are empty. Each message must contain either "
                "non-empty data, or at least one attribute. See "
                "https://cloud.google.com/pubsub/quotas for more information about message limits."
            )
    return read


def _check_attributes(attributes: Mapping[str, str]) -> None:
    check_range("attribute_count", len(attributes), 0, MAX_ATTRIBUTES)
    for key, value in attributes.items():
        if len(key) > _SHORT_KEY or not key:
            check_range("attribute key size in bytes", len(key.encode()), 1, MAX_KEY_BYTES)
        if len(value) > _SHORT_VALUE:
            check_range("attribute value size in bytes", len(value.encode()), 0, MAX_VALUE_BYTES)
        if key[:4] == "goog" and not key.startswith("googclient_"):
            raise InvalidArgument(f"Attribute keys must not begin with 'goog' (key={key}).")
