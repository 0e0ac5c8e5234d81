"""Binary data, either inside a message or as a key in the object store."""

from __future__ import annotations

import hashlib

import msgspec

INLINE_LIMIT_BYTES = 48 * 1024
"""Larger blobs are stored in the object store, and the message contains a reference."""
FILE_FORMAT = "uri"
"""JSON Schema `format` for inputs and outputs that are files."""
RESULTS = "results"
"""Folder for result blobs, with a subfolder per request."""
SLOT_INLINE_LIMIT_BYTES = 1024
"""The same limit, but for replies sent to a slot. It is lower because each slot is billed for every
reply.

Pub/Sub bills for at least 1,000 bytes: https://cloud.google.com/pubsub/pricing
"""


def content_digest(data: bytes) -> str:
    """Returns a 256-bit BLAKE2b digest (RFC 7693) of `data`, in hex."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


class Blob(msgspec.Struct, omit_defaults=True):
    """Binary data, either inline or as a key in the object store. Exactly one of the two is set."""

    media_type: str
    data: bytes | None = None
    object_key: str | None = None
    digest: str = ""
    """`content_digest` of the data at the key. Empty if not known."""

    @property
    def identity(self) -> tuple[str, object]:
        """Identifies the data in a cache key: its digest or, if that is not known, its key."""
        if self.data is not None:
            return ("bytes", bytes.fromhex(content_digest(self.data)))
        return ("bytes", bytes.fromhex(self.digest)) if self.digest else ("object", self.object_key)
