"""Splits a stream of bytes into the lines of a JSONL file (https://jsonlines.org)."""

from __future__ import annotations

from typing import NamedTuple

LONGEST_LINE_BYTES = 4 * 1024 * 1024
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BESIDE_BYTES = len(BYTE_ORDER_MARK) + 1
"""A mark and a CR, which are not part of the data."""


class Line(NamedTuple):
    """A line that is not blank."""

    number: int
    """Its number in the file, from 1. Blank lines count."""
    offset: int
    """Where it begins in the file, in bytes."""
    data: bytes | None
    """Without its end. None: it is too long."""


class LineSplitter:
    """Splits pieces of a file, cut anywhere, into lines. Pure: no I/O.

    A line ends with LF or CRLF, the last one also with the file. Blank lines are left out, as is a
    byte order mark at the start of the file. No more than one line is held.

    Args:
        longest_bytes: the data of longer lines is dropped.
        number: of the first line.
        offset: where the first line begins in the file.
    """

    def __init__(
        self, longest_bytes: int = LONGEST_LINE_BYTES, *, number: int = 1, offset: int = 0
    ) -> None:
        self._longest_bytes = longest_bytes
        self._number = number
        self._start = offset
        self._held = bytearray()
        self._dropped = 0
        """Bytes of the current line that were dropped, as it is too long."""

    def feed(self, data: bytes) -> list[Line]:
        """Takes the next piece. Returns the lines that it completes."""
        lines: list[Line] = []
        at = 0
        while (end := data.find(b"\n", at)) >= 0:
            self._hold(data[at:end])
            self._end_line(lines, 1)
            at = end + 1
        self._hold(data[at:])
        return lines

    def finish(self) -> list[Line]:
        """Ends the file. Returns its last line, if it did not end with a line feed."""
        lines: list[Line] = []
        self._end_line(lines, 0)
        return lines

    def _hold(self, data: bytes) -> None:
        if self._dropped or len(self._held) + len(data) > self._longest_bytes + _BESIDE_BYTES:
            self._dropped += len(self._held) + len(data)
            self._held.clear()
        else:
            self._held += data

    def _end_line(self, lines: list[Line], end_bytes: int) -> None:
        size_bytes = self._dropped + len(self._held)
        data: bytes | None = None if self._dropped else bytes(self._held).removesuffix(b"\r")
        if data is not None and self._start == 0:
            data = data.removeprefix(BYTE_ORDER_MARK)
        if data is not None and len(data) > self._longest_bytes:
            data = None
        if data is None or data.strip(b" \t\r"):
            lines.append(Line(self._number, self._start, data))
        self._number += 1
        self._start += size_bytes + end_bytes
        self._held.clear()
        self._dropped = 0
