"""HTTP to a URL that a caller chose, so that it can't reach our addresses.

The name is resolved once, all of its addresses are checked, and the connection goes to one of them.
So a name server that answers differently the second time is not asked again. Certificate, SNI and
Host are those of the name.

aiohttp is imported by the first session: it takes 0.15 s of CPU time, and few APIs fetch anything.
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
from shared.public_url import Reach, UrlForbidden

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientTimeout
    from aiohttp.abc import AbstractResolver, ResolveResult

CONNECT_LIMIT_S = 5.0
LOOK_UPS = 64
"""Names that are looked up at a time. One whose name server is silent is looked up for half a
minute, whoever waits for it. A tenant has eight fetches at a time, and gives each up after
CONNECT_LIMIT_S: so its names take 48 of these at most."""
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
# The threads of the event loop are few, and all other connections of the process need them.
_threads = ThreadPoolExecutor(LOOK_UPS, thread_name_prefix="look-up")


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of `host`, by this machine's resolver.

    Raises:
        OSError: it has none.
    """
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    addresses = await asyncio.get_running_loop().run_in_executor(_threads, look_up)
    return list(dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in addresses))


@asynccontextmanager
async def pinned_session(
    url: URL,
    reach: Reach,
    timeout: ClientTimeout,
    *,
    resolve: Resolve = resolve,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[ClientSession]:
    """Opens a session that connects to the checked addresses of the URL's host only.

    It has no cookies, no proxy and no credentials, and it decompresses nothing.

    Args:
        url: from `parse_public_url`.
        resolve: gives all addresses of a host and port.
        tls: which authorities are trusted. None: those of this machine.

    Raises:
        UrlForbidden: one of the addresses is not allowed.
        Unavailable: the host has no address.
    """
    from aiohttp import ClientSession, DummyCookieJar, TCPConnector

    addresses = await _addresses(url.host or "", url.port or 0, reach, resolve)
    connector = TCPConnector(
        resolver=_fixed_resolver(addresses),
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
            # Without the address: names of our network are not to be asked for here.
            raise UrlForbidden(f"{host} has an address that is not public")
    return list(addresses)


def _fixed_resolver(addresses: Sequence[str]) -> AbstractResolver:
    from aiohttp.abc import AbstractResolver

    class FixedResolver(AbstractResolver):
        """Gives a connector the addresses that were checked, whatever it asks for."""

        async def resolve(
            self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
        ) -> list[ResolveResult]:
            return [_resolved(host, address, port) for address in addresses]

        async def close(self) -> None:
            """Holds nothing."""

    return FixedResolver()


def _resolved(host: str, address: str, port: int) -> ResolveResult:
    return {
        "hostname": host,
        "host": address,
        "port": port,
        "family": socket.AF_INET6 if ":" in address else socket.AF_INET,
        "proto": socket.IPPROTO_TCP,
        "flags": socket.AI_NUMERICHOST,
    }


def _sockets_for(addresses: Sequence[str]) -> Any:
    """Makes sockets for these addresses only, because aiohttp resolves no literal addresses."""

    def make(info: Any) -> socket.socket:
        family, kind, proto, _, sockaddr = info
        if sockaddr[0] not in addresses:
            raise OSError(errno.EACCES, f"{sockaddr[0]} was not checked")
        return socket.socket(family, kind, proto)

    return make
