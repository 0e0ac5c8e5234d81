"""The messages between the I/O process and the template of its model processes.

One message is one packet.

The I/O process sends a ForkRequest with two descriptors: the model process's end of its socket, and
its output pipe. The template sends one TemplateReady, one ForkResult with a pidfd for each
ForkRequest, and one ProcessEnded for each process that ended.
"""

from __future__ import annotations

import socket

import msgspec

PACKET_MAX_BYTES = 4096


class ForkRequest(msgspec.Struct, tag="fork"):
    """Fork a model process for `device`. `number` counts the forks of this template."""

    number: int
    device: str


class TemplateReady(msgspec.Struct, tag="loaded"):
    """Libraries and the weights of `models` models are loaded.

    `is_alone`: no other thread, so forks are sound.
    """

    load_s: float
    models: int
    memory_bytes: int
    is_alone: bool


class ForkResult(msgspec.Struct, tag="forked"):
    """ForkRequest `number` has process id `pid`."""

    number: int
    pid: int


class ProcessEnded(msgspec.Struct, tag="ended"):
    """Process `pid` ended. `status` is as in subprocess."""

    pid: int
    status: int


TemplateMessage = TemplateReady | ForkResult | ProcessEnded

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(ForkRequest)
_message_decoder: msgspec.msgpack.Decoder[TemplateMessage] = msgspec.msgpack.Decoder(
    TemplateMessage
)


def send(
    control: socket.socket,
    message: ForkRequest | TemplateMessage,
    descriptors: list[int] | None = None,
) -> None:
    """Sends a message with its descriptors."""
    socket.send_fds(control, [_encoder.encode(message)], descriptors or [])


def receive_request(control: socket.socket) -> tuple[ForkRequest | None, list[int]]:
    """The next request and its descriptors. None if the I/O process closed its end or died."""
    body, descriptors, _, _ = socket.recv_fds(control, PACKET_MAX_BYTES, 2)
    return (_request_decoder.decode(body) if body else None), descriptors


def receive_message(control: socket.socket) -> tuple[TemplateMessage | None, list[int]]:
    """The next message and its descriptor. None if the template died.

    Raises:
        BlockingIOError: there is no message now.
    """
    body, descriptors, _, _ = socket.recv_fds(control, PACKET_MAX_BYTES, 1)
    return (_message_decoder.decode(body) if body else None), descriptors
