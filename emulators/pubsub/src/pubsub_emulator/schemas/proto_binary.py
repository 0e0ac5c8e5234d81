"""Validates a message in the binary protocol buffer encoding without storing its values.

As always with protocol buffers, a field that the definition lacks or that has a different encoding
is not an error: readers skip it. Source: https://protobuf.dev/programming-guides/encoding/
"""

import re
from collections.abc import Iterator, Sequence

from pubsub_emulator.schemas.mismatch import Budget, Mismatch
from pubsub_emulator.schemas.proto_types import (
    END_GROUP,
    I32,
    I64,
    LEN,
    START_GROUP,
    VARINT,
    Field,
    MessageType,
)

_VARINTS = re.compile(rb"(?:[\x80-\xff]{0,9}[\x00-\x7f])*+")
_MAX_PARTS = 1000
"""Maximum number of message parts that are checked together. Readers merge the parts."""
_PIECE_BYTES = 64 * 1024
"""Number of bytes matched at a time. Other threads wait during a match."""
_PACKED_BYTES_A_VALUE = 64
"""Bytes of packed numbers that can be checked in the time it takes to check one value."""
_LONGEST_VARINT_BYTES = 10
_NO_VARINT = "it is truncated, or a number is longer than 10 bytes"
_MAX_TAG = 2**32 - 1
_SIZES = {I64: 8, I32: 4}

_Span = tuple[int, int]


def check_binary(root: MessageType, message: bytes, budget: Budget) -> None:
    """Reject bytes that are not a message of the given type.

    Raises:
        Mismatch: the message does not match; the error has the location and the reason.
    """
    whole = (0, len(message))
    reader = _Reader(message, budget)
    reader.check(root, whole, 0)
    if root.may_lack:
        reader.check_required(root, [whole], 0)


