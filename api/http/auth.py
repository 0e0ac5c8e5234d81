"""Authentication: maps the API key of a request to its caller. Routes under /v1 do this first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol, Self

from prometheus_client import Counter

from api.errors import Unauthorized
from api.http.key_refresh import LiveDirectory
from api.http.loopback import OpenOnLoopback
from shared.catalog import Catalog
from shared.errors import Unavailable
from shared.settings import ApiSettings
from shared.stores.key_stores import key_store, served_by
from shared.tenants.api_key import parse_key
from shared.tenants.key_store import KeyStore
from shared.tenants.plan import Caller

DENIED = Counter(
    "penstock_api_keys_denied_total",
    "Requests without a valid API key: missing, ambiguous, malformed, unknown, revoked, expired.",
    ["reason"],
)
RawHeaders = Iterable[tuple[bytes, bytes]]
HOW_TO_SEND = "send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'"
_SCHEMES = frozenset({b"bearer", b"token"})
"""`Token` is for older clients of Replicate."""


class Access(Protocol):
    """Says who may call this API. An async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def caller_of(self, headers: RawHeaders) -> Caller:
        """Returns the caller of a request with these headers, whose names are in lower case.

        Raises:
            Unauthorized: the key is missing or wrong.
            Forbidden: this caller may not call the API at all.
            Unavailable: no keys are known yet.
        """
        ...

    async def meet(self, headers: RawHeaders) -> None:
        """Looks for the key in these headers if it is not known yet, for a bounded time."""
        ...

    def keys_status(self) -> str:
        """`ok`, `not required`, or the reason why no key can be checked."""
        ...

    @property
    def store(self) -> KeyStore | None:
        """Where keys are administered. None where no key is required."""
        ...

    async def refresh(self) -> None:
        """Reads the keys again now."""
        ...


def access_of(settings: ApiSettings, catalog: Catalog | None = None) -> Access:
    """Who may call an API with these settings.

    Args:
        settings: of this process.
        catalog: the models that plans and keys in a file may name. None: not checked.

    Raises:
        ConfigurationError: no keys are set although others can reach this API, or the keys are not
            valid.
    """
    if not settings.keys_url:
        return OpenOnLoopback(settings.host, settings.cors_origins)
    served = (
        None if catalog is None else served_by(catalog, allow_private=settings.webhooks_private)
    )
    return ApiKeys(LiveDirectory(key_store(settings.keys_url), served=served))


class ApiKeys:
    """Lets callers in by their keys.

    Args:
        directory: the keys. It is opened and closed with this object.
        clock: Unix seconds.
    """

    def __init__(self, directory: LiveDirectory, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self._clock = clock

    async def __aenter__(self) -> Self:
        await self.directory.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.directory.__aexit__(kind, error, trace)

    def caller_of(self, headers: RawHeaders) -> Caller:
        """Returns the caller of a request with these headers, whose names are in lower case.

        Raises:
            Unauthorized: the key is missing or wrong, or two keys differ.
            Unavailable: no keys are known yet.
        """
        sent = _sent_keys(headers)
        if len(sent) != 1:
            raise _denied("ambiguous" if sent else "missing", _REASONS[bool(sent)])
        key = parse_key(sent.pop())
        if key is None:
            raise _denied("malformed", _NOT_VALID)
        directory = self.directory.current()
        if directory is None:
            raise Unavailable(public="the API keys can't be checked now; try again")
        now_s = self._clock()
        state, caller = directory.find(key, now_s)
        if state == "valid":
            self.directory.uses[key.id] = int(now_s)
            return caller
        raise _denied(state, _NOT_VALID if state == "unknown" else f"the API key is {state}")

    async def meet(self, headers: RawHeaders) -> None:
        """Looks for the key in these headers if it is not known yet, for a bounded time.

        It may have been created, or have got its new secret, a moment ago.
        """
        sent, directory = _sent_keys(headers), self.directory.current()
        key = parse_key(sent.pop()) if len(sent) == 1 else None
        if key is None or directory is None:
            return
        # All that is not known takes the same time, an id without its secret too.
        if directory.find(key, self._clock()).state == "unknown":
            await self.directory.look_again(key)

    def keys_status(self) -> str:
        """`ok`, or the reason why no key can be checked."""
        return self.directory.status()

    @property
    def store(self) -> KeyStore:
        """Where keys are administered."""
        return self.directory.store

    async def refresh(self) -> None:
        """Reads the keys again now."""
        await self.directory.refresh()


_NOT_VALID = "the API key is not valid"
_REASONS = (f"an API key is needed: {HOW_TO_SEND}", "two API keys were sent, and they differ")


def _sent_keys(headers: RawHeaders) -> set[str]:
    """All keys in the headers. Bytes that are not ASCII make a key that nobody has."""
    sent = set[str]()
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() not in _SCHEMES:
                continue
        elif name == b"x-api-key":
            key = value
        else:
            continue
        if key := key.strip():
            sent.add(key.decode("ascii", "replace"))
    return sent


def _denied(reason: str, message: str) -> Unauthorized:
    DENIED.labels(reason).inc()
    return Unauthorized(message)
