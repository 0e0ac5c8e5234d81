"""Checks a webhook's URL without resolving its host, for the API and the delivering function.

The function also checks the addresses of the host when it connects
(workers/functions/webhook_client.py). The host is not resolved here, because it may resolve to
something else by then.
"""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address

from yarl import URL

from shared.errors import BadInput


class WebhookUrlForbidden(BadInput):
    """The URL leads where webhooks must not go."""

    code = "webhook_forbidden"


def parse_webhook_url(given: str, *, allow_private: bool) -> URL:
    """Returns the parsed URL.

    The connection uses the same parser, because two may see two hosts in one URL.

    Args:
        given: as the caller wrote it.
        allow_private: whether any address and http are allowed, for one machine.

    Raises:
        WebhookUrlForbidden: webhooks are not delivered there, whatever the name resolves to.
    """
    schemes = ("https", "http") if allow_private else ("https",)
    try:
        url = URL(given)
        host, port = url.host, url.port
    except ValueError as error:
        raise WebhookUrlForbidden(f"{given!r} is not a URL: {error}", field="webhook") from error
    if url.scheme not in schemes or not host or not port:
        raise WebhookUrlForbidden(
            f"{given!r} is not an {' or '.join(schemes)} URL", field="webhook"
        )
    if url.user is not None or url.password is not None:
        raise WebhookUrlForbidden(
            "a webhook URL must not have credentials. Verify the signature instead.",
            field="webhook",
        )
    if not allow_private and (address := _address_in(host)) is not None and not is_public(address):
        raise WebhookUrlForbidden(f"{host} is {address}, which is not public", field="webhook")
    return url


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Returns whether an address, and the one embedded in it, is on the public internet."""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address.sixtofour is not None and not is_public(address.sixtofour):
            return False
    # NAT64 (64:ff9b::/96), which may lead anywhere, is reserved.
    return address.is_global and not (
        address.is_multicast or address.is_reserved or address.is_unspecified
    )


def _address_in(host: str) -> IPv4Address | IPv6Address | None:
    """Returns the address of a numeric host, in any spelling that the resolver accepts."""
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