class _Reader:
    def __init__(self, data: bytes, budget: Budget) -> None:
        self._data = data
        self._budget = budget

    def check(self, kind: MessageType, span: _Span, depth: int) -> None:
        for number, wire_type, begin, end in self._fields(span, depth):
            field = kind.by_number.get(number)
            if field is None:
                continue
            try:
                self._check_field(field, wire_type, (begin, end), depth)
            except Mismatch as mismatch:
                mismatch.within(f".{field.name}")
                raise

    def check_required(self, kind: MessageType, spans: Sequence[_Span], depth: int) -> None:
        """Reject a message, possibly split into parts, that lacks a required field."""
        seen: set[int] = set()
        parts: dict[Field, list[_Span]] = {}
        if kind.is_map_entry:
            parts[kind.by_number[2]] = []  # an absent value counts as empty
        chosen: dict[int, Field] = {}
        for field, inner in self._find_known_fields(kind, spans, depth):
            seen.add(field.number)
            if field.oneof is not None:
                if (other := chosen.get(field.oneof, field)) is not field:
                    parts.pop(other, None)
                chosen[field.oneof] = field
            if field.message is None or not field.message.may_lack:
                continue
            if field.is_repeated:
                self._check_required_within(field, [inner], depth)
            else:
                _add_part(parts.setdefault(field, []), inner)
        for number, name in kind.required.items():
            if number not in seen:
                raise Mismatch(f"the required field {name} is missing")
        for field, of_one in parts.items():
            self._check_required_within(field, of_one, depth)

    def _find_known_fields(
        self, kind: MessageType, spans: Sequence[_Span], depth: int
    ) -> Iterator[tuple[Field, _Span]]:
        for span in spans:
            for number, wire_type, begin, end in self._fields(span, depth):
                field = kind.by_number.get(number)
                if field is not None and (
                    wire_type == field.wire_type or (wire_type == LEN and field.may_be_packed)
                ):
                    yield field, (begin, end)

    def _check_required_within(self, field: Field, spans: Sequence[_Span], depth: int) -> None:
        assert field.message is not None
        try:
            self.check_required(field.message, spans, depth + 1)
        except Mismatch as mismatch:
            mismatch.within(f".{field.name}")
            raise

    def _check_field(self, field: Field, wire_type: int, span: _Span, depth: int) -> None:
        begin, end = span
        if wire_type == field.wire_type:
            if field.message is not None:
                if begin < end:
                    self.check(field.message, span, depth + 1)
            elif field.is_utf8:
                try:
                    self._data[begin:end].decode()
                except UnicodeDecodeError:
                    raise Mismatch("a string is not valid UTF-8") from None
        elif wire_type == LEN and field.may_be_packed:
            self._check_packed(field.wire_type, span, depth)

    def _check_packed(self, wire_type: int, span: _Span, depth: int) -> None:
        begin, end = span
        self._budget.enter(depth, (end - begin) // _PACKED_BYTES_A_VALUE)
        if wire_type in _SIZES:
            if (end - begin) % _SIZES[wire_type]:
                raise Mismatch("it is truncated within packed numbers")
            return
        while begin < end:
            matched = _VARINTS.match(self._data, begin, min(end, begin + _PIECE_BYTES))
            if matched is None or matched.end() == begin:
                raise Mismatch(_NO_VARINT)
            begin = matched.end()

    def _fields(self, span: _Span, depth: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield each field's number and wire type, and the position of its value."""
        position, end = span
        while position < end:
            self._budget.enter(depth)
            tag, position = self._tag(position, end)
            number, wire_type = tag >> 3, tag & 7
            if wire_type == START_GROUP:
                begin, stop, position = position, *self._group_end(number, position, end, depth)
            elif wire_type == END_GROUP:
                raise Mismatch("a group ends that was never started")
            else:
                begin, position = self._value(wire_type, position, end)
                stop = position
            yield number, wire_type, begin, stop

    def _tag(self, position: int, end: int) -> tuple[int, int]:
        """Return a field's number and wire type as one integer, and the position of its value."""
        tag, position = self._varint(position, end)
        if tag > _MAX_TAG or tag < 8:
            raise Mismatch("a field has an invalid number")
        return tag, position

    def _value(self, wire_type: int, position: int, end: int) -> _Span:
        """Return a value's start and end."""
        begin = position
        if wire_type == LEN:
            size_bytes, begin = self._varint(position, end)
            position = begin + size_bytes
        elif wire_type == VARINT:
            _, position = self._varint(position, end)
        elif wire_type in _SIZES:
            position += _SIZES[wire_type]
        else:
            raise Mismatch(f"a field has the unknown wire type {wire_type}")
        if position > end:
            raise Mismatch("it is truncated")
        return begin, position

    def _group_end(self, number: int, position: int, end: int, depth: int) -> _Span:
        """Return where a group's fields end and where its end tag ends."""
        open_groups = [number]
        while open_groups:
            if position >= end:
                raise Mismatch("a group is not closed")
            self._budget.enter(depth + len(open_groups))
            stop = position
            tag, position = self._tag(position, end)
            if tag & 7 == START_GROUP:
                open_groups.append(tag >> 3)
            elif tag & 7 == END_GROUP:
                if tag >> 3 != open_groups.pop():
                    raise Mismatch("a group ends that was never started")
            else:
                _, position = self._value(tag & 7, position, end)
        return stop, position

    def _varint(self, position: int, end: int) -> _Span:
        """Return a variable-length integer and its end position."""
        if position < end and (value := self._data[position]) < 0x80:
            return value, position + 1  # most integers are short
        value = 0
        last = min(end, position + _LONGEST_VARINT_BYTES)
        for number, byte in enumerate(self._data[position:last]):
            value |= (byte & 0x7F) << (7 * number)
            if byte < 0x80:
                return value, position + number + 1
        raise Mismatch(_NO_VARINT)


def _add_part(parts: list[_Span], span: _Span) -> None:
    if span[0] < span[1]:
        parts.append(span)
    if len(parts) > _MAX_PARTS:
        raise Mismatch(f"it consists of more than {_MAX_PARTS} parts")
