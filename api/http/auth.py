"""Authenticates and authorizes requests. Routes under /v1 run these checks first.

- Keys: requests read an in-memory snapshot of the key directory (api/http/key_refresh.py).
- Scopes: each endpoint declares the scope that a key needs (api/http/router.py).
- Access without keys: allowed only if no other machine can reach the API. Browsers on this machine
  open third-party pages, which must not be able to use the API. Such a page can submit a form to
  http://127.0.0.1:8080 from its origin, and the page's host name can be made to resolve to
  127.0.0.1 (DNS rebinding). Therefore, `Host` and `Origin` must name this machine. A reverse proxy
  on this machine forwards the public host name, so the API is not exposed through a proxy either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Literal, Protocol, Self, TypeAlias
from urllib.parse import urlsplit

from prometheus_client import Counter

from api.errors import Forbidden, Unauthorized
from api.http.key_refresh import LiveDirectory
from shared.errors import ConfigurationError, Unavailable
from shared.models.catalog import Catalog
from shared.process.loopback import is_loopback
from shared.settings import ApiSettings
from shared.stores.key_stores import KeyCopy, key_store, list_served_names
from shared.tenants.api_key import parse_key
from shared.tenants.directory import BudgetHolder, Directory, Scope
from shared.tenants.key_store import KeyStore
from shared.tenants.plan import Caller

KeyScope: TypeAlias = Scope | Literal["any"]
"""The scope a key needs for an endpoint. `any`: any valid key is accepted."""

_ANYONE = Caller()

DENIED = Counter(
    "penstock_api_keys_denied_total",
    "Requests without a valid API key: missing, ambiguous, malformed, unknown, revoked, expired.",
    ["reason"],
)
RawHeaders = Iterable[tuple[bytes, bytes]]
HOW_TO_SEND = "send it as 'Authorization: Bearer <key>' or as 'x-api-key: <key>'"
_SCHEMES = frozenset({b"bearer", b"token"})
"""Older Replicate clients send `Token`."""

_NOT_VALID = "the API key is invalid"
_FROZEN = "this API key's tenant is frozen; contact the operator of this API"
_LINK_FROZEN = "this link's tenant is frozen; contact the operator of this API"
_REASONS = (
    f"an API key is required: {HOW_TO_SEND}",
    "two different API keys were sent; send only one",
)


class MissingScope(Forbidden):
    """This API key is not allowed to do this."""

    code = "missing_scope"


class TenantFrozen(Forbidden):
    """An operator has stopped serving this tenant, so retrying does not help."""

    code = "tenant_frozen"


class ModelForbidden(Forbidden):
    """This API key may not use this model."""

    code = "model_not_allowed"


class StoredWork(Protocol):
    """A model's stored result."""

    @property
    def endpoint(self) -> str:
        """The path of the endpoint that created the result. Empty for predictions."""

    @property
    def model(self) -> str:
        """Model name in the catalog."""


class AccessRules:
    """Decides which endpoints a key may call.

    Args:
        scopes: each endpoint's required scope, keyed by method and path template. An endpoint that
            is not listed requires an unrestricted key. HEAD is treated as GET.
    """

    def __init__(self, scopes: Mapping[tuple[str, str], KeyScope]) -> None:
        self._scopes = {
            (method, _strip_version(path)): scope for (method, path), scope in scopes.items()
        }

    def check(
        self, caller: Caller, method: str, path: str, stored: StoredWork | None = None
    ) -> None:
        """Rejects requests that the caller's key does not permit.

        Args:
            path: path template of the route, such as `/v1/files/{file_id}`.
            stored: the result that the request reads or changes, if a model computed that result.
                The key also needs the scope required by the result's endpoint.

        Raises:
            MissingScope: the key lacks a scope.
            ModelForbidden: the key may not use the model.
        """
        method = "GET" if method == "HEAD" else method
        _check_scope(caller, method, self.scope_of(method, path))
        if stored is not None:
            if stored.endpoint:
                _check_scope(caller, method, self.scope_of("POST", stored.endpoint))
            check_model(caller, stored.model)

    def may_see(self, caller: Caller, path: str, stored: StoredWork) -> bool:
        """Returns whether the caller can see this result in a list at `path`."""
        try:
            self.check(caller, "GET", path, stored)
        except Forbidden:
            return False
        return True

    def scope_of(self, method: str, path: str) -> KeyScope:
        """Returns the scope that an endpoint needs. The path may start with /v1, /v2 or neither."""
        return self._scopes.get((method, _strip_version(path)), "all")


