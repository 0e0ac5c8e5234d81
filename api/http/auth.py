"""Who asks: from the API key of a request to its tenant. The first thing a route under /v1 does."""

from __future__ import annotations

import hashlib
import hmac

from api.errors import Unauthorized
from shared.errors import ConfigurationError

DEFAULT_TENANT = "default"
LONGEST_TENANT_BYTES = 256
"""It goes into an attribute of each message, which has at most 1,024."""


class ApiKeys:
    """The keys that are let in, kept only as digests.

    Args:
        api_keys: `key=tenant,key=tenant`; empty lets everyone in as `default`.

    Raises:
        ConfigurationError: an entry is not `key=tenant`, or a key stands twice.
    """

    def __init__(self, api_keys: str) -> None:
        self._tenants: dict[bytes, str] = {}
        for entry in filter(None, (part.strip() for part in api_keys.split(","))):
            key, separator, tenant = (part.strip() for part in entry.rpartition("="))
            if not (separator and key and tenant):
                raise ConfigurationError("PENSTOCK_API_KEYS: an entry is not key=tenant", field="api_keys")
            if not tenant.isprintable() or len(tenant.encode()) > LONGEST_TENANT_BYTES:
                reason = f"a tenant's name is printable and has {LONGEST_TENANT_BYTES} bytes at most"
                raise ConfigurationError(f"PENSTOCK_API_KEYS: {reason}", field="api_keys")
            if _digest(key) in self._tenants:
                raise ConfigurationError(f"PENSTOCK_API_KEYS: the key of {tenant!r} stands twice", field="api_keys")
            self._tenants[_digest(key)] = tenant

    def tenant_of(self, authorization: str | None) -> str:
        """The tenant that an `Authorization: Bearer <key>` header belongs to.

        Raises:
            Unauthorized: keys are asked for, and this is none of them.
        """
        if not self._tenants:
            return DEFAULT_TENANT
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer <key>'")
        given, found = _digest(key.strip()), None
        # Every entry is compared, so that the time taken says nothing about which keys exist.
        for digest, tenant in self._tenants.items():
            if hmac.compare_digest(digest, given):
                found = tenant
        if found is None:
            raise Unauthorized("the API key is not valid")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
