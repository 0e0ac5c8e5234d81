"""URLs that callers ask us to connect to: webhooks, and inputs to fetch.

They must not lead into our network. A URL is checked here without resolving its host, because the
host may resolve to something else later. The code that connects also checks the host's addresses
(shared/web/pinned_http.py).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from urllib.parse import unquote

from yarl import URL

from shared.errors import BadInput

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

MAX_HOST_CHARS = 253
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)", re.I)
"""https://www.rfc-editor.org/rfc/rfc1123#section-2.1, plus underscores, which occur in many real
host names.
"""
_NEVER_PUBLIC = frozenset({"invalid", "internal", "local", "localhost", "onion"})
"""https://www.iana.org/assignments/special-use-domain-names, and ICANN's .internal.

Domains for documentation and tests are allowed, because people try them out.
"""


class UrlForbidden(BadInput):
    """The URL leads somewhere that callers must not make us connect to."""


@dataclass(frozen=True, slots=True)
class Reach:
    """Destinations allowed for callers' URLs.

    `networks` are allowed even though they are not public. If there are any, private host names are
    allowed as well.
    """

    schemes: tuple[str, ...] = ("https",)
    networks: tuple[Network, ...] = ()

    def allows(self, address: Address) -> bool:
        return is_public(address) or any(address in network for network in self.networks)


PUBLIC = Reach()
ANYWHERE = Reach(("https", "http"), (ip_network("0.0.0.0/0"), ip_network("::/0")))
"""Allows everything, for use on a single machine."""


def parse_public_url(text: str, reach: Reach) -> URL:
    """Parses and checks a URL.

    The connection uses the same parser, because two parsers may see different hosts in the same
    URL.

    Raises:
        UrlForbidden: the URL leads to a forbidden destination, whatever its host resolves to.
    """
    try:
        url = URL(text)
        host, port = url.host, url.port
    except ValueError as error:
        raise UrlForbidden(f"{text!r} is not a URL: {error}") from error
    if url.scheme not in reach.schemes or not host or not port:
        raise UrlForbidden(f"{text!r} must be an {' or '.join(reach.schemes)} URL")
    if url.user is not None or url.password is not None:
        raise UrlForbidden("the URL must not contain credentials")
    address = _address_in(host)
    is_private = bool(reach.networks)
    if address is None and (reason := _impossible(url.raw_host or "", allow_private=is_private)):
        raise UrlForbidden(f"{host} {reason}")
    if address is not None and not reach.allows(address):
        raise UrlForbidden(f"{host} is {address}, which is not public")
    return url


def is_within(url: URL, beginnings: Sequence[str]) -> bool:
    """Returns whether a URL starts with one of `beginnings`, which end with a slash.

    A path with a `.` or `..` segment, however it is spelled, never matches, because servers
    interpret such segments differently.
    """
    parts = unquote(url.raw_path).replace("\\", "/").split("/")
    if "." in parts or ".." in parts:
        return False
    origin, path = url.origin(), url.raw_path
    return any(
        origin == (base := URL(beginning)).origin() and path.startswith(base.raw_path)
        for beginning in beginnings
    )


def _impossible(host: str, *, allow_private: bool) -> str:
    """Returns the reason no public host can have this name. Empty if one can."""
    labels = host.removesuffix(".").split(".")
    if len(host) > MAX_HOST_CHARS or not all(map(_LABEL.fullmatch, labels)):
        return (
            "is not a valid host: its labels must be 1 to 63 letters, digits and hyphens, "
            f"separated by dots, and at most {MAX_HOST_CHARS} characters in total"
        )
    if labels[-1].isdigit():
        return "is neither a host name nor an IPv4 address with numbers up to 255"
    if not allow_private and len(labels) == 1:
        return "has no domain, so it is not public"
    if not allow_private and (labels[-1] in _NEVER_PUBLIC or labels[-2:] == ["home", "arpa"]):
        return f"is never public because .{labels[-1]} is not an internet domain"
    return ""


def is_public(address: Address) -> bool:
    """Returns whether an address, and any address embedded in it, is on the public internet."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None and not is_public(address.sixtofour):
            return False
        if address.is_site_local:  # fec0::/10, which is_global does not handle: RFC 3879
            return False
    # NAT64 (64:ff9b::/96), which may lead anywhere, is reserved.
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_unspecified
    )


def _address_in(host: str) -> Address | None:
    """Returns a numeric host's address, in any spelling that the resolver accepts."""
    name = host.rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761, 6.3
        return IPv4Address("127.0.0.1")
    try:
        return ip_address(name)
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(name))
    except (OSError, ValueError):
        return None
