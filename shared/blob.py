"""Bytes that travel inside a message, or as a key in the object store."""

from __future__ import annotations

import hashlib

import msgspec

INLINE_LIMIT_BYTES = 48 * 1024
"""Larger blobs are put into the object store, and the message points to them."""
FILE_FORMAT = "uri"
"""The `format` that JSON Schema of an input or output has which is a file."""
RESULTS = "results"
"""The folder of blobs of results, below it one for each request."""
SLOT_INLINE_LIMIT_BYTES = 1024
"""The same for replies that go to a slot, because each slot is billed for each reply.

Pub/Sub bills at least 1,000 bytes: https://cloud.google.com/pubsub/pricing
"""


def content_digest(data: bytes) -> str:
    """Returns 256 bits of BLAKE2b (RFC 7693) of some bytes, in hex."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


class Blob(msgspec.Struct, omit_defaults=True):
    """Bytes, either inline or as a key in the object store. Exactly one of the two is set."""

    media_type: str
    data: bytes | None = None
    object_key: str | None = None
    digest: str = ""
    """Of the bytes behind the key, as `content_digest` gives it. Empty: not known."""

    @property
    def identity(self) -> tuple[str, object]:
        """What the bytes count by in a cache key: their digest, or the key if that is not known."""
        if self.data is not None:
            return ("bytes", bytes.fromhex(content_digest(self.data)))
        return ("bytes", bytes.fromhex(self.digest)) if self.digest else ("object", self.object_key)
