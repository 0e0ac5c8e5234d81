"""Access without keys, for APIs that only their own machine can reach.

Browsers on that machine open pages of strangers. Such a page must not use the API. It can send a
form to http://127.0.0.1:8080 from its own origin, and its own name can point to 127.0.0.1 (DNS
rebinding). So the names in `Host` and `Origin` must be names of this machine. A reverse proxy on
this machine passes the public name, so it opens nothing to the outside either.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from api.errors import Forbidden
from shared.errors import ConfigurationError
from shared.loopback import is_loopback
from shared.tenants.plan import Caller


class OpenOnLoopback:
    """Lets in everyone on this machine, as the tenant `default`.

    Args:
        host: where the API listens.
        cors_origins: the setting: origins that may call it, comma-separated, or `*`.

    Raises:
        ConfigurationError: other machines can reach `host`.
    """

    def __init__(self, host: str, cors_origins: str) -> None:
        if not is_loopback(host):
            raise ConfigurationError(
                f"PENSTOCK_KEYS_URL: is needed, because others can reach PENSTOCK_HOST={host}; "
                "without keys the API listens on 127.0.0.1 only",
                field="keys_url",
            )
        self._origins = {origin.strip().encode("latin-1") for origin in cors_origins.split(",")}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def caller_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Returns the caller, whatever key the headers have.

        Raises:
            Forbidden: the request is for another machine's name, or from a page of another origin.
        """
        for name, value in headers:
            if name == b"host" and value not in _LOCAL and not _names_loopback(b"//" + value):
                raise Forbidden(
                    "host: without PENSTOCK_KEYS_URL this API answers only for 127.0.0.1, [::1] "
                    "and localhost",
                    field="host",
                )
            if name == b"origin" and not self._is_allowed(value):
                raise Forbidden(
                    "origin: pages of this origin may not call this API: see PENSTOCK_CORS_ORIGINS",
                    field="origin",
                )
        return _ANYONE

    async def meet(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Does nothing."""

    def keys_status(self) -> str:
        """`not required`."""
        return "not required"

    store = None
    """There is no key to administer."""

    async def refresh(self) -> None:
        """Does nothing."""

    def _is_allowed(self, origin: bytes) -> bool:
        return origin in self._origins or b"*" in self._origins or _names_loopback(origin)


_ANYONE = Caller()
_LOCAL = frozenset({b"127.0.0.1:8080", b"localhost:8080"})
"""Known without parsing."""


def _names_loopback(url: bytes) -> bool:
    try:
        host = urlsplit(url.decode("latin-1")).hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)
