"""The directory of keys, tenants and plans: one JSON document, and what a process reads from it.

    {
      "plans": {"team": {"weight": 2.0, "requests_per_min": 600}},
      "tenants": {"acme": {"plan": "team"}},
      "keys": [{"id": "4fJ0aQz81LmN", "tenant": "acme", "name": "website", "salt": "…",
                "hash": "…", "created_s": 1767225600}]
    }

A tenant that is not listed, or has no plan, has the plan `default` if there is one. Otherwise it
has no limits. A file and Redis hold the same document.
"""

from __future__ import annotations

import hmac
import math
import secrets
from typing import Annotated, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from shared.errors import ConfigurationError
from shared.tenants.api_key import ID_PATTERN, SALT_BYTES, ApiKey, hash_of
from shared.tenants.plan import DEFAULT_PLAN, Caller, Limits, Plan

LONGEST_TENANT_BYTES = 256
"""The tenant is an attribute of each message. Attributes have at most 1,024 bytes."""
MOST_KEYS = 10_000
DEFAULT_PLAN_NAME = "default"
HASH_BYTES = 32
Scope: TypeAlias = Literal[
    "all",
    "read",
    "embeddings",
    "images",
    "text",
    "predictions",
    "files",
    "batches",
    "usage",
    "admin",
]
"""What a key may do. `read`: GET everywhere. `all`: everything but administration (`admin`)."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
PlanName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Seconds = Annotated[int, msgspec.Meta(ge=0)]
"""Unix time."""
_Salt = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{2 * SALT_BYTES}}}$")]
_Hash = Annotated[str, msgspec.Meta(pattern=rf"^([0-9a-f]{{{2 * HASH_BYTES}}})?$")]


class StoredKey(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What is stored of a key. The key itself is not among it."""

    id: Annotated[str, msgspec.Meta(pattern=f"^{ID_PATTERN}$")]
    tenant: str
    name: Name
    salt: _Salt
    hash: _Hash
    """SHA-256 of salt and key, in hex."""
    created_s: Seconds
    previous_hash: _Hash = ""
    """The same of the secret before the last rotation."""
    previous_until_s: Seconds = 0
    """Until when that secret is accepted."""
    scopes: tuple[Scope, ...] = ("all",)
    models: tuple[str, ...] | None = None
    """The models that the key may use. None: all."""
    limits: Limits | None = None
    expires_s: Seconds | None = None
    revoked_s: Seconds | None = None
    """When it was revoked. It is refused from then on, whatever the clock of an instance says."""


class StoredTenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is stored of a tenant."""

    plan: str


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole directory as stored."""

    plans: dict[PlanName, Plan] = msgspec.field(default_factory=dict)
    tenants: dict[str, StoredTenant] = msgspec.field(default_factory=dict)
    keys: tuple[StoredKey, ...] = ()


KeyState: TypeAlias = Literal["valid", "unknown", "revoked", "expired"]


class Found(NamedTuple):
    """What the directory knows of a key that was sent."""

    state: KeyState
    caller: Caller
    """Whose key it is, if the state is not `unknown`."""


class _Entry(NamedTuple):
    """One key, ready to be compared."""

    salt: bytes
    hash: bytes
    previous_hash: bytes
    previous_until_s: float
    expires_s: float
    is_revoked: bool
    caller: Caller


class Directory:
    """A document in the form in which requests are checked. It does not change.

    Args:
        document: a document that `decode_document` accepted.
    """

    def __init__(self, document: Document) -> None:
        self._entries = {key.id: _entry(key, document) for key in document.keys}

    def find(self, key: ApiKey, now_s: float) -> Found:
        """Whose key this is. Takes one digest and two comparisons, whatever the key is.

        Args:
            key: a well-formed key.
            now_s: Unix time.
        """
        entry = self._entries.get(key.id, _NOBODY)
        given = hash_of(entry.salt, key)
        # No shortcuts: an unknown id, a wrong secret, and a revoked or expired key take as long.
        is_current = hmac.compare_digest(given, entry.hash)
        is_previous = hmac.compare_digest(given, entry.previous_hash)
        is_known = is_current | (is_previous & (now_s < entry.previous_until_s))
        place = 2 * entry.is_revoked + (now_s >= entry.expires_s)
        return Found(_STATES[is_known][place], entry.caller)


