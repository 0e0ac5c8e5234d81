"""Assembles a response's messages from bytes that already exist.

Each response gets a copy of the bytes that were serialized when the message was published. Building
the message as a protobuf and serializing it again takes twice as long.

Format: https://protobuf.dev/programming-guides/encoding/
"""

from pubsub_emulator.state.consumers import Delivery

# A tag is the field number times 8, plus 2 for bytes or 0 for a number. `received_messages` is
# field 1 of both PullResponse and StreamingPullResponse.
_RECEIVED_MESSAGE = b"\x0a"
_ACK_ID = b"\x0a"
_MESSAGE = b"\x12"
_DELIVERY_ATTEMPT = b"\x18"


def received_message(delivery: Delivery, ack_id: str, delivery_attempt: int) -> bytes:
    """Serialize an entry in a response's `received_messages`.

    Args:
        delivery_attempt: the attempt's number, or 0 if the subscription does not report it.
    """
    id_bytes, message = ack_id.encode(), delivery.message.serialized
    received = b"".join(
        (_ACK_ID, _varint(len(id_bytes)), id_bytes, _MESSAGE, _varint(len(message)), message)
    )
    if delivery_attempt:
        received += _DELIVERY_ATTEMPT + _varint(delivery_attempt)
    return b"".join((_RECEIVED_MESSAGE, _varint(len(received)), received))


def _varint(number: int) -> bytes:
    """Encode seven bits per byte, lowest bits first; the eighth bit is set if more bytes follow."""
    if number < 0x80:
        return _ONE_BYTE[number]
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_ONE_BYTE = [bytes((number,)) for number in range(0x80)]
