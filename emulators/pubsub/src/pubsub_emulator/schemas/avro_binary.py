"""Validates a message in Avro's binary encoding without storing its values.

Library decoders construct every value, and some messages crash the process: an array of a billion
nulls takes three bytes, and a recursive type can nest as deeply as the message is long. Source:
https://avro.apache.org/docs/1.12.0/specification/#binary-encoding.
"""

from collections.abc import Callable
from typing import Any

import avro.schema

from pubsub_emulator.schemas.mismatch import Budget, Mismatch

_LONGEST_VARINT_BYTES = 10
_INT_BITS = 32
_LONG_BITS = 64
_TOO_LITTLE = "Too little data to parse for schema"


def check_binary(schema: avro.schema.Schema, message: bytes, budget: Budget) -> None:
    """Reject a message that is not exactly one value of a schema.

    Raises:
        Mismatch: contains the reason.
    """
    reader = _Reader(message, budget)
    _read(schema, reader, 0)
    if reader.position != len(message):
        raise Mismatch("Too much data to parse for schema")


class _Reader:
    def __init__(self, data: bytes, budget: Budget) -> None:
        self._data = data
        self.budget = budget
        self.position = 0

    def take(self, size_bytes: int) -> bytes:
        end = self.position + size_bytes
        if end > len(self._data):
            raise Mismatch(_TOO_LITTLE)
        data = self._data[self.position : end]
        self.position = end
        return data

    def integer(self, bits: int = _LONG_BITS) -> int:
        """Read an integer in variable-length zigzag encoding."""
        value = shift = 0
        for _ in range(_LONGEST_VARINT_BYTES):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        if value >> bits or byte >= 0x80:
            raise Mismatch(f"a number exceeds {bits} bits")
        return (value >> 1) ^ -(value & 1)

    def text(self) -> bytes:
        size_bytes = self.integer()
        if size_bytes < 0:
            raise Mismatch("a length is negative")
        return self.take(size_bytes)


def _read(schema: Any, reader: _Reader, depth: int) -> None:
    reader.budget.enter(depth)
    _READ[schema.type](schema, reader, depth)


def _boolean(schema: Any, reader: _Reader, depth: int) -> None:
    if reader.take(1) not in (b"\0", b"\1"):
        raise Mismatch("a boolean is neither 0 nor 1")


def _string(schema: Any, reader: _Reader, depth: int) -> None:
    try:
        reader.text().decode()
    except UnicodeDecodeError:
        raise Mismatch("a string is not valid UTF-8") from None


def _enum(schema: Any, reader: _Reader, depth: int) -> None:
    if not 0 <= reader.integer(_INT_BITS) < len(schema.symbols):
        raise Mismatch(f"a value is not a symbol of {schema.fullname}")


def _record(schema: Any, reader: _Reader, depth: int) -> None:
    for field in schema.fields:
        try:
            _read(field.type, reader, depth + 1)
        except Mismatch as mismatch:
            mismatch.within(f".{field.name}")
            raise


def _union(schema: Any, reader: _Reader, depth: int) -> None:
    number = reader.integer()
    if not 0 <= number < len(schema.schemas):
        raise Mismatch(f"a union has no branch {number}")
    _read(schema.schemas[number], reader, depth + 1)


def _array(schema: Any, reader: _Reader, depth: int) -> None:
    _blocks(reader, lambda: _read(schema.items, reader, depth + 1))


def _map(schema: Any, reader: _Reader, depth: int) -> None:
    def entry() -> None:
        _string(None, reader, depth)
        _read(schema.values, reader, depth + 1)

    _blocks(reader, entry)


def _blocks(reader: _Reader, read_item: Callable[[], None]) -> None:
    while count := reader.integer():
        if count < 0:
            reader.integer()
        for _ in range(abs(count)):
            before = reader.position
            read_item()
            if reader.position == before:
                # Items of this type take no bytes, so all remaining items are valid.
                break


_READ: dict[str, Callable[[Any, _Reader, int], object]] = {
    "null": lambda schema, reader, depth: None,
    "boolean": _boolean,
    "int": lambda schema, reader, depth: reader.integer(_INT_BITS),
    "long": lambda schema, reader, depth: reader.integer(),
    "float": lambda schema, reader, depth: reader.take(4),
    "double": lambda schema, reader, depth: reader.take(8),
    "bytes": lambda schema, reader, depth: reader.text(),
    "string": _string,
    "fixed": lambda schema, reader, depth: reader.take(schema.size),
    "enum": _enum,
    "record": _record,
    "error": _record,
    "array": _array,
    "map": _map,
    "union": _union,
}
