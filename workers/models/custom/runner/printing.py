"""Marks a class's printed output with the number of the prediction that printed it.

Several predictions of an asynchronous class share one process and one output pipe. `sys.stdout` and
`sys.stderr` therefore write records to that pipe: the process's mark, the prediction number, a
length, and the bytes. As in Cog, the number is stored in a context variable, which is inherited by
tasks and by threads that run in a copied context (`asyncio.to_thread`). Output from subprocesses, C
code, and other threads has no mark.

A record fits into PIPE_BUF, so the kernel never mixes two records.
"""

from __future__ import annotations

import contextvars
import io
import os
import select
import struct
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from collections.abc import Callable

MARK_BYTES = 16
MARK_BEGIN = b"\xff"
"""A byte that never occurs in UTF-8 text, so the end of a text never looks like the start of a
mark.
"""
HEADER = struct.Struct("<QH")
"""The prediction number, and the length of the following data in bytes."""
NOBODY = 0
"""The number used outside any prediction."""
MAX_DATA_BYTES = select.PIPE_BUF - MARK_BYTES - HEADER.size

_number: contextvars.ContextVar[int | None] = contextvars.ContextVar("number", default=None)


def mark_with(number: int) -> None:
    """Marks everything this context prints from now on."""
    _number.set(number)


class MarkedStream(io.BufferedIOBase):
    """The binary part of a standard stream in `sys`.

    Args:
        name: the file name, which libraries may read.
        descriptor: file descriptor for unmarked output.
    """

    def __init__(self, name: str, descriptor: int, pipe: int, mark: bytes) -> None:
        self.name = name
        self._descriptor = descriptor
        self._pipe = pipe
        self._mark = mark
        self._pid = os.getpid()

    def writable(self) -> bool:
        """Returns True, because `io.TextIOWrapper` checks for it."""
        return True

    def fileno(self) -> int:
        """Returns descriptor 1 or 2, for libraries that write to it directly."""
        return self._descriptor

    def write(self, data: Any, /) -> int:
        """Writes bytes at once.

        A forked child may outlive the prediction, so its output is not marked.
        """
        number, written = _number.get(), bytes(data)
        if number is None or os.getpid() != self._pid:
            _write_all(self._descriptor, written)
            return len(written)
        for begin in range(0, len(written), MAX_DATA_BYTES):
            part = written[begin : begin + MAX_DATA_BYTES]
            os.write(self._pipe, self._mark + HEADER.pack(number, len(part)) + part)
        return len(written)


class MarkedText(io.TextIOWrapper):
    """A standard stream in `sys`.

    It is unbuffered, because a buffer would mix several predictions' output.
    """

    def write(self, text: str, /) -> int:
        """Writes text immediately, in UTF-8."""
        self.buffer.write(text.encode(errors="backslashreplace"))
        return len(text)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def make_mark() -> bytes:
    """Returns a random mark: MARK_BYTES bytes that a class won't print by accident."""
    return MARK_BEGIN + os.urandom(MARK_BYTES - len(MARK_BEGIN))


def install() -> str:
    """Replaces the streams in `sys`. Returns the mark as hexadecimal digits.

    Call it before importing the class, because `logging` handlers keep whichever stream they find.
    """
    mark = make_mark()
    pipe = os.dup(1)  # a class may point descriptor 1 elsewhere
    # Libraries restore a stream from `sys.__stdout__`.
    sys.stdout = sys.__stdout__ = _open("<stdout>", 1, pipe, mark)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open("<stderr>", 2, pipe, mark)  # type: ignore[misc]
    sys.unraisablehook = lambda error: _run_unattributed(sys.__unraisablehook__, error)
    return mark.hex()


def _open(name: str, descriptor: int, pipe: int, mark: bytes) -> MarkedText:
    stream: Any = MarkedStream(name, descriptor, pipe, mark)
    return MarkedText(stream, encoding="utf-8", errors="backslashreplace")


def log_apart(loop: AbstractEventLoop) -> None:
    """Keeps errors from abandoned tasks out of all logs, because any prediction may cause them.

    `install` does the same with errors from destructors.
    """
    loop.set_exception_handler(
        lambda loop, facts: _run_unattributed(loop.default_exception_handler, facts)
    )


def _run_unattributed(function: Callable[[Any], object], argument: Any) -> None:
    context = contextvars.Context()
    context.run(mark_with, NOBODY)
    context.run(function, argument)


def split_records(data: bytes, mark: bytes) -> tuple[list[tuple[int | None, bytes]], bytes]:
    """Splits output into parts by prediction.

    Args:
        data: bytes read from the pipe.

    Returns:
        The parts in order, each with the number of its prediction, or None if it has no mark. An
        incomplete record at the end, if there is one, comes last.
    """
    parts: list[tuple[int | None, bytes]] = []
    begin = 0
    while (at := data.find(mark, begin)) >= 0:
        if at > begin:
            parts.append((None, data[begin:at]))
        body = at + MARK_BYTES + HEADER.size
        if body > len(data):
            return parts, data[at:]
        number, length = HEADER.unpack_from(data, at + MARK_BYTES)
        if body + length > len(data):
            return parts, data[at:]
        begin = body + length
        parts.append((number, data[body:begin]))
    end = max(begin, len(data) - MARK_BYTES + 1)
    while not mark.startswith(data[end:]):
        end += 1
    if end > begin:
        parts.append((None, data[begin:end]))
    return parts, data[end:]
