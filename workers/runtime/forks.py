"""The messages between the I/O process and the template of its model processes. One message is one packet.

The I/O process sends Fork with two descriptors: the model process's end of its socket, and the one it prints to. The
template sends Loaded once, Forked with a pidfd for each Fork, and Ended for each process that ended.
"""

from __future__ import annotations

import socket

import msgspec

PACKET_MAX_BYTES = 4096


class Fork(msgspec.Struct, tag="fork"):
    """Fork a model process for `device`; `number` counts the forks of this template."""

    number: int
    device: str


class Loaded(msgspec.Struct, tag="loaded"):
    """Libraries, and the weights of `models` models, are loaded. `is_alone`: without a thread, so forks are sound."""

    load_s: float
    models: int
    memory_bytes: int
    is_alone: bool


class Forked(msgspec.Struct, tag="forked"):
    """Fork `number` has process id `pid`."""

    number: int
    pid: int


class Ended(msgspec.Struct, tag="ended"):
    """Process `pid` is gone; `status` as subprocess gives it."""

    pid: int
    status: int


Answer = Loaded | Forked | Ended

_encoder = msgspec.msgpack.Encoder()
_order_decoder = msgspec.msgpack.Decoder(Fork)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def send(control: socket.socket, message: Fork | Answer, descriptors: list[int] | None = None) -> None:
    """Sends a message with what goes with it."""
    socket.send_fds(control, [_encoder.encode(message)], descriptors or [])


def receive_order(control: socket.socket) -> tuple[Fork | None, list[int]]:
    """The next order and its descriptors; None where the I/O process has closed its end or is gone."""
    body, descriptors, _, _ = socket.recv_fds(control, PACKET_MAX_BYTES, 2)
    return (_order_decoder.decode(body) if body else None), descriptors


def receive_answer(control: socket.socket) -> tuple[Answer | None, list[int]]:
    """The next answer and its descriptor; None where the template is gone.

    Raises:
        BlockingIOError: there is none now.
    """
    body, descriptors, _, _ = socket.recv_fds(control, PACKET_MAX_BYTES, 1)
    return (_answer_decoder.decode(body) if body else None), descriptors
