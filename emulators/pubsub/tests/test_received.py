"""A delivery assembled from bytes is identical to protobuf's own output."""

import pytest

from pubsub_emulator.protos import PubsubMessage, PullResponse, message_class
from pubsub_emulator.state.consumers import Delivery
from pubsub_emulator.state.message import Storage, StoredMessage
from pubsub_emulator.state.received import received_message


def delivery_of(proto: PubsubMessage) -> Delivery:
    storage = Storage(2**40, lambda sequence: None)
    return Delivery(7, StoredMessage(proto, dict(proto.attributes), 7, 1.0, storage))


# Sizes on both sides of the boundaries between one-, two-, three- and four-byte lengths.
@pytest.mark.parametrize("size_bytes", [1, 100, 124, 125, 126, 127, 128, 16_379, 16_380, 16_384])
@pytest.mark.parametrize("delivery_attempt", [0, 1, 127, 128, 2**31 - 1])
@pytest.mark.parametrize("ack_id", ["a.1.1", "é" * 64, "x" * 20_000])
def test_response_is_what_protobuf_writes(
    size_bytes: int, delivery_attempt: int, ack_id: str
) -> None:
    message = PubsubMessage(data=b"x" * size_bytes)
    expected = PullResponse()
    for _ in range(2):
        received = expected.received_messages.add(ack_id=ack_id, delivery_attempt=delivery_attempt)
        received.message.CopyFrom(message)
    serialized = received_message(delivery_of(message), ack_id, delivery_attempt)
    assert serialized * 2 == expected.SerializeToString()


@pytest.mark.parametrize("size_bytes", [2**21 - 5, 2**21, 10_000_000])
def test_large_message_with_everything_comes_whole(size_bytes: int) -> None:
    message = PubsubMessage(
        data=b"x" * size_bytes,
        attributes={"a": "é", "b": ""},
        message_id="12",
        ordering_key="key",
        publish_time={"seconds": 5, "nanos": 6},
    )
    response_class = message_class("StreamingPullResponse")
    (received,) = response_class.FromString(
        received_message(delivery_of(message), "id", 3)
    ).received_messages
    assert (received.message, received.ack_id, received.delivery_attempt) == (message, "id", 3)
