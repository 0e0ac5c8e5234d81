"""Output printed by a class's process: read in a thread, and stored, shown, or passed on."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import sys
import threading
import time
from collections.abc import Callable, Sequence

from shared.messages import PrintedLogs
from workers.models.custom.runner.printing import split_records

MAX_LOG_CHARS = 32 * 1024
"""Maximum number of characters kept from a prediction's output. Only the end is kept."""
MAX_READ_BYTES = 256 * 1024
"""Maximum bytes per read. A pipe holds 64 KiB, so only nonstop output exceeds this."""
READ_BYTES_PER_S, MAX_BURST_BYTES = 8 * 1024 * 1024, 16 * 1024 * 1024
"""Average rate and burst size at which output is read.

A class that prints faster has to wait, but doesn't delay others.
"""
PAUSE_S = 0.002
"""Pause between two reads. Otherwise, a class that prints short lines would cause one read per
line.
"""
MIN_PART_BYTES = 128
"""A marked part shorter than this counts as this many bytes, to account for its processing time."""
MIN_HIDDEN_CHARS = 6
"""Shorter secrets are not hidden in a class's output, because they may be parts of other words."""
HIDDEN = "[secret]"
SHOWN_CHARS_PER_S, MAX_SHOWN_CHARS = 16 * 1024, 64 * 1024
"""Average rate and burst size, in characters, of `setup` output in the operator's log."""


class PrintedOutput:
    """A process's output, by prediction.

    A thread reads it, so the process never waits for a reader.

    The process marks each prediction's output (workers/models/custom/runner/printing.py). Unmarked
    output is attributed to the only running prediction, or to none.

    Args:
        shows: receives the text as it arrives, until `end_showing`. If None, the text isn't shown.
        hidden: values that are replaced throughout the output.
    """

    def __init__(
        self,
        fd: int,
        shows: Callable[[str], None] | None = None,
        hidden: HiddenValues | None = None,
    ) -> None:
        self._fd = fd
        self._hidden = hidden or HiddenValues([])
        self._unowned = KeptText(self._hidden, shows)
        self._logs: dict[int, KeptText] = {}
        self._sole_log = self._unowned
        """Receives unmarked output."""
        self._mark = b""
        self._rest = b""
        """The start of a record whose end has not been read yet."""
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        os.set_blocking(fd, False)
        self._thread = threading.Thread(target=self._read_on, daemon=True, name="printed")
        self._thread.start()

    def set_mark(self, mark: bytes) -> None:
        """Sets the process's mark.

        Until the record's end is read, none of its output counts as marked.
        """
        with self._lock:
            self._mark = mark

    def open_log(self, number: int, *, is_alone: bool) -> None:
        """Starts keeping a prediction's output until it is taken.

        Args:
            is_alone: True if no other prediction is running. Unmarked output is then attributed to
                this prediction until another log is opened.
        """
        self._drain()
        with self._lock:
            log = self._logs[number] = KeptText(self._hidden)
            self._sole_log = log if is_alone else self._unowned

    def look(self) -> dict[int, PrintedLogs]:
        """Returns the output so far for each prediction with an open log."""
        with self._lock:
            return {number: log.look() for number, log in self._logs.items()}

    def take_log(self, number: int) -> PrintedLogs:
        """Returns a finished prediction's output.

        Anything it prints later is not attributed to any prediction.
        """
        self._drain()
        with self._lock:
            log = self._logs.pop(number, None)
            if log is None:
                return PrintedLogs()
            if log is self._sole_log:
                self._sole_log = self._unowned
            return log.take()

    def take(self) -> PrintedLogs:
        """Returns the output since the last call, except output of predictions with an open log."""
        self._drain()
        with self._lock:
            return self._unowned.take()

    def take_cleared(self) -> PrintedLogs:
        """Same as `take`, but an ending that may begin a secret is left for the next call."""
        self._drain()
        with self._lock:
            return self._unowned.take_cleared()

    def end_showing(self) -> None:
        """Shows and discards the output so far, because it belongs to no prediction.

        Later output is only kept. If nothing shows the output, this has no effect.
        """
        if self._unowned.shows is not None:
            self.take()
            with self._lock:
                self._unowned.shows = None

    def close(self) -> None:
        """Closes the pipe once the process has exited. Data already read can still be taken."""
        self._drain()
        self._is_over.set()
        self._thread.join(timeout=1.0)
        with self._lock, contextlib.suppress(OSError):
            os.close(self._fd)
            self._fd = -1

    def _read_on(self) -> None:
        room_bytes, looked_s = float(MAX_BURST_BYTES), time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self._fd, selectors.EVENT_READ)
            while not self._is_over.is_set():
                selector.select()
                read_bytes, may_come = self._drain()
                if not may_come:
                    return
                now_s = time.monotonic()
                gained = (now_s - looked_s) * READ_BYTES_PER_S
                room_bytes = min(MAX_BURST_BYTES, room_bytes + gained) - read_bytes
                looked_s = now_s
                # A pause lets writes accumulate, because each read takes time.
                self._is_over.wait(max(PAUSE_S, -room_bytes / READ_BYTES_PER_S))

    def _drain(self) -> tuple[int, bool]:
        """Reads the available data. Returns how many bytes were read, and whether more may come."""
        read_bytes = 0
        with self._lock:
            while read_bytes < MAX_READ_BYTES:
                try:
                    piece = os.read(self._fd, 1 << 16)
                except BlockingIOError:
                    break
                except OSError:
                    piece = b""
                if not piece:
                    self._sole_log.add(self._rest)
                    self._rest = b""
                    return read_bytes, False
                read_bytes += max(len(piece), MIN_PART_BYTES * self._keep(piece))
        return read_bytes, True

    def _keep(self, piece: bytes) -> int:
        """Passes each part to the log it belongs to. Returns the number of parts."""
        parts: list[tuple[int | None, bytes]] = [(None, piece)]
        if self._mark:
            parts, self._rest = split_records(self._rest + piece, self._mark)
        by_log: dict[KeptText, list[bytes]] = {}
        for number, data in parts:
            log = self._sole_log if number is None else self._logs.get(number, self._unowned)
            by_log.setdefault(log, []).append(data)
        for log, pieces in by_log.items():
            log.add(b"".join(pieces))
        return len(parts)


