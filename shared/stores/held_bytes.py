"""Bytes stored for a tenant under keys that don't name it: fetched files and class results.

Their keys identify content or a request, so listing a tenant's folder doesn't find them. For each
one, an empty marker object makes it count toward the tenant's storage quota
(api/inputs/storage.py):

    files/held/<owner>/<until>_<bytes>_<id>
"""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Iterable

from shared.stores.objects import ObjectStore, StoredObject

HELD = "files/held"
MARKER_NAME = re.compile(r"([0-9]{1,12})_([0-9]{1,18})_[0-9a-f]+")
"""The Unix time until which bytes count, their number, and an ID."""
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
    """Returns how many bytes the markers account for at a given Unix time.

    Objects with other names don't count.
    """
    names = (MARKER_NAME.fullmatch(marker.key.rpartition("/")[2]) for marker in markers)
    return sum(int(name[2]) for name in names if name is not None and int(name[1]) > now_s)
