"""Detects addresses reachable only from this machine, and bypasses proxies for them."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import MutableMapping
from functools import lru_cache

LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_BYPASS_VARIABLES = ("no_proxy", "NO_PROXY")
_GRPC_BYPASS_VARIABLE = "no_grpc_proxy"


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Returns whether `host`, a name or an address, is reachable only from this machine."""
    if host == "localhost" or host.endswith(".localhost"):  # RFC 6761
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def exempt_loopback_from_proxies(variables: MutableMapping[str, str] = os.environ) -> None:
    """Makes this process and its children bypass proxies when connecting to this machine.

    Libraries handle `HTTP_PROXY` and `NO_PROXY` differently. gRPC, for example, reads only the
    lowercase names, and reads `no_grpc_proxy` before `no_proxy`. So this machine's hosts are added
    to all of the proxy-exclusion variables. Call this before anything else in a program, because
    some libraries read the environment when imported.

    Args:
        variables: environment to change. The environment is left unchanged if it does not set a
            proxy.
    """
    names = {name.lower() for name in variables}
    if not any(name.endswith("_proxy") and not name.startswith("no_") for name in names):
        return
    lowercase, uppercase = (variables.get(name, "") for name in _BYPASS_VARIABLES)
    variables["no_proxy"] = _with_loopback(lowercase or uppercase)
    variables["NO_PROXY"] = _with_loopback(uppercase or lowercase)
    if _GRPC_BYPASS_VARIABLE in variables:
        variables[_GRPC_BYPASS_VARIABLE] = _with_loopback(variables[_GRPC_BYPASS_VARIABLE])


def _with_loopback(exceptions: str) -> str:
    hosts = [host.strip() for host in exceptions.split(",") if host.strip()]
    if hosts == ["*"]:
        return "*"  # when combined with other hosts, it is no longer a wildcard in Python
    return ",".join(dict.fromkeys([*hosts, *LOOPBACK_HOSTS]))
