"""Bytes that travel inside a message, or as a key in the object store."""

from __future__ import annotations

import msgspec

INLINE_LIMIT_BYTES = 48 * 1024
"""Larger blobs are put into the object store, and the message points to them."""
RESULTS = "results"
"""The folder of blobs of results, below it one for each request."""
SLOT_INLINE_LIMIT_BYTES = 1024
"""The same for replies that go to a slot, because each slot is billed for each reply.

Pub/Sub bills at least 1,000 bytes: https://cloud.google.com/pubsub/pricing
"""


class Blob(msgspec.Struct, omit_defaults=True):
    """Bytes, either inline or as a key in the object store. Exactly one of the two is set."""

    media_type: str
    data: bytes | None = None
    object_key: str | None = None
