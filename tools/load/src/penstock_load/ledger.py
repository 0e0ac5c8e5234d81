"""A replay's ledger: a file with one line per request, written when the request finishes.

    {"run":"load-20261123T054500-9f2c01","url":"http://127.0.0.1:8080","began_at_s":1795412700.1}
    {"id":"load-20261123T054500-9f2c01-0000000","tenant":"acme","model":"all-MiniLM-L6-v2",...}

The first line is the head. `id` is the `x-request-id` that was sent, which appears in rows as
`client_request_id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from penstock_load.exchange import CANCELED, LOST, UNANSWERED, UNCONNECTED
from shared.errors import MALFORMED, ConfigurationError

Ending = Literal["answered", "foreign", "lost", "unanswered", "unconnected", "canceled"]
ENDINGS: dict[int, Ending] = {
    LOST: "lost",
    UNANSWERED: "unanswered",
    UNCONNECTED: "unconnected",
    CANCELED: "canceled",
}
BUFFER_BYTES = 64 * 1024


class LedgerHead(msgspec.Struct, frozen=True):
    """The run that a ledger's lines belong to."""

    run: str
    """Prefix of all request IDs."""
    url: str
    began_at_s: float
    """Unix time."""


class LedgerLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request, and the response that its caller received."""

    id: str
    tenant: str
    """Empty if there is no key, or a key whose tenant is unknown."""
    model: str
    sent_at_s: float
    """Unix time when it was sent, or when it ended if it never got a connection."""
    ended_at_s: float
    items: int
    ending: Ending = "answered"
    """`foreign`: something in front of Penstock, such as a proxy, responded.

    `unconnected`: the request was never sent. For every ending except `answered`, only the rows
    show the result.
    """
    status: int = 0
    """HTTP status, or 0 if there was no response."""
    code: str = ""
    """Error code in the response."""
    cache: str = ""
    tokens: int | None = None
    """Tokens reported in the response. None if it has no tokens."""
    cost_usd: float | None = None
    """Cost reported in the response. None if it has no cost."""
    key_id: str = ""
    """The public part of the key."""
    steps: dict[str, tuple[int, int]] = {}
    """For a flow, maps each step ID to the number of items and how many of them did not succeed."""


class Ledger(NamedTuple):
    """A ledger read from a file."""

    head: LedgerHead
    lines: list[LedgerLine]
    cut_lines: int
    """1 if the last line is incomplete because the writer died mid-write, otherwise 0."""


class LedgerWriter:
    """Appends lines to a new file. Created by `open_ledger`."""

    def __init__(self, path: Path, head: LedgerHead) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=BUFFER_BYTES)
        self._file.write(self._encoder.encode(head) + b"\n")

    def write(self, line: LedgerLine) -> None:
        """Adds a line. The line is written to the file at the next flush.

        Raises:
            ConfigurationError: the file can't be written.
        """
        with translate_errors(self._path):
            self._file.write(self._encoder.encode(line) + b"\n")

    def flush(self) -> None:
        """Writes buffered lines to the file.

        Raises:
            ConfigurationError: the file can't be written.
        """
        with translate_errors(self._path):
            self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file.

        Raises:
            ConfigurationError: the file can't be written.
        """
        with translate_errors(self._path):
            self._file.close()


@contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Converts disk errors to ConfigurationError.

    Raises:
        ConfigurationError: the file can't be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"ledger: {path}: {error.strerror}", field="ledger") from error


@contextmanager
def open_ledger(path: Path, head: LedgerHead) -> Iterator[LedgerWriter]:
    """Opens a writer for a new file, and closes it on exit.

    Raises:
        ConfigurationError: the file exists, or can't be written.
    """
    with translate_errors(path):
        writer = LedgerWriter(path, head)
    try:
        yield writer
    finally:
        writer.close()


def read_ledger(path: Path) -> Ledger:
    """Reads a whole ledger. Skips and counts an incomplete last line.

    Raises:
        ConfigurationError: the file can't be read, or is not a ledger.
    """
    try:
        whole, _, rest = path.read_bytes().rpartition(b"\n")
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}", field="check") from error
    first, *others = whole.split(b"\n")
    decoder, lines = msgspec.json.Decoder(LedgerLine), list[LedgerLine]()
    try:
        head = msgspec.json.decode(first, type=LedgerHead)
        for line in others:
            lines.append(decoder.decode(line))
    except MALFORMED as error:
        raise ConfigurationError(
            f"{path}: not a ledger, or line {len(lines) + 2} is corrupt: {error}",
            field="check",
        ) from error
    return Ledger(head, lines, int(bool(rest)))