_STATES: tuple[tuple[KeyState, ...], tuple[KeyState, ...]] = (
    ("unknown", "unknown", "unknown", "unknown"),
    ("valid", "expired", "revoked", "revoked"),
)
_NO_HASH = bytes(HASH_BYTES)
"""Nobody knows an input with this digest."""
_NOBODY = _Entry(
    secrets.token_bytes(SALT_BYTES),
    secrets.token_bytes(HASH_BYTES),
    _NO_HASH,
    previous_until_s=0.0,
    expires_s=math.inf,
    is_revoked=False,
    caller=Caller(),
)
"""Compared in place of a key that is not there."""


def _entry(key: StoredKey, document: Document) -> _Entry:
    caller = Caller(
        tenant=key.tenant,
        key_id=key.id,
        plan=plan_of(key.tenant, document),
        plan_name=plan_name_of(key.tenant, document),
        key_limits=key.limits,
        models=None if key.models is None else frozenset(key.models),
        scopes=None if key.scopes == ("all",) else frozenset(key.scopes),
    )
    return _Entry(
        bytes.fromhex(key.salt),
        bytes.fromhex(key.hash),
        bytes.fromhex(key.previous_hash) or _NO_HASH,
        key.previous_until_s,
        math.inf if key.expires_s is None else key.expires_s,
        key.revoked_s is not None,
        caller,
    )


def plan_of(tenant: str, document: Document) -> Plan:
    """The plan of a tenant."""
    return document.plans.get(plan_name_of(tenant, document), DEFAULT_PLAN)


def plan_name_of(tenant: str, document: Document) -> str:
    """The name of a tenant's plan. Empty if it has none."""
    stored = document.tenants.get(tenant)
    name = DEFAULT_PLAN_NAME if stored is None else stored.plan
    return name if name in document.plans else ""


def encode_document(document: Document) -> bytes:
    """The document as JSON, for people too."""
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def decode_document(data: bytes, source: str) -> Document:
    """Reads and checks a document.

    Args:
        data: JSON.
        source: where it is from, for errors.

    Raises:
        ConfigurationError: it is not valid. `field` and the message name the place.
    """
    try:
        document = msgspec.json.decode(data, type=Document)
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        raise _wrong(source, place.rstrip("`").lstrip("."), reason) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _wrong(source, "", f"not JSON: {error}") from error
    for place, reason in _mistakes(document):
        raise _wrong(source, place, reason)
    return document


def _mistakes(document: Document) -> list[tuple[str, str]]:
    found = [("keys", f"more than {MOST_KEYS}")] if len(document.keys) > MOST_KEYS else []
    for tenant, stored in document.tenants.items():
        if reason := tenant_mistake(tenant):
            found.append((f"tenants[{tenant[:80]!r}]", reason))
        if stored.plan not in document.plans:
            found.append((f"tenants[{tenant!r}].plan", f"there is no plan {stored.plan[:80]!r}"))
    ids = set[str]()
    for number, key in enumerate(document.keys):
        if reason := tenant_mistake(key.tenant):
            found.append((f"keys[{number}].tenant", reason))
        if not key.hash:
            found.append((f"keys[{number}].hash", "is empty"))
        if key.id in ids:
            found.append((f"keys[{number}].id", f"{key.id} is there twice"))
        ids.add(key.id)
    return found


def tenant_mistake(tenant: str) -> str:
    """Why this is no name of a tenant. Empty if it is one."""
    if tenant and tenant.isprintable() and len(tenant.encode()) <= LONGEST_TENANT_BYTES:
        return ""
    return f"a tenant's name is printable and has 1 to {LONGEST_TENANT_BYTES} bytes"


def _wrong(source: str, place: str, reason: str) -> ConfigurationError:
    where = f"{place}: " if place else ""
    return ConfigurationError(f"PENSTOCK_KEYS_URL: {source}: {where}{reason}", field=place or None)
