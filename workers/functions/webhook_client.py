"""Posts to a URL that a caller chose, but to no address that the caller must not reach through us.

The name is resolved once, all of its addresses are checked, and the connection goes to one of them.
So a name server that answers differently the second time is not asked again. Certificate, SNI and
Host are those of the name.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import Any, NamedTuple

from aiohttp import (
    ClientError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)
from aiohttp.abc import AbstractResolver, ResolveResult

from shared.errors import Unavailable
from shared.webhooks import WebhookUrlForbidden, is_public, parse_webhook_url

CONNECT_LIMIT_S = 5.0
TOTAL_LIMIT_S = 20.0
READ_BYTES = 1024
"""The part of the answer that is logged. Only the status counts."""
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class WebhookResponse(NamedTuple):
    """A receiver's response: its status and the first words of it."""

    status: int
    words: str


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of `host`, by this machine's resolver.

    Raises:
        OSError: it has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found))


class WebhookClient:
    """Posts to one webhook.

    Args:
        url: as the caller gave it.
        allow_private: whether any address and http are allowed, for one machine.
        resolve: gives all addresses of a host and port.
    """

    def __init__(
        self, url: str, *, allow_private: bool = False, resolve: Resolve = resolve
    ) -> None:
        self._url = url
        self._allow_private = allow_private
        self._resolve = resolve

    async def post(self, headers: Mapping[str, str], body: bytes) -> WebhookResponse:
        """Posts once and follows no redirect.

        Raises:
            WebhookUrlForbidden: the URL is not one for webhooks, or one of its addresses is not
                public.
            Unavailable: no answer in time.
        """
        url = parse_webhook_url(self._url, allow_private=self._allow_private)
        addresses = await self._addresses(url.host or "", url.port or 0)
        connector = TCPConnector(
            resolver=_FixedResolver(addresses),
            socket_factory=_sockets_for(addresses),
            force_close=True,
            happy_eyeballs_delay=None,
        )
        timeout = ClientTimeout(total=TOTAL_LIMIT_S, connect=CONNECT_LIMIT_S)
        session = ClientSession(
            connector=connector,
            timeout=timeout,
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )
        try:
            async with (
                session,
                session.post(url, data=body, headers=headers, allow_redirects=False) as answer,
            ):
                return WebhookResponse(answer.status, await _first_words(answer))
        except (ClientError, OSError, ValueError) as error:
            # aiohttp's own time limits are TimeoutError, which is an OSError.
            reason = f"{url.host}: {str(error) or type(error).__name__}"
            raise Unavailable(reason, public=reason) from error  # of the caller's own receiver

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            async with asyncio.timeout(CONNECT_LIMIT_S):
                addresses = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            reason = f"{host} could not be resolved: {error}"
            raise Unavailable(reason, public=reason) from error
        private = [address for address in addresses if not is_public(ip_address(address))]
        if private and not self._allow_private:
            raise WebhookUrlForbidden(
                f"{host} is {private[0]}, which is not public", field="webhook"
            )
        return list(addresses)


class _FixedResolver(AbstractResolver):
    """Gives a connector the addresses that were checked, whatever it asks for."""

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


def _sockets_for(addresses: Sequence[str]) -> Any:
    """Makes sockets for these addresses only, because aiohttp resolves no literal addresses."""

    def make(info: Any) -> socket.socket:
        family, kind, proto, _, sockaddr = info
        if sockaddr[0] not in addresses:
            raise OSError(errno.EACCES, f"{sockaddr[0]} was not checked")
        return socket.socket(family, kind, proto)

    return make


async def _first_words(answer: ClientResponse) -> str:
    """The start of the body of a failure. Empty after a success."""
    if answer.ok:
        return ""
    try:
        return (await answer.content.read(READ_BYTES)).decode(errors="replace")
    except (ClientError, OSError):
        return ""
