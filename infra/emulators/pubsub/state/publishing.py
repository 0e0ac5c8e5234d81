"""What a Publish may carry, checked before any of it is kept.

Limits: https://cloud.google.com/pubsub/quotas#resource_limits
"""

from collections.abc import Mapping

from infra.emulators.pubsub.errors import InvalidArgument
from infra.emulators.pubsub.names import check_range
from infra.emulators.pubsub.protos import PublishRequest

MAX_REQUEST_BYTES = 10 * 1024 * 1024
MAX_MESSAGES = 1000
MAX_ATTRIBUTES = 100
MAX_KEY_BYTES = 256
MAX_VALUE_BYTES = 1024
MAX_ORDERING_KEY_BYTES = 1024


def check_publish(request: PublishRequest) -> list[dict[str, str]]:
    """Check the messages of a publish request.

    Returns:
        The attributes of each message. Who needs them later should not read them from the request
        again, which takes longer than all other checks of a message.

    Raises:
        InvalidArgument: too many, too big, an empty message, an attribute out of bounds, or several
            ordering keys.
    """
    messages = request.messages
    check_range("message_count", len(messages), 1, MAX_MESSAGES)
    size_bytes: int = request.ByteSize()
    if size_bytes > MAX_REQUEST_BYTES:
        raise InvalidArgument(
            f"Request payload size exceeds the limit: {MAX_REQUEST_BYTES} bytes. You passed "
            f"{size_bytes} bytes."
        )
    attributes = []
    ordering_key = messages[0].ordering_key
    check_range("ordering_key size in bytes", len(ordering_key.encode()), 0, MAX_ORDERING_KEY_BYTES)
    for message in messages:
        if message.ordering_key != ordering_key:
            raise InvalidArgument(
                "In a publish request, all messages must have no ordering key or they must all "
                "have the same ordering key."
            )
        of_message = dict(message.attributes)
        if of_message:
            _check_attributes(of_message)
        elif not message.data:
            raise InvalidArgument(
                "Some messages in the publish request are empty. Each message must contain either "
                "non-empty data, or at least one attribute. See "
                "https://cloud.google.com/pubsub/quotas for more information about message limits."
            )
        attributes.append(of_message)
    return attributes


def _check_attributes(attributes: Mapping[str, str]) -> None:
    check_range("attribute_count", len(attributes), 0, MAX_ATTRIBUTES)
    for key, value in attributes.items():
        # In ASCII a character is a byte; only longer texts are worth encoding to count.
        if len(key) * 4 > MAX_KEY_BYTES or not key:
            check_range("attribute key size in bytes", len(key.encode()), 1, MAX_KEY_BYTES)
        if len(value) * 4 > MAX_VALUE_BYTES:
            check_range("attribute value size in bytes", len(value.encode()), 0, MAX_VALUE_BYTES)
        if key.startswith("goog") and not key.startswith("googclient_"):
            raise InvalidArgument(f"Attribute keys must not begin with 'goog' (key={key}).")
