"""Posts to a URL that a caller chose, and to no address that a caller must not reach through us.

The name is resolved once, every address it has is judged, and the connection goes to one of those: a name server that
answers differently the second time gets no second time. Certificate, SNI and Host are the name's own.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector
from aiohttp.abc import AbstractResolver, ResolveResult

from shared.errors import BadInput, Unavailable

CONNECT_LIMIT_S = 5.0
TOTAL_LIMIT_S = 20.0
READ_BYTES = 1024
"""Of the answer, for the log; only its status counts."""
# They carry an IPv4 address in their last 32 bits, or in bits 16 to 48 (6to4): RFC 6052, RFC 8215, RFC 3056.
_TRANSLATED = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Forbidden(BadInput):
    """The URL leads where webhooks must not go."""

    code = "webhook_forbidden"


class Answer(NamedTuple):
    """How a receiver answered: its status, and the first words of it."""

    status: int
    words: str


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of `host`, by this machine's resolver.

    Raises:
        OSError: it has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class Destination:
    """Where a webhook goes.

    Args:
        url: as the caller gave it.
        allow_private: whether any address may be reached, and http used; for one machine.
        resolve: gives all addresses of a host and port.
    """

    def __init__(self, url: str, *, allow_private: bool = False, resolve: Resolve = resolve) -> None:
        self._url = url
        self._allow_private = allow_private
        self._resolve = resolve

    async def post(self, headers: Mapping[str, str], body: bytes) -> Answer:
        """Posts once; follows no redirect.

        Raises:
            Forbidden: the URL is none of https, or one of its addresses is not public.
            Unavailable: no answer in time.
        """
        host, port = self._host_and_port()
        connector = TCPConnector(resolver=_Judged(await self._addresses(host, port)), force_close=True)
        timeout = ClientTimeout(total=TOTAL_LIMIT_S, connect=CONNECT_LIMIT_S)
        session = ClientSession(
            connector=connector, timeout=timeout, cookie_jar=DummyCookieJar(), auto_decompress=False, trust_env=False
        )
        try:
            async with (
                session,
                session.post(self._url, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                return Answer(answer.status, (await answer.content.read(READ_BYTES)).decode(errors="replace"))
        except (ClientError, OSError, ValueError) as error:
            # aiohttp's own time limits are TimeoutError, which is an OSError.
            raise Unavailable(f"{host}: {str(error) or type(error).__name__}") from error

    def _host_and_port(self) -> tuple[str, int]:
        try:
            parts = urlsplit(self._url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise Forbidden(f"{self._url!r} is no URL: {error}", field="webhook") from error
        schemes = {"https": 443} | ({"http": 80} if self._allow_private else {})
        if parts.scheme not in schemes or not host:
            raise Forbidden(f"{self._url!r} is no {' or '.join(schemes)} URL", field="webhook")
        return host, port or schemes[parts.scheme]

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            raise Unavailable(f"{host} could not be resolved: {error}") from error
        private = [address for address in addresses if not is_public(ip_address(address))]
        if private and not self._allow_private:
            raise Forbidden(f"{host} is {private[0]}, which is not public", field="webhook")
        return list(addresses)


class _Judged(AbstractResolver):
    """Gives a connector the addresses that were judged, whatever it asks for."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST,
            )
            for address in self._addresses
        ]

    async def close(self) -> None:
        """Holds nothing."""


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet, and so are those that it stands for."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1]) or _translated(address)
        if inner:
            return is_public(inner)
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _translated(address: IPv6Address) -> IPv4Address | None:
    if any(address in network for network in _TRANSLATED):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None
