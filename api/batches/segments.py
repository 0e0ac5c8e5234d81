"""The form of a segment: a line with the counts so far, the answers, and the errors.

A segment is one object, so it is there whole or not at all. Its counts include those of all earlier
segments: the last one tells the progress of its batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from api.batches.documents import Counts

HEADER_BYTES = 256


class SegmentHeader(msgspec.Struct):
    """The first line of a segment. `counts` are those of all lines up to its end."""

    counts: Counts
    output_bytes: int
    error_bytes: int


_decoder = msgspec.json.Decoder(SegmentHeader)


def encode_segment(counts: Counts, outputs: Sequence[bytes], errors: Sequence[bytes]) -> bytes:
    """The bytes of a segment. `outputs` and `errors` are lines without their ends."""
    output, error = (b"".join(one + b"\n" for one in lines) for lines in (outputs, errors))
    header = msgspec.json.encode(SegmentHeader(counts, len(output), len(error)))
    return header.ljust(HEADER_BYTES - 1) + b"\n" + output + error


def decode_header(data: bytes) -> SegmentHeader:
    """Reads the first HEADER_BYTES of a segment."""
    return _decoder.decode(data)
