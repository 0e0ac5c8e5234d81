"""Signed links to objects, so that answers and webhooks name an image instead of carrying it.

api/routes/files.py serves them, in another format if `media_type` is not the object's own.

The signature is HMAC-SHA256 (RFC 2104) over key, media type and expiry, so none of them can be
changed.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable
from urllib.parse import quote, urlencode

from shared.errors import PenstockError

VALID_S = 3600
"""The time that a link is valid. OpenAI's API promises the same for image URLs."""


class LinkInvalid(PenstockError):
    """The link is not signed by this API, or has expired."""

    code = "link_invalid"
    public_by_default = None


class UrlSigner:
    """Signs and validates links.

    Args:
        secret: the same in all instances, so that each can serve every link. Empty: random per
            process.
        clock: unix seconds, for tests.
    """

    def __init__(self, secret: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret.encode() if secret else secrets.token_bytes(32)
        self._clock = clock

    def path(self, key: str, media_type: str) -> str:
        """Returns a signed path and query for the object `key`, valid for 60 minutes."""
        expires_s = int(self._clock()) + VALID_S
        query = {
            "type": media_type,
            "expires": expires_s,
            "signature": self._signature(key, media_type, expires_s),
        }
        return f"/v1/objects/{quote(key)}?{urlencode(query)}"

    def query(self, key: str, media_type: str, expires_s: int) -> str:
        """Returns the signed query of a link with a path of its own, valid until `expires_s`."""
        signature = self._signature(key, media_type, expires_s)
        return f"expires={expires_s}&signature={signature}"

    def check(self, key: str, media_type: str, expires_s: int, signature: str) -> None:
        """Lets a link pass.

        Raises:
            LinkInvalid: it is not ours, was changed, or has expired.
        """
        expected = self._signature(key, media_type, expires_s)
        if not hmac.compare_digest(expected.encode(), signature.encode("utf-8", "surrogateescape")):
            raise LinkInvalid("the link's signature is not valid")
        if expires_s <= self._clock():
            raise LinkInvalid("the link has expired")

    def _signature(self, key: str, media_type: str, expires_s: int) -> str:
        signed = f"{key}\n{media_type}\n{expires_s}".encode("utf-8", "surrogateescape")
        return hmac.digest(self._secret, signed, "sha256").hex()
