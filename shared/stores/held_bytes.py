"""Bytes stored for a tenant under keys that don't name it: fetched files and class results.

Their keys identify content or a request, so listing a tenant's folder doesn't find them. For each
one, an empty marker object makes it count toward the tenant's storage quota
(api/inputs/storage.py):

    files/held/<owner>/<until>_<bytes>_<id>
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Iterable

from shared.stores.objects import ObjectStore, StoredObject

HELD = "files/held"
_MARKER = "application/json"


def owner_of(tenant: str) -> str:
    """Returns the digest that identifies a tenant in object keys: 128-bit BLAKE2b (RFC 7693)."""
    return hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()


async def hold(objects: ObjectStore, tenant: str, size_bytes: int, until_s: float) -> None:
    """Counts stored bytes toward a tenant's quota until a given time.

    Args:
        until_s: Unix time.

    Raises:
        Unavailable: the object store is unreachable.
    """
    name = f"{math.ceil(until_s):010d}_{size_bytes}_{secrets.token_hex(8)}"
    await objects.put(f"{HELD}/{owner_of(tenant)}/{name}", b"", _MARKER)


def sum_held_bytes(markers: Iterable[StoredObject], now_s: float) -> int:
    """Returns how many bytes the markers account for at a given Unix time."""
    names = (marker.key.rpartition("/")[2].split("_") for marker in markers)
    return sum(int(size_bytes) for until_s, size_bytes, _ in names if int(until_s) > now_s)
