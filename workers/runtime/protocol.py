"""Messages between the I/O process and a model process: MessagePack frames on a socket.

A frame is its length in bytes (unsigned 32-bit, little-endian), followed by one of the structs
below or in workers/models/reports.py. The model process receives RunBatch, Watch, Cancel, and
Evict. It sends Ready or Refused once, then StepDone, Previews, and BatchResult.

For a model that computes in steps, Admit adds items to a running batch, and Drop or Preempt removes
them. The process sends Chunks, ItemsProgress, ItemPreview, ItemEnded, Spare, and Preempted,
followed by StepsEnded when no items are left. An Admit and a StepsEnded may cross in transit. The
process therefore ignores an Admit for a batch that is over, and the I/O process requeues any items
that have no outcome when StepsEnded arrives.
"""

from __future__ import annotations

import socket
import struct

import msgspec

from workers.models.base import Prepared, PreparedItem
from workers.models.reports import BatchResult, Previews, Ready, StepDone, StepMessage

HEADER = struct.Struct("<I")
FRAME_MAX_BYTES = 512 * 1024 * 1024
IN_FLIGHT = 2
"""Number of batches that an overlapping model has in a process: one running while another is being
prepared.
"""
_encoder = msgspec.msgpack.Encoder()


class RunBatch(msgspec.Struct, tag="run"):
    """Run these items on model number `model`. `number` counts the batches in this process."""

    number: int
    items: list[PreparedItem]
    model: int = 0
    in_steps: bool = False
    """True if the model is a SteppedModel."""


class Cancel(msgspec.Struct, tag="cancel"):
    """Stop batch `number`, which may already be over."""

    number: int


class Admit(msgspec.Struct, tag="admit"):
    """Add items to batch `number`, which may already be over. Their slots start at `first`."""

    number: int
    first: int
    items: list[PreparedItem]


class Drop(msgspec.Struct, tag="drop"):
    """Stop these slots in batch `number`, which may already be over."""

    number: int
    slots: list[int]


class Preempt(msgspec.Struct, tag="preempt"):
    """Interrupt these slots in batch `number`, which may already be over.

    They resume later.
    """

    number: int
    slots: list[int]


class Watch(msgspec.Struct, tag="watch"):
    """A reader is watching these slots in batch `number`, which may already be over."""

    number: int
    slots: list[int]


class Evict(msgspec.Struct, tag="evict"):
    """Evict the models with these numbers. Sent between two batches."""

    models: list[int]


class Refused(msgspec.Struct, tag="refused"):
    """A model can't be loaded. `code` is defined in shared.errors."""

    code: str
    message: str
    field: str | None = None


ServerMessage = Ready | Refused | StepDone | Previews | BatchResult | StepMessage
ClientMessage = RunBatch | Cancel | Watch | Admit | Drop | Preempt | Evict

_client_message_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(
    ClientMessage
)
_server_message_decoder: msgspec.msgpack.Decoder[ServerMessage] = msgspec.msgpack.Decoder(
    ServerMessage
)


def encode_run(
    number: int, items: list[Prepared], model: int = 0, *, in_steps: bool = False
) -> bytes:
    """Returns the frame that runs a batch on model number `model`."""
    run = {"type": "run", "number": number, "items": items, "model": model, "in_steps": in_steps}
    return _frame(_encoder.encode(run))


def encode_admit(number: int, first: int, items: list[Prepared]) -> bytes:
    return _frame(
        _encoder.encode({"type": "admit", "number": number, "first": first, "items": items})
    )


def encode_preempt(number: int, slots: list[int]) -> bytes:
    return _frame(_encoder.encode(Preempt(number, slots)))


def encode_drop(number: int, slots: list[int]) -> bytes:
    """Returns the frame that stops some of a batch's items."""
    return _frame(_encoder.encode(Drop(number, slots)))


def encode_cancel(number: int) -> bytes:
    return _frame(_encoder.encode(Cancel(number)))


def encode_watch(number: int, slots: list[int]) -> bytes:
    return _frame(_encoder.encode(Watch(number, slots)))


def encode_evict(models: list[int]) -> bytes:
    return _frame(_encoder.encode(Evict(models)))


def encode_server_message(message: ServerMessage) -> bytes:
    """Returns the frame for a model process's message."""
    return _frame(_encoder.encode(message))


def _frame(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


def decode_server_message(body: bytes) -> ServerMessage:
    """Decodes the body of a frame from a model process."""
    return _server_message_decoder.decode(body)


def read_client_message(connection: socket.socket) -> ClientMessage | None:
    """Returns the next message, or None once the connection is closed. Never reads past it."""
    header = _read(connection, HEADER.size)
    if header is None:
        return None
    body = _read(connection, HEADER.unpack(header)[0])
    return None if body is None else _client_message_decoder.decode(body)


def _read(connection: socket.socket, size_bytes: int) -> bytearray | None:
    body = bytearray(size_bytes)
    view, got_bytes = memoryview(body), 0
    while got_bytes < size_bytes:
        read_bytes = connection.recv_into(view[got_bytes:])
        if not read_bytes:
            return None
        got_bytes += read_bytes
    return body
