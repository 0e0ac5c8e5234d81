"""Compresses large answers that hold vectors as floats, which shrink to half, for callers that accept gzip.

Measured: docs/decisions/0021-what-is-compressed.md.
"""

from __future__ import annotations

import asyncio
import gzip
import re

from starlette.requests import Request
from starlette.responses import Response

from api.http.middleware import context_of

LEAST_BYTES = 64 * 1024
"""About eight vectors. What is smaller takes a round trip or two whether it is compressed or not."""
_LEVEL = 1
"""Level 6 takes seven times as long for a twentieth less."""
_GZIP = re.compile(r"\s*(?:gzip|\*)\s*(?:;\s*q\s*=\s*(?P<q>[0-9.]+)\s*)?", re.IGNORECASE)


async def compressed(request: Request, response: Response) -> Response:
    """The answer, compressed on another thread where its route says that it shrinks (`context.shrinks`)."""
    if not context_of(request).shrinks or len(response.body) < LEAST_BYTES or response.status_code != 200:
        return response
    response.headers["vary"] = "accept-encoding"
    if takes_gzip(request.headers.get("accept-encoding", "")):
        response.body = await asyncio.to_thread(gzip.compress, response.body, _LEVEL, mtime=0)
        response.headers["content-encoding"] = "gzip"
        response.headers["content-length"] = str(len(response.body))
    return response


def takes_gzip(accept_encoding: str) -> bool:
    """Whether a caller takes gzip (RFC 9110, 12.5.3); who names no encoding is given none."""
    found = [match for match in map(_GZIP.fullmatch, accept_encoding.split(",")) if match]
    # gzip's own weight counts more than that of `*`.
    found.sort(key=lambda match: "*" in match[0])
    return bool(found) and (found[0]["q"] or "1").strip("0.") != ""
