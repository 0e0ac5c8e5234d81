"""Progressive JPEGs whose scans are repeated: few bytes, and much work for a decoder."""

from __future__ import annotations

import io
import re

from PIL import Image

_SCAN = re.compile(rb"\xff\xda.*?(?=\xff[^\x00\xd0-\xd7])", re.DOTALL)


def repeat_scans(side: int, scans: int) -> bytes:
    """Returns a gray JPEG of `side` x `side` pixels whose last scan is there `scans` times more.

    The last scan of Pillow's script refines all coefficients but the first of each block. In an
    image of one color they are zero, so the scan has about 40 bytes, however large the image is.
    """
    buffer = io.BytesIO()
    Image.new("L", (side, side), 128).save(buffer, "JPEG", progressive=True)
    whole = buffer.getvalue()
    last: bytes = _SCAN.findall(whole)[-1]
    return whole.removesuffix(b"\xff\xd9") + last * scans + b"\xff\xd9"