class KeptText:
    """The last MAX_LOG_CHARS characters of growing text, with secrets removed.

    Args:
        hidden: values that are replaced throughout the text.
        shows: receives the text as it arrives. If None, the text isn't shown.
    """

    def __init__(self, hidden: HiddenValues, shows: Callable[[str], None] | None = None) -> None:
        self.shows = shows
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        """The end of the received output, which may be the start of a secret."""
        self._kept = ""
        self._left_out = 0

    def add(self, data: bytes) -> None:
        """Appends UTF-8 text, which may end in the middle of a character."""
        text, self._held = self._hidden.split(self._held + self._decoder.decode(data))
        self._keep(self._hidden.clear(text))

    def look(self) -> PrintedLogs:
        """Returns the text since the last call to `take`."""
        return PrintedLogs(self._kept, self._left_out)

    def take(self) -> PrintedLogs:
        """Returns the text since the last call, including any ending that may begin a secret."""
        held, self._held = self._held, ""
        self._keep(self._hidden.clear(held))
        return self.take_cleared()

    def take_cleared(self) -> PrintedLogs:
        """Returns the text since the last call, without any ending that may begin a secret."""
        logs = self.look()
        self._kept, self._left_out = "", 0
        return logs

    def _keep(self, text: str) -> None:
        if self.shows is not None:
            self.shows(text)
        self._kept += text
        if (extra := len(self._kept) - MAX_LOG_CHARS) > 0:
            self._left_out += extra
            self._kept = self._kept[extra:]


class HiddenValues:
    """Replaces the values of secrets in a class's output and exceptions."""

    def __init__(self, values: Sequence[str]) -> None:
        # Longest first, because one value may be a substring of another.
        long = {value for value in values if len(value) >= MIN_HIDDEN_CHARS}
        self._values = sorted(long, key=len, reverse=True)

    def clear(self, text: str) -> str:
        """Returns the text without the hidden values."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return text

    def split(self, text: str) -> tuple[str, str]:
        """Splits off an ending that may begin a value, plus any value that extends into it."""
        at = len(text) - max((_overlap(text, value) for value in self._values), default=0)
        while (begin := self._begin_across(text, at)) < at:
            at = begin
        return text[:at], text[at:]

    def _begin_across(self, text: str, at: int) -> int:
        """Returns the start index of the first value that spans an index, or the index itself."""
        begins = (
            text.find(value, max(0, at - len(value) + 1), at + len(value) - 1)
            for value in self._values
        )
        return min((begin for begin in begins if begin >= 0), default=at)


def _overlap(text: str, value: str) -> int:
    """Returns the length of the longest suffix of `text` that is a prefix of `value`."""
    at = text.find(value[0], max(0, len(text) - len(value) + 1))
    while at >= 0:
        if value.startswith(text[at:]):
            return len(text) - at
        at = text.find(value[0], at + 1)
    return 0


def show(text: str) -> None:
    """Writes text to stderr, which is the operator's log or the user's terminal."""
    sys.stderr.buffer.write(text.encode(errors="replace"))
    sys.stderr.buffer.flush()


class BoundedShow:
    """Writes text to stderr: at most MAX_SHOWN_CHARS at once, and SHOWN_CHARS_PER_S on average.

    The rest is omitted, and the number of omitted characters is shown instead.
    """

    def __init__(self) -> None:
        self._room = float(MAX_SHOWN_CHARS)
        self._last_refill_s = time.monotonic()
        self._left_out = 0

    def __call__(self, text: str) -> None:
        """Shows the text, or the beginning of it."""
        now_s = time.monotonic()
        gained = (now_s - self._last_refill_s) * SHOWN_CHARS_PER_S
        self._room, self._last_refill_s = min(MAX_SHOWN_CHARS, self._room + gained), now_s
        excerpt = text[: int(self._room)]
        self._room -= len(excerpt)
        if excerpt and self._left_out:
            show(f"\n[{self._left_out} characters omitted]\n")
            self._left_out = 0
        self._left_out += len(text) - len(excerpt)
        if excerpt:
            show(excerpt)


def pass_on(printed: PrintedLogs) -> None:
    """Writes output that belongs to no single prediction to the operator's log, which is stderr."""
    if printed.end:
        print(printed.after(0), end="", file=sys.stderr, flush=True)
