"""Checks the lines that writers left against the schema of their table."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

import msgspec

from infra.bigquery import schema

UNPACKED_MAX_BYTES = 64 * 1024 * 1024
"""Of one object. Writers put about half a MiB into one."""
_GZIP = 31
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_UnixSeconds = Annotated[float, msgspec.Meta(ge=-62_135_596_800, le=253_402_300_799)]
"""From year 1 to year 9999, as in BigQuery."""
_TYPES: dict[str, Any] = {
    "STRING": str,
    "INTEGER": _Int64,
    "FLOAT": float,
    "BOOLEAN": bool,
    "TIMESTAMP": _UnixSeconds,
}


class CheckedLines(NamedTuple):
    """The lines of an object."""

    good: list[bytes]
    trimmed: int
    """How many of them have a column that this release does not know."""
    bad: list[bytes]
    """Lines that are no row of the table."""


class LineChecker:
    """Sorts lines into those that are rows of a table, and the rest.

    Args:
        table: whose rows.
    """

    def __init__(self, table: str) -> None:
        fields = [
            (one["name"], _TYPES[one["type"]])
            if one["mode"] == "REQUIRED"
            else (one["name"], _TYPES[one["type"]] | None, None)
            for one in schema(table)
        ]
        known = msgspec.defstruct("Known", fields, kw_only=True)
        strict = msgspec.defstruct("Strict", [], bases=(known,), forbid_unknown_fields=True)
        self._known = msgspec.json.Decoder(known)
        self._strict = msgspec.json.Decoder(strict)

    def check(self, lines: Iterable[bytes]) -> CheckedLines:
        """Sorts them. A column that is not known makes no line bad."""
        found = CheckedLines([], 0, [])
        trimmed = 0
        for line in lines:
            if self._fits(self._strict, line):
                found.good.append(line)
            elif self._fits(self._known, line):
                found.good.append(line)
                trimmed += 1
            else:
                found.bad.append(line)
        return found._replace(trimmed=trimmed)

    def _fits(self, decoder: msgspec.json.Decoder[msgspec.Struct], line: bytes) -> bool:
        try:
            decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        return True


def unpacked(data: bytes) -> list[bytes]:
    """Returns the lines of an object.

    Raises:
        ValueError: it is no gzip, it is cut, or it has more than UNPACKED_MAX_BYTES.
    """
    unpacking = zlib.decompressobj(_GZIP)
    try:
        lines = unpacking.decompress(data, UNPACKED_MAX_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not unpacking.eof:
        raise ValueError("cut, or too large")
    return lines.splitlines()
