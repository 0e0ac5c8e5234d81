"""Messages between a worker and a class's runner: JSON followed by bytes.

A frame consists of the JSON's length in bytes (unsigned 32-bit, little-endian), the JSON, and the
bytes of its blobs, one after another. `blobs` in the JSON contains the blobs' lengths.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

HEADER = struct.Struct("<I")
MAX_JSON_BYTES = 40 * 1024 * 1024
"""Enough for two maximum-size outputs in one frame, for a process that compares outputs."""
MAX_ANSWER_JSON_BYTES = 8 * 1024 * 1024
"""Maximum JSON size of one frame from a process. Larger outputs are blobs."""
MAX_INLINE_BYTES = 1024 * 1024
"""Maximum JSON size of an output within its frame. A larger output is a blob that workers don't
parse.
"""
MAX_OUTPUT_BYTES = 16 * 1024 * 1024
"""Maximum size of an output as JSON, without its files. A large output is stored as a file."""
MAX_BLOBS_BYTES = 256 * 1024 * 1024
MAX_BLOBS = 16_384
"""More than the number of files in two maximum-size outputs, or in any single input."""
BATCH = -1
"""The number that a cancellation uses for a whole batch."""


class Frame(NamedTuple):
    """One message with its blobs."""

    message: dict[str, Any]
    blobs: list[bytes]


def encode_frame(message: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Returns a message's bytes.

    Raises:
        ValueError: the message is too large, or contains NaN, an infinite number, or an unpaired
            surrogate, which JSON in UTF-8 can't represent.
    """
    whole = message | {"blobs": [len(blob) for blob in blobs]}
    encoded = encode_json(whole)
    if len(encoded) > MAX_JSON_BYTES:
        raise ValueError(f"message of {len(encoded)} bytes exceeds the maximum of {MAX_JSON_BYTES}")
    return b"".join((HEADER.pack(len(encoded)), encoded, *blobs))


def encode_json(value: Any) -> bytes:
    """Encodes JSON in UTF-8.

    Raises:
        ValueError: the value contains NaN, an infinite number, or an unpaired surrogate.
    """
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


class FrameReader:
    """Assembles frames from the data received from a socket."""

    def __init__(self, max_json_bytes: int = MAX_JSON_BYTES) -> None:
        self._max_json_bytes = max_json_bytes
        self._data = bytearray()
        self._begun: tuple[dict[str, Any], list[int]] | None = None
        """The message whose blobs have not all arrived, and the blobs' lengths."""

    def feed(self, piece: bytes) -> None:
        self._data += piece

    def next(self) -> Frame | None:
        """Returns the next complete frame, or None.

        Raises:
            ValueError: the received data is not a frame, or exceeds the limits.
        """
        if self._begun is None:
            self._begun = self._read_message()
        if self._begun is None:
            return None
        message, lengths = self._begun
        if len(self._data) < sum(lengths):
            return None
        blobs, begin = [], 0
        for length in lengths:
            blobs.append(bytes(self._data[begin : begin + length]))
            begin += length
        del self._data[:begin]
        self._begun = None
        return Frame(message, blobs)

    def _read_message(self) -> tuple[dict[str, Any], list[int]] | None:
        """Reads the next frame's JSON, if it is complete. Raises the same errors as `next`."""
        if len(self._data) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._data)
        if length > self._max_json_bytes:
            raise ValueError(f"invalid message length: {length} bytes")
        begin = HEADER.size + length
        if len(self._data) < begin:
            return None
        written = bytes(self._data[HEADER.size : begin])
        del self._data[:begin]
        try:
            message = json.loads(written)
            # `encode_frame` never writes lone surrogates, but other writers may.
            if b"\\u" in written:
                json.dumps(message, ensure_ascii=False).encode()
        except RecursionError:
            raise ValueError("the message is nested too deeply") from None
        lengths = message.pop("blobs", None) if isinstance(message, dict) else None
        if not isinstance(lengths, list) or not all(_is_length(length) for length in lengths):
            raise ValueError("the message does not specify the lengths of its blobs")
        if len(lengths) > MAX_BLOBS or sum(lengths) > MAX_BLOBS_BYTES:
            raise ValueError(
                f"invalid blobs: {len(lengths)} blobs of {sum(lengths)} bytes in total"
            )
        return message, lengths


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_frame(connection: socket.socket, reader: FrameReader) -> Frame | None:
    """Waits for the next frame. Returns None once the connection is closed, even within a frame.

    Raises:
        ValueError: the frame is invalid.
    """
    while (frame := reader.next()) is None:
        piece = connection.recv(1 << 20)
        if not piece:
            return None
        reader.feed(piece)
    return frame
