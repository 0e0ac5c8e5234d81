"""The directory of keys, tenants, and plans: one JSON document, and its in-memory form.

    {
      "plans": {"team": {"weight": 2.0, "requests_per_min": 600}},
      "tenants": {"acme": {"plan": "team"}},
      "keys": [{"id": "4fJ0aQz81LmN", "tenant": "acme", "name": "website", "salt": "…",
                "hash": "…", "created_s": 1767225600}]
    }

A tenant that is not listed or has no plan gets the `default` plan if there is one; otherwise, it
has no limits. The document is the same in files and in Redis.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import re
import secrets
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from shared.errors import MALFORMED, ConfigurationError
from shared.tenants.api_key import ID_PATTERN, SALT_BYTES, ApiKey, hash_of
from shared.tenants.plan import DEFAULT_PLAN, Caller, Limits, Plan, Rates

MAX_TENANT_BYTES = 256
"""The tenant is a message attribute, and attributes are limited to 1,024 bytes."""
MAX_KEYS = 10_000
DEFAULT_PLAN_NAME = "default"
HASH_BYTES = 32
Scope: TypeAlias = Literal[
    "all",
    "read",
    "embeddings",
    "images",
    "audio",
    "ocr",
    "text",
    "predictions",
    "files",
    "batches",
    "usage",
    "admin",
]
"""A key's scopes. `read`: GET on all routes. `all`: everything except administration (`admin`)."""
SCOPES: tuple[Scope, ...] = get_args(Scope)
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
PLAN_NAME_PATTERN = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
PlanName = Annotated[str, msgspec.Meta(pattern=f"^{PLAN_NAME_PATTERN}$")]
Seconds = Annotated[int, msgspec.Meta(ge=0)]
"""Unix time."""
_BY_NAME = frozenset({"plans", "tenants", "per_model"})
"""Fields that are followed by a user-chosen name in a path."""
_SPACE = re.compile(r"[\s,:]*")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_BYTE = re.compile(r"\(byte (\d+)\)")
_json = json.JSONDecoder()
_Salt = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{2 * SALT_BYTES}}}$")]
_Hash = Annotated[str, msgspec.Meta(pattern=rf"^([0-9a-f]{{{2 * HASH_BYTES}}})?$")]

KeyState: TypeAlias = Literal["valid", "unknown", "revoked", "expired", "frozen"]

_STATES: tuple[tuple[KeyState, ...], tuple[KeyState, ...]] = (
    ("unknown",) * 8,
    ("valid", "frozen", "expired", "expired", "revoked", "revoked", "revoked", "revoked"),
)
_NO_HASH = bytes(HASH_BYTES)
"""No known input has this digest."""


class Mistake(NamedTuple):
    """A mistake in a directory, and its path."""

    path: tuple[str | int, ...]
    reason: str

    @property
    def field_path(self) -> str:
        """The path as text, such as `plans['team'].budget_webhook`."""
        text = ""
        for before, step in zip((None, *self.path), self.path, strict=False):
            if isinstance(step, int):
                text += f"[{step}]"
            elif before in _BY_NAME:
                text += f"[{step[:80]!r}]"
            else:
                text += f".{step}" if text else step
        return text

    def below(self, *path: str | int) -> Mistake:
        return Mistake((*path, *self.path), self.reason)


