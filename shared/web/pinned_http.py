"""HTTP requests to a URL that a caller chose, without access to our internal addresses.

The name is resolved once, all of its addresses are checked, and the connection is made to one of
them, so a name server has no second chance to answer differently. The certificate, SNI, and Host
use the name.

aiohttp is imported when the first session is opened, because the import takes 0.15 s of CPU time,
and few APIs fetch anything.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

from yarl import URL

from shared.errors import Unavailable
from shared.web.public_url import Reach, UrlForbidden

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientTimeout
    from aiohttp.abc import AbstractResolver, ResolveResult

CONNECT_LIMIT_S = 5.0
LOOK_UPS = 64
"""Maximum number of concurrent name lookups.

If a name server does not respond, a lookup takes half a minute, even if no caller is waiting
anymore. A tenant may run eight fetches at once, each abandoned after CONNECT_LIMIT_S, so its names
occupy at most 48 lookups.
"""
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
# The event loop has only a few threads, and all other connections of the process need them.
_threads = ThreadPoolExecutor(LOOK_UPS, thread_name_prefix="look-up")


async def resolve(host: str, port: int) -> list[str]:
    """Returns all addresses of `host` from this machine's resolver.

    Raises:
        OSError: the host has no addresses.
    """
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    addresses = await asyncio.get_running_loop().run_in_executor(_threads, look_up)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in addresses))


@asynccontextmanager
async def open_pinned_session(
    url: URL,
    reach: Reach,
    timeout: ClientTimeout,
    *,
    resolve: Resolve = resolve,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[ClientSession]:
    """Opens a session that connects only to the checked addresses of the URL's host.

    The session has no cookies, proxy, or credentials, and does not decompress anything.

    Args:
        tls: trusted certificate authorities. None means the machine's defaults.

    Raises:
        UrlForbidden: one of the addresses is not allowed.
        Unavailable: the host has no addresses.
    """
    from aiohttp import ClientSession, DummyCookieJar, TCPConnector

    addresses = await _addresses(url.host or "", url.port or 0, reach, resolve)
    connector = TCPConnector(
        resolver=_create_fixed_resolver(addresses),
        socket_factory=_sockets_for(addresses),
        force_close=True,
        happy_eyeballs_delay=None,
        ssl=True if tls is None else tls,
    )
    async with ClientSession(
        connector=connector,
        timeout=timeout,
        cookie_jar=DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    ) as session:
        yield session


async def _addresses(host: str, port: int, reach: Reach, resolve: Resolve) -> list[str]:
    try:
        async with asyncio.timeout(CONNECT_LIMIT_S):
            addresses = await resolve(host, port)
    except (OSError, UnicodeError) as error:
        reason = f"{host} could not be resolved: {error}"
        raise Unavailable(reason, public=reason) from error
    for address in addresses:
        if not reach.allows(ip_address(address)):
            # Omits the address, so that callers can't look up names in our network.
            raise UrlForbidden(f"{host} resolves to an address that is not public")
    return list(addresses)


def _create_fixed_resolver(addresses: Sequence[str]) -> AbstractResolver:
    from aiohttp.abc import AbstractResolver

    class FixedResolver(AbstractResolver):
        """Returns the checked addresses to a connector, no matter which host it requests."""

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            return [_resolve_result(host, address, port) for address in addresses]

        async def close(self) -> None:
            """Does nothing, because the addresses are fixed and no resources are held."""

    return FixedResolver()


def _resolve_result(host: str, address: str, port: int) -> ResolveResult:
    return {
        "hostname": host,
        "host": address,
        "port": port,
        "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
        "proto": socket.IPPROTO_TCP,
        "flags": socket.AI_NUMERICHOST,
    }


def _sockets_for(addresses: Sequence[str]) -> Any:
    """Creates sockets only for these addresses. aiohttp does not resolve literal addresses."""

    def make(info: Any) -> socket.socket:
        family, kind, proto, _, sockaddr = info
        if sockaddr[0] not in addresses:
            raise OSError(errno.EACCES, f"{sockaddr[0]} is not one of the verified addresses")
        return socket.socket(family, kind, proto)

    return make
