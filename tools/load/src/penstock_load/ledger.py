"""The ledger of a replay: a file with one line for each request, written as each ends.

    {"run":"load-20261123T054500-9f2c01","url":"http://127.0.0.1:8080","began_at_s":1795412700.1}
    {"id":"load-20261123T054500-9f2c01-0000000","tenant":"acme","model":"all-MiniLM-L6-v2",...}

The first line is the head. `id` is the `x-request-id` that was sent, and rows have it as
`client_request_id`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from penstock_load.exchange import CANCELED, LOST, UNANSWERED, UNCONNECTED
from shared.errors import ConfigurationError

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
    """The start of the id of each request."""
    url: str
    began_at_s: float
    """Unix time."""


class LedgerLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request, and the answer that its caller got."""

    id: str
    tenant: str
    """Empty: a key without a known tenant, or none."""
    model: str
    sent_at_s: float
    """Unix time. What waited for a connection counts from its end."""
    ended_at_s: float
    items: int
    ending: Ending = "answered"
    """`foreign`: somebody before Penstock answered, such as a proxy. `unconnected`: it never left.
    Only rows say what became of the others that are not `answered`.
    """
    status: int = 0
    """HTTP status. 0: no answer."""
    code: str = ""
    """Code of the error in the answer."""
    cache: str = ""
    tokens: int | None = None
    """Tokens, as the answer says. None if it does not say."""
    cost_usd: float | None = None
    """Cost, as the answer says. None if it does not say."""
    key_id: str = ""
    """The public part of the key."""
    steps: dict[str, tuple[int, int]] = {}
    """Of a flow, by the ids of its steps: their items, and how many of them did not succeed."""


class Ledger(NamedTuple):
    """A ledger that was read."""

    head: LedgerHead
    lines: list[LedgerLine]
    cut_lines: int
    """0 or 1: the last line, if the writer died in it."""


class LedgerWriter:
    """Appends lines to a new file. `opened_ledger` makes one."""

    def __init__(self, path: Path, head: LedgerHead) -> None:
        self._path = path
        self._encoder = msgspec.json.Encoder()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("xb", buffering=BUFFER_BYTES)
        self._file.write(self._encoder.encode(head) + b"\n")

    def write(self, line: LedgerLine) -> None:
        """Adds a line. It is in the file after the next flush.

        Raises:
            ConfigurationError: the file can't be written.
        """
        with translated(self._path):
            self._file.write(self._encoder.encode(line) + b"\n")

    def flush(self) -> None:
        """Hands the file what was written.

        Raises:
            ConfigurationError: the file can't be written.
        """
        with translated(self._path):
            self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file.

        Raises:
            ConfigurationError: the file can't be written.
        """
        with translated(self._path):
            self._file.close()


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turns errors of the disk into ours.

    Raises:
        ConfigurationError: the file can't be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(f"ledger: {path}: {error.strerror}", field="ledger") from error


@contextmanager
def opened_ledger(path: Path, head: LedgerHead) -> Iterator[LedgerWriter]:
    """A writer of a new file, closed at the end.

    Raises:
        ConfigurationError: the file exists, or can't be written.
    """
    with translated(path):
        writer = LedgerWriter(path, head)
    try:
        yield writer
    finally:
        writer.close()


def read_ledger(path: Path) -> Ledger:
    """Reads a whole ledger. A last line that breaks off is left out and counted.

    Raises:
        ConfigurationError: it can't be read, or it is not a ledger.
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path}: not a ledger, or line {len(lines) + 2} is corrupt: {error}",
            field="check",
        ) from error
    return Ledger(head, lines, int(bool(rest)))