class StoredKey(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A stored key, without the key itself."""

    id: Annotated[str, msgspec.Meta(pattern=f"^{ID_PATTERN}$")]
    tenant: str
    name: Name
    salt: _Salt
    hash: _Hash
    """SHA-256 of the salt and key, in hex."""
    created_s: Seconds
    previous_hash: _Hash = ""
    """Same as above, but for the secret before the last rotation."""
    previous_until_s: Seconds = 0
    """The previous secret is accepted until this Unix time."""
    scopes: tuple[Scope, ...] = ("all",)
    models: tuple[str, ...] | None = None
    """Models the key may use. None means all models."""
    limits: Limits | None = None
    expires_s: Seconds | None = None
    revoked_s: Seconds | None = None
    """When the key was revoked. Once set, the key is rejected regardless of an instance's clock.
    """


class StoredTenant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A stored tenant."""

    plan: str = ""
    """Empty means the default plan."""
    frozen_s: Seconds | None = None
    """When the tenant was frozen. Its keys are rejected, and its batches wait."""


class Document(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole directory as stored."""

    plans: dict[PlanName, Plan] = msgspec.field(default_factory=dict)
    tenants: dict[str, StoredTenant] = msgspec.field(default_factory=dict)
    keys: tuple[StoredKey, ...] = ()


class Found(NamedTuple):
    """The directory's entry for a key in a request."""

    state: KeyState
    caller: Caller
    """The key's owner, unless the state is `unknown`."""


class BudgetHolder(NamedTuple):
    """A tenant or a key that has a budget."""

    tenant: str
    key_id: str = ""
    """Empty if the budget is the tenant's."""


class _Entry(NamedTuple):
    """One key, ready for comparison."""

    salt: bytes
    hash: bytes
    previous_hash: bytes
    previous_until_s: float
    expires_s: float
    is_revoked: bool
    is_frozen: bool
    caller: Caller


class Directory:
    """A document in the form used for checking requests. Immutable.

    Args:
        document: a document accepted by `decode_document`.
    """

    def __init__(self, document: Document) -> None:
        self._entries = {key.id: _entry(key, document) for key in document.keys}
        self._frozen = {name for name in document.tenants if is_frozen(name, document)}

    def find(self, key: ApiKey, now_s: float) -> Found:
        """Finds a key's owner. Computes one digest and makes two comparisons for every key."""
        entry = self._entries.get(key.id, _NOBODY)
        key_hash = hash_of(entry.salt, key)
        # No shortcuts: unknown IDs, wrong secrets, and rejected keys all take the same time.
        is_current = hmac.compare_digest(key_hash, entry.hash)
        is_previous = hmac.compare_digest(key_hash, entry.previous_hash)
        is_known = is_current | (is_previous & (now_s < entry.previous_until_s))
        state = 4 * entry.is_revoked + 2 * (now_s >= entry.expires_s) + entry.is_frozen
        return Found(_STATES[is_known][state], entry.caller)

    def is_frozen(self, tenant: str) -> bool:
        return tenant in self._frozen

    @cached_property
    def budgets(self) -> frozenset[BudgetHolder]:
        """Returns the tenants that have keys and a budget, and the keys that have a budget."""
        holders = set[BudgetHolder]()
        for caller in (entry.caller for entry in self._entries.values()):
            if caller.plan.budget_usd_per_month is not None:
                holders.add(BudgetHolder(caller.tenant))
            limits = caller.key_limits
            if limits is not None and limits.budget_usd_per_month is not None:
                holders.add(BudgetHolder(caller.tenant, caller.key_id))
        return frozenset(holders)


_NOBODY = _Entry(
    secrets.token_bytes(SALT_BYTES),
    secrets.token_bytes(HASH_BYTES),
    _NO_HASH,
    previous_until_s=0.0,
    expires_s=math.inf,
    is_revoked=False,
    is_frozen=False,
    caller=Caller(),
)
"""Used in the comparison when the key does not exist."""


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
        is_frozen(key.tenant, document),
        caller,
    )


def plan_of(tenant: str, document: Document) -> Plan:
    return document.plans.get(plan_name_of(tenant, document), DEFAULT_PLAN)


def plan_name_of(tenant: str, document: Document) -> str:
    """Returns the name of a tenant's plan, or an empty string if it has no plan."""
    stored = document.tenants.get(tenant, StoredTenant())
    name = stored.plan or DEFAULT_PLAN_NAME
    return name if name in document.plans else ""


def is_frozen(tenant: str, document: Document) -> bool:
    return document.tenants.get(tenant, StoredTenant()).frozen_s is not None


def encode_document(document: Document) -> bytes:
    """Returns the document as readable JSON.

    Plans and limits include only values that differ from the defaults. Releases reject unknown
    fields, so this lets an earlier release read a document that uses no new fields.
    """
    fields = msgspec.to_builtins(document)
    fields["plans"] = {name: _differing(plan) for name, plan in document.plans.items()}
    for key, stored in zip(document.keys, fields["keys"], strict=True):
        if key.limits is not None:
            stored["limits"] = _differing(key.limits)
    return msgspec.json.format(msgspec.json.encode(fields), indent=2)


def _differing(rates: Rates) -> dict[str, object]:
    usual = msgspec.to_builtins(type(rates)())
    fields = {
        name: value for name, value in msgspec.to_builtins(rates).items() if value != usual[name]
    }
    if isinstance(rates, Plan) and rates.per_model:
        fields["per_model"] = {
            name: _differing(model_rates) for name, model_rates in rates.per_model.items()
        }
    return fields


def decode_document(data: bytes, source: str) -> Document:
    """Decodes and validates a document.

    Args:
        data: JSON.
        source: where the document came from, for error messages.

    Raises:
        ConfigurationError: the document is invalid. `field` and the message contain the path.
    """
    try:
        document = msgspec.json.decode(data, type=Document)
    except msgspec.ValidationError as error:
        reason, _, field_path = str(error).partition(" - at `$")
        field_path = field_path.rstrip("`")
        # The error path does not include user-chosen names, so the line is known only up to that
        # point.
        steps = _STEP.finditer(field_path.partition("[...]")[0])
        line = line_of(data, tuple(int(step[2]) if step[2] else step[1] for step in steps))
        raise _wrong(source, line, field_path.lstrip("."), reason) from error
    except MALFORMED as error:
        byte = _BYTE.search(str(error))
        line = data.count(b"\n", 0, int(byte[1])) + 1 if byte else 1
        raise _wrong(source, line, "", f"not JSON: {error}") from error
    for mistake in _mistakes(document):
        raise mistake_in(data, source, mistake)
    return document


def mistake_in(data: bytes, source: str, mistake: Mistake) -> ConfigurationError:
    """Returns an error that locates a mistake in a document.

    Args:
        data: the document, which must be valid JSON.
    """
    return _wrong(source, line_of(data, mistake.path), mistake.field_path, mistake.reason)


def _mistakes(document: Document) -> Iterator[Mistake]:
    if len(document.keys) > MAX_KEYS:
        yield Mistake(("keys",), f"more than {MAX_KEYS}")
    for tenant, stored in document.tenants.items():
        if reason := tenant_mistake(tenant):
            yield Mistake(("tenants", tenant), reason)
        if stored.plan and stored.plan not in document.plans:
            yield Mistake(("tenants", tenant, "plan"), f"plan {stored.plan[:80]!r} does not exist")
    ids = set[str]()
    for number, key in enumerate(document.keys):
        if reason := tenant_mistake(key.tenant):
            yield Mistake(("keys", number, "tenant"), reason)
        if not key.hash:
            yield Mistake(("keys", number, "hash"), "is empty")
        if key.id in ids:
            yield Mistake(("keys", number, "id"), f"{key.id} occurs twice")
        ids.add(key.id)


def tenant_mistake(tenant: str) -> str:
    """Returns the reason this is not a valid tenant name. Empty if it is valid."""
    if tenant and tenant.isprintable() and len(tenant.encode()) <= MAX_TENANT_BYTES:
        return ""
    return f"a tenant's name must be printable and 1 to {MAX_TENANT_BYTES} bytes long"


def _wrong(source: str, line: int, field_path: str, reason: str) -> ConfigurationError:
    where = f"line {line}: " + (f"{field_path}: " if field_path else "")
    return ConfigurationError(
        f"PENSTOCK_KEYS_URL: {source}: {where}{reason}", field=field_path or None
    )


def line_of(data: bytes, path: tuple[str | int, ...]) -> int:
    """Returns the line number, starting at 1, of the value at `path` in a JSON document.

    Args:
        data: a document. If the document ends or stops being valid JSON, the line just before that
            point is returned.
        path: names and numbers from the root. Traversal stops at a step that does not exist.
    """
    text, at = data.decode(errors="replace"), 0
    with contextlib.suppress(ValueError, IndexError, RecursionError):
        for step in path:
            position = _step(text, _after_space(text, at), step)
            if position is None:
                break
            at = position
    return text.count("\n", 0, _after_space(text, at)) + 1


def _step(text: str, at: int, step: str | int) -> int | None:
    """Returns the position where a step's value starts in the object or list at `at`."""
    is_object, number = text[at] == "{", 0
    if text[at] not in "{[":
        return None
    at = _after_space(text, at + 1)
    while text[at] not in "}]":
        name: object = number
        if is_object:
            name, at = _json.raw_decode(text, at)
            at = _after_space(text, at)
        if name == step:
            return at
        _, at = _json.raw_decode(text, at)
        at, number = _after_space(text, at), number + 1
    return None


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return at if space is None else space.end()
