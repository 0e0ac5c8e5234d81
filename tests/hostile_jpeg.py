"""Progressive JPEGs with many scans: small files that take a lot of work to decode."""

from __future__ import annotations

import io
import re

from PIL import Image

_SCAN = re.compile(rb"\xff\xda.*?(?=\xff[^\x00\xd0-\xd7])", re.DOTALL)
RESERVED_MARKER = b"\xff\x02\xff\xff"
"""Followed by a length, as in a segment. libjpeg does not recognize this kind of segment."""


def repeat_scans(side: int, scans: int) -> bytes:
    """Returns a gray JPEG of `side` x `side` pixels whose last scan is repeated `scans` times.

    The last scan in Pillow's script refines all of each block's coefficients except the first. In a
    single-color image, they are all zero, so the scan takes about 40 bytes, no matter how large the
    image is.
    """
    buffer = io.BytesIO()
    Image.new("L", (side, side), 128).save(buffer, "JPEG", progressive=True)
    whole = buffer.getvalue()
    last: bytes = _SCAN.findall(whole)[-1]
    return whole.removesuffix(b"\xff\xd9") + last * scans + b"\xff\xd9"


def hide_scans(side: int, scans: int) -> bytes:
    """Like `repeat_scans`, but with repeated scans that look like a segment's bytes.

    The scan before them has restart intervals and a reserved marker. libjpeg drops the marker when
    it looks for the next restart, and decodes the bytes after it.
    """
    buffer = io.BytesIO()
    image = Image.new("L", (side, side), 128)
    image.save(buffer, "JPEG", progressive=True, restart_marker_rows=1)
    whole = buffer.getvalue()
    last: bytes = _SCAN.findall(whole)[-1]
    restart = last.index(b"\xff\xd0")
    begun = whole.removesuffix(b"\xff\xd9") + last[:restart] + RESERVED_MARKER
    return begun + last[restart:] + last * scans + b"\xff\xd9"
