"""The form of a segment: a line with the counts so far, the answers, and the errors.

A segment is one object, so it is there whole or not at all. Its counts include those of all earlier
segments: the last one tells the progress of its batch.

A batch that can't go on within a segment keeps the answers that it has as a half segment. Unlike a
segment it is written over. Whoever runs the segment next begins with it, and without it computes
all lines again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from api.batches.documents import Counts

HEADER_BYTES = 256


class LineAnswer(NamedTuple):
    """The end of a line: a line of the output file, or of the error file."""

    data: bytes
    end: Literal["completed", "failed", "not_run"]
    tokens: int = 0


class SegmentHeader(msgspec.Struct):
    """The first line of a segment. `counts` are those of all lines up to its end."""

    counts: Counts
    output_bytes: int
    error_bytes: int


class HalfSegmentHeader(msgspec.Struct):
    """The first line of a half segment. `counts` include its own answers."""

    segment: int
    counts: Counts


_decoder = msgspec.json.Decoder(SegmentHeader)
_half_decoder = msgspec.json.Decoder(HalfSegmentHeader)
_answers_decoder = msgspec.msgpack.Decoder(dict[int, LineAnswer])


def counts_after(before: Counts, answers: Sequence[LineAnswer]) -> Counts:
    """The counts with these answers besides."""
    completed = sum(answer.end == "completed" for answer in answers)
    return Counts(
        before.completed + completed,
        before.failed + len(answers) - completed,
        before.not_run + sum(answer.end == "not_run" for answer in answers),
        before.tokens + sum(answer.tokens for answer in answers),
    )


def encode_segment(counts: Counts, answers: Sequence[LineAnswer]) -> bytes:
    """The bytes of a segment. `counts` are those of all lines up to its end."""
    outputs = [answer.data for answer in answers if answer.end == "completed"]
    errors = [answer.data for answer in answers if answer.end != "completed"]
    output, error = (b"".join(one + b"\n" for one in lines) for lines in (outputs, errors))
    return _padded(SegmentHeader(counts, len(output), len(error))) + output + error


def encode_half_segment(segment: int, counts: Counts, answers: Mapping[int, LineAnswer]) -> bytes:
    """The bytes of the answers of a segment so far, by the number of their lines."""
    return _padded(HalfSegmentHeader(segment, counts)) + msgspec.msgpack.encode(answers)


def decode_header(data: bytes) -> SegmentHeader:
    """Reads the first HEADER_BYTES of a segment."""
    return _decoder.decode(data)


def decode_half_header(data: bytes) -> HalfSegmentHeader:
    """Reads the first HEADER_BYTES of a half segment."""
    return _half_decoder.decode(data[:HEADER_BYTES])


def decode_half_segment(data: bytes) -> dict[int, LineAnswer]:
    """Reads the answers of a half segment."""
    return _answers_decoder.decode(data[HEADER_BYTES:])


def _padded(header: msgspec.Struct) -> bytes:
    return msgspec.json.encode(header).ljust(HEADER_BYTES - 1) + b"\n"
