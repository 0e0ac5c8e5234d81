"""Detects addresses that only this machine can reach."""

from __future__ import annotations

import ipaddress
from functools import lru_cache


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Returns whether only this machine can reach `host`, a name or an address."""
    if host == "localhost" or host.endswith(".localhost"):  # RFC 6761
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
