"""`python -m api.inputs.codec_server`: runs codec commands on images for the API.

It handles one image at a time, over a socket. A thread is not enough: decoding can't be stopped in
a thread, holds the interpreter for up to a third of a second (alpha_composite, WebP), and may take
any amount of memory. This process can be killed at a deadline, has a lower priority than the event
loop, gets limits on memory and CPU time from the kernel, and has none of the API's settings or
secrets. It imports only Pillow and msgspec, so it starts within a tenth of a second.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
import socket
import sys
import time

from api.inputs.codec_commands import run_command
from api.inputs.codec_protocol import (
    LENGTHS,
    CodecReply,
    CodecRequest,
    HeaderRead,
    Proceed,
    decode_request,
    frame_header,
)

NICENESS = 10
"""The API's event loop goes first. Under contention this process still gets a tenth of a core."""
CPU_LIMIT_S = 20
"""For one image. 25 megapixels take 1 s, but a JPEG may have thousands of scans over all pixels."""
ADDRESS_SPACE_BYTES = 1024 * 1024 * 1024
"""The largest image takes 400 MB."""


def main() -> int:
    """Serves the socket whose file descriptor is the argument, until the API closes it."""
    # The API handles signals to the process group (Ctrl-C, SIGTERM): it drains, then closes the
    # socket.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    with contextlib.suppress(ValueError, OSError):  # not on every system
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    with (
        socket.socket(fileno=int(sys.argv[1])) as connection,
        contextlib.suppress(ConnectionError),  # the API closed the socket
    ):
        while True:
            _serve_one(connection)
    return 0


def _serve_one(connection: socket.socket) -> None:
    def reserve(cost_bytes: int) -> None:
        _send(connection, HeaderRead(cost_bytes))
        if not isinstance(_read(connection)[0], Proceed):
            raise RuntimeError("only Proceed follows HeaderRead; this is a bug")

    command, data = _read(connection)
    if isinstance(command, Proceed):
        raise RuntimeError("Proceed follows HeaderRead only; this is a bug")
    _bound_cpu_time()
    _send(connection, *run_command(command, data, reserve))


def _bound_cpu_time() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + CPU_LIMIT_S, hard))


def _read(connection: socket.socket) -> tuple[CodecRequest, bytes]:
    frame_bytes, data_bytes = LENGTHS.unpack(_exactly(connection, LENGTHS.size))
    return decode_request(_exactly(connection, frame_bytes)), _exactly(connection, data_bytes)


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Reads exactly `size` bytes. If the API closes the socket, the process ends."""
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        count = connection.recv_into(rest)
        if not count:
            raise ConnectionError("the API closed the socket")
        rest = rest[count:]
    return bytes(data)


def _send(connection: socket.socket, reply: CodecReply, data: bytes = b"") -> None:
    connection.sendall(frame_header(reply, len(data)))
    connection.sendall(data)


if __name__ == "__main__":
    sys.exit(main())
