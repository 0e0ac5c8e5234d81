"""Compresses large answers with vectors as floats to half their size, for callers that accept gzip.

Measurements: docs/measurements/api.md.
"""

from __future__ import annotations

import asyncio
import gzip
import re

from starlette.responses import Response

MIN_BYTES = 64 * 1024
"""About eight vectors. A smaller answer takes one or two round trips, compressed or not."""
_LEVEL = 1
"""Level 6 takes seven times as long and saves 5 % more."""
_GZIP = re.compile(r"\s*(?:gzip|\*)\s*(?:;\s*q\s*=\s*(?P<q>[0-9.]+)\s*)?", re.IGNORECASE)


async def compress(response: Response, accept_encoding: str) -> None:
    """Compresses a large answer on another thread, if the caller accepts gzip."""
    if len(response.body) < MIN_BYTES or response.status_code != 200:
        return
    response.headers["vary"] = "accept-encoding"
    if accepts_gzip(accept_encoding):
        response.body = await asyncio.to_thread(gzip.compress, response.body, _LEVEL, mtime=0)
        response.headers["content-encoding"] = "gzip"
        response.headers["content-length"] = str(len(response.body))


def accepts_gzip(accept_encoding: str) -> bool:
    """Whether the header allows gzip (RFC 9110, 12.5.3).

    Without the header nothing is compressed.
    """
    found = [match for match in map(_GZIP.fullmatch, accept_encoding.split(",")) if match]
    # The weight of gzip takes precedence over that of `*`.
    found.sort(key=lambda match: "*" in match[0])
    return bool(found) and (found[0]["q"] or "1").strip("0.") != ""