def _strip_version(path: str) -> str:
    return path.removeprefix("/v1").removeprefix("/v2")


def _check_scope(caller: Caller, method: str, needed: KeyScope) -> None:
    held = caller.scopes
    if needed == "any" or (held is not None and needed in held):
        return
    reads = method == "GET"
    if needed != "admin" and (held is None or "all" in held or (reads and "read" in held)):
        return
    raise MissingScope(f"this API key does not have the required scope {needed!r}")


def check_model(caller: Caller, model: str) -> None:
    """Rejects a model that the caller's key may not use.

    Raises:
        ModelForbidden: the model is not among the key's models.
    """
    if caller.models is not None and model not in caller.models:
        raise ModelForbidden(f"this API key may not use the model {model!r}", field="model")


class OpenOnLoopback:
    """Admits all callers on this machine as the `default` tenant.

    Args:
        host: the address the API listens on.
        cors_origins: origins that may call the API, comma-separated, or `*`.

    Raises:
        ConfigurationError: other machines can reach `host`.
    """

    def __init__(self, host: str, cors_origins: str) -> None:
        if not is_loopback(host):
            raise ConfigurationError(
                "PENSTOCK_KEYS_URL: is required because other machines can reach "
                f"PENSTOCK_HOST={host}; without keys, the API must listen on 127.0.0.1",
                field="keys_url",
            )
        self._origins = {origin.strip().encode("latin-1") for origin in cors_origins.split(",")}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    def caller_of(self, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Returns the caller, whatever keys the headers contain.

        Raises:
            Forbidden: the request is for a different host name, or comes from a page with a
                different origin.
        """
        for name, value in headers:
            if name == b"host" and not _is_loopback_host(value):
                raise Forbidden(
                    "host: must be 127.0.0.1, [::1] or localhost because PENSTOCK_KEYS_URL is not "
                    "set",
                    field="host",
                )
            if name == b"origin" and not self._is_allowed(value):
                raise Forbidden(
                    "origin: pages from this origin may not call this API; see "
                    "PENSTOCK_CORS_ORIGINS",
                    field="origin",
                )
        return _ANYONE

    def check_tenant(self, tenant: str) -> None:
        """Does nothing, because without keys, tenants can't be frozen."""

    async def meet(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Does nothing, because there are no keys to look up."""

    def keys_status(self) -> str:
        """Always `not required`."""
        return "not required"

    store = None
    """None, because without keys there is nothing to administer."""

    def budgets(self) -> frozenset[BudgetHolder]:
        """Empty, because without keys, tenants do not have plans."""
        return frozenset()

    async def refresh(self) -> None:
        """Does nothing, because there are no keys to read."""

    def _is_allowed(self, origin: bytes) -> bool:
        return origin in self._origins or b"*" in self._origins or _names_loopback(origin)


@lru_cache(maxsize=256)
def _is_loopback_host(value: bytes) -> bool:
    """Returns whether a Host header names this machine. The server limits its length."""
    return _names_loopback(b"//" + value)


def _names_loopback(url: bytes) -> bool:
    try:
        host = urlsplit(url.decode("latin-1")).hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)


class Access(Protocol):
    """Decides which callers may use this API. An async context manager."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    def caller_of(self, headers: RawHeaders) -> Caller:
        """Returns the caller who sent these headers. Header names are lowercase.

        Raises:
            Unauthorized: the key is missing or invalid.
            Forbidden: this caller may not call the API at all.
            Unavailable: the keys are not known yet.
        """
        ...

    def check_tenant(self, tenant: str) -> None:
        """Checks the tenant of a signed link, because such a link needs no key.

        Raises:
            TenantFrozen: the tenant is frozen.
            Unavailable: the tenants are not known yet.
        """
        ...

    async def meet(self, headers: RawHeaders) -> None:
        """Looks up the key in these headers if it is not known yet, for a limited time."""
        ...

    def keys_status(self) -> str:
        """`ok`, `not required`, or the reason keys can't be checked."""
        ...

    @property
    def store(self) -> KeyStore | None:
        """The store used to administer keys. None if keys are not required."""
        ...

    def budgets(self) -> frozenset[BudgetHolder] | None:
        """Tenants and keys that have a budget. None if the directory may have changed."""
        ...

    async def refresh(self) -> None: ...


def access_of(settings: ApiSettings, catalog: Catalog | None = None) -> Access:
    """Returns the access control for an API with these settings.

    Args:
        catalog: the models that plans and keys in a file may name. If None, the names are not
            checked.

    Raises:
        ConfigurationError: keys are not configured although other machines can reach this API, or
            the keys are invalid.
    """
    if not settings.keys_url:
        return OpenOnLoopback(settings.host, settings.cors_origins)
    served = (
        None
        if catalog is None
        else list_served_names(catalog, allow_private=settings.webhooks_private)
    )
    # The keys are in the same Redis as the records, which may be in another region.
    is_elsewhere = not settings.keys_url.startswith("file:") and (
        settings.keys_url != settings.redis_url
    )
    copy = KeyCopy(settings.redis_url) if is_elsewhere else None
    return ApiKeys(LiveDirectory(key_store(settings.keys_url), served=served, copy=copy))


class ApiKeys:
    """Admits callers by their API keys.

    Args:
        directory: key directory. Opened and closed by this object.
        clock: Unix seconds.
    """

    def __init__(self, directory: LiveDirectory, clock: Callable[[], float] = time.time) -> None:
        self.directory = directory
        self._clock = clock

    async def __aenter__(self) -> Self:
        await self.directory.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.directory.__aexit__(*exc)

    def caller_of(self, headers: RawHeaders) -> Caller:
        """Returns the caller who sent these headers. Header names are lowercase.

        Raises:
            Unauthorized: the key is missing or invalid, or two different keys were sent.
            TenantFrozen: the key's tenant is frozen.
            Unavailable: the keys are not known yet.
        """
        sent = _read_keys(headers)
        if len(sent) != 1:
            raise _count_denial("ambiguous" if sent else "missing", _REASONS[bool(sent)])
        key = parse_key(sent.pop())
        if key is None:
            raise _count_denial("malformed", _NOT_VALID)
        now_s = self._clock()
        state, caller = self._read_directory().find(key, now_s)
        if state == "valid":
            self.directory.uses[key.id] = int(now_s)
            return caller
        denial = _count_denial(
            state, _NOT_VALID if state == "unknown" else f"the API key is {state}"
        )
        raise TenantFrozen(_FROZEN) if state == "frozen" else denial

    def check_tenant(self, tenant: str) -> None:
        """Checks the tenant of a signed link, because such a link needs no key.

        Raises:
            TenantFrozen: the tenant is frozen.
            Unavailable: the tenants are not known yet.
        """
        if self._read_directory().is_frozen(tenant):
            raise TenantFrozen(_LINK_FROZEN)

    def _read_directory(self) -> Directory:
        directory = self.directory.current()
        if directory is None:
            raise Unavailable(public="API keys can't be verified right now; try again")
        return directory

    async def meet(self, headers: RawHeaders) -> None:
        """Looks up the key in these headers if it is not known yet, within a time limit.

        The key may have just been created, or its secret may have just been rotated.
        """
        sent, directory = _read_keys(headers), self.directory.current()
        key = parse_key(sent.pop()) if len(sent) == 1 else None
        if key is None or directory is None:
            return
        # Rejecting an unknown key always takes the same time, even for a known ID with the wrong
        # secret.
        if directory.find(key, self._clock()).state == "unknown":
            await self.directory.look_again(key)

    def keys_status(self) -> str:
        """`ok`, or the reason keys can't be checked."""
        return self.directory.status()

    @property
    def store(self) -> KeyStore:
        """The store used to administer keys."""
        return self.directory.store

    def budgets(self) -> frozenset[BudgetHolder] | None:
        """Tenants and keys that have a budget. None if the directory may have changed."""
        return self.directory.budgets()

    async def refresh(self) -> None:
        await self.directory.refresh()


def _read_keys(headers: RawHeaders) -> set[str]:
    """Returns all keys in the headers. A key with non-ASCII bytes matches no caller."""
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


def _count_denial(reason: str, message: str) -> Unauthorized:
    DENIED.labels(reason).inc()
    return Unauthorized(message)
