"""Authentication: maps the API key of a request to its caller. Routes under /v1 do this first."""

from __future__ import annotations

import hashlib
import hmac

from api.errors import Unauthorized
from shared.errors import ConfigurationError
from shared.tenants.plan import DEFAULT_TENANT, Caller

LONGEST_TENANT_BYTES = 256
"""The tenant is an attribute of each message. Attributes have at most 1,024 bytes."""


class ApiKeys:
    """The accepted keys. Only their digests are kept in memory.

    Args:
        api_keys: `key=tenant,key=tenant`. If empty, every request has the tenant `default`.

    Raises:
        ConfigurationError: an entry is not `key=tenant`, or a key is listed twice.
    """

    def __init__(self, api_keys: str) -> None:
        self._callers: dict[bytes, Caller] = {}
        for entry in filter(None, (one.strip() for one in api_keys.split(","))):
            key, separator, tenant = (one.strip() for one in entry.rpartition("="))
            if not (separator and key and tenant):
                raise ConfigurationError(
                    "PENSTOCK_API_KEYS: an entry is not key=tenant", field="api_keys"
                )
            if not tenant.isprintable() or len(tenant.encode()) > LONGEST_TENANT_BYTES:
                reason = (
                    f"a tenant's name is printable and has {LONGEST_TENANT_BYTES} bytes at most"
                )
                raise ConfigurationError(f"PENSTOCK_API_KEYS: {reason}", field="api_keys")
            if _digest(key) in self._callers:
                raise ConfigurationError(
                    f"PENSTOCK_API_KEYS: the key of {tenant!r} is listed twice", field="api_keys"
                )
            self._callers[_digest(key)] = Caller(tenant=tenant)

    def caller_of(self, authorization: str | None) -> Caller:
        """Returns the caller of an `Authorization: Bearer <key>` header.

        Raises:
            Unauthorized: the key is missing or wrong.
        """
        if not self._callers:
            return _ANYONE
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer <key>'")
        given, found = _digest(key.strip()), None
        # Compares all entries, so that the time does not reveal which keys exist.
        for digest, caller in self._callers.items():
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise Unauthorized("the API key is not valid")
        return found


_ANYONE = Caller(tenant=DEFAULT_TENANT)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
