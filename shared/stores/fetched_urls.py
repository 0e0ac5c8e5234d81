"""Remembers files fetched from URLs for a tenant, for as long as the request exists.

A repeated request finds the file it fetched before and only checks with the URL's server whether
the file has changed (RFC 9110, 13.1.2). Tenants never find each other's files.
"""

from __future__ import annotations

import contextlib
import hashlib

import msgspec

from shared.errors import MALFORMED, Unavailable
from shared.stores.records_redis import RecordsRedis

MAX_KEPT_S = 24 * 3600
MAX_ETAG_CHARS = 1024


class FetchedUrls:
    """All tenants' fetched files. Never raises, because forgotten files are just fetched again."""

    def __init__(self, redis: RecordsRedis) -> None:
        self._prefix = redis.prefix
        self._commands = redis.commands("the fetched URL store")

    async def find(self, tenant: str, url: str) -> FetchedUrl | None:
        with contextlib.suppress(Unavailable, *MALFORMED):
            data = await self._commands.run("GET", self._key(tenant, url))
            return None if data is None else msgspec.json.decode(data, type=FetchedUrl)
        return None

    async def put(self, tenant: str, url: str, fetched: FetchedUrl, keep_s: float) -> None:
        if len(fetched.etag) > MAX_ETAG_CHARS or keep_s <= 0:
            return
        keep_ms = int(min(keep_s, MAX_KEPT_S) * 1000) or 1
        with contextlib.suppress(Unavailable):
            key, data = self._key(tenant, url), msgspec.json.encode(fetched)
            await self._commands.run("SET", key, data, "PX", keep_ms)

    def _key(self, tenant: str, url: str) -> str:
        digest = hashlib.blake2b(f"{tenant}\n{url}".encode(), digest_size=16).hexdigest()
        return f"{self._prefix}fetched:{digest}"


class FetchedUrl(msgspec.Struct, frozen=True):
    """A fetched file, and its location in the object store."""

    final_url: str
    """URL after redirects, to which the tag belongs."""
    etag: str
    """Empty if there was no ETag, so the file is found only by its digest."""
    object_key: str
    media_type: str
    size_bytes: int
    name: str
    sha256: str = ""
    """In hex. Empty if unknown, because an earlier release fetched it."""
