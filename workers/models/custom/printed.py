"""What the process of a class prints: read on a thread, and kept, shown or passed on."""

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

MAX_LOG_CHARS = 32 * 1024
"""Of what a prediction printed, its end is kept."""
MAX_READ_BYTES = 256 * 1024
"""Read at once. A pipe has 64 KiB, so only what never stops printing has more."""
READ_BYTES_PER_S, MAX_BURST_BYTES = 8 * 1024 * 1024, 16 * 1024 * 1024
"""Rate and burst of what is read. A class that prints faster waits, and holds up nobody else."""
MIN_HIDDEN_CHARS = 6
"""A shorter secret is not looked for in what a class prints: it may be part of other words."""
HIDDEN = "[secret]"
SHOWN_BYTES_PER_S, MAX_SHOWN_BYTES = 16 * 1024, 64 * 1024
"""Rate and burst of the output of `setup` that goes to the operator's log while it runs."""


class PrintedOutput:
    """What a process prints. A thread reads it, so that the process waits for no reader.

    Args:
        fd: the end of the pipe to read.
        shows: gets the text as it comes, until `end_showing`. None: nobody does.
        hidden: replaced in all of it.
    """

    def __init__(
        self,
        fd: int,
        shows: Callable[[str], None] | None = None,
        hidden: HiddenValues | None = None,
    ) -> None:
        self._fd = fd
        self._shows = shows
        self._hidden = hidden or HiddenValues([])
        self._held = ""
        """The end of what was read, which may be the beginning of a secret."""
        self._lock = threading.Lock()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._kept = ""
        self._left_out = 0
        self._is_over = threading.Event()
        os.set_blocking(fd, False)
        self._thread = threading.Thread(target=self._read_on, daemon=True, name="printed")
        self._thread.start()

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
                if room_bytes < 0:
                    self._is_over.wait(-room_bytes / READ_BYTES_PER_S)

    def _drain(self) -> tuple[int, bool]:
        """Reads what is there. Returns how many bytes that was, and whether more may come."""
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
                    self._keep(self._held)
                    self._held = ""
                    return read_bytes, False
                read_bytes += len(piece)
                text = self._hidden.clear(self._held + self._decoder.decode(piece))
                text, self._held = self._hidden.split(text)
                self._keep(text)
        return read_bytes, True

    def _keep(self, text: str) -> None:
        if self._shows is not None:
            self._shows(text)
        self._kept += text
        if (extra := len(self._kept) - MAX_LOG_CHARS) > 0:
            self._left_out += extra
            self._kept = self._kept[extra:]

    def end_showing(self) -> None:
        """Shows the rest of what was printed so far, and forgets it: it belongs to no prediction.

        Later output is kept only. Without anyone who shows it, nothing changes.
        """
        if self._shows is not None:
            self.take()
            with self._lock:
                self._shows = None

    def look(self) -> PrintedLogs:
        """Returns what was printed since the last call of `take`."""
        self._drain()
        with self._lock:
            return PrintedLogs(self._kept, self._left_out)

    def take(self) -> PrintedLogs:
        """Returns what was printed since the last call."""
        self._drain()
        with self._lock:
            self._keep(self._held)  # it belongs to nobody else
            self._held = ""
            taken = PrintedLogs(self._kept, self._left_out)
            self._kept, self._left_out = "", 0
        return taken

    def close(self) -> None:
        """Closes the pipe, once the process has ended."""
        self._drain()
        self._is_over.set()
        self._thread.join(timeout=1.0)
        with contextlib.suppress(OSError):
            os.close(self._fd)


class HiddenValues:
    """Replaces the values of secrets in what a class prints and raises.

    Args:
        values: of the secrets.
    """

    def __init__(self, values: Sequence[str]) -> None:
        # The longest first: another may be a part of it.
        long = {one for one in values if len(one) >= MIN_HIDDEN_CHARS}
        self._values = sorted(long, key=len, reverse=True)

    def clear(self, text: str) -> str:
        """Returns a text without the values."""
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return text

    def split(self, text: str) -> tuple[str, str]:
        """Splits off the end of a text that may be the beginning of a value."""
        most = max((_overlap(text, value) for value in self._values), default=0)
        at = len(text) - most
        return text[:at], text[at:]


def _overlap(text: str, value: str) -> int:
    """The length of the longest end of a text that begins a value."""
    at = text.find(value[0], max(0, len(text) - len(value) + 1))
    while at >= 0:
        if value.startswith(text[at:]):
            return len(text) - at
        at = text.find(value[0], at + 1)
    return 0


def show(text: str) -> None:
    """Writes text to stderr, which is the operator's log or a person's terminal."""
    sys.stderr.buffer.write(text.encode(errors="replace"))
    sys.stderr.buffer.flush()


class BoundedShow:
    """Writes text to stderr, up to MAX_SHOWN_BYTES at once and SHOWN_BYTES_PER_S on average.

    The rest is left out, and the number of its characters is shown instead.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._room = float(MAX_SHOWN_BYTES)
        self._looked_s = clock()
        self._left_out = 0

    def __call__(self, text: str) -> None:
        """Shows a text, or its beginning."""
        now_s = self._clock()
        gained = (now_s - self._looked_s) * SHOWN_BYTES_PER_S
        self._room, self._looked_s = min(MAX_SHOWN_BYTES, self._room + gained), now_s
        shown = text[: int(self._room)]
        self._room -= len(shown)
        if shown and self._left_out:
            show(f"\n[{self._left_out} characters left out]\n")
            self._left_out = 0
        self._left_out += len(text) - len(shown)
        if shown:
            show(shown)


def pass_on(printed: PrintedLogs) -> None:
    """Writes output that belongs to no single prediction to the operator's log, which is stderr."""
    if printed.end:
        print(printed.after(0), end="", file=sys.stderr, flush=True)
