"""Changes to the key directory, for both the command line and the admin API.

Each change reads the directory, replaces it unless it has changed in the meantime, and logs the
action. As a result, two concurrent changes both take effect.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec

from shared.errors import BadInput, ConfigurationError, PenstockError, Unavailable
from shared.process.concurrency import backoff
from shared.tenants.api_key import (
    PREFIX,
    SALT_BYTES,
    ApiKey,
    hash_of,
    holds_key,
    new_key,
)
from shared.tenants.directory import (
    DEFAULT_PLAN_NAME,
    PLAN_NAME_PATTERN,
    Document,
    Mistake,
    Scope,
    StoredKey,
    StoredTenant,
    decode_document,
    encode_document,
)
from shared.tenants.key_store import AuditEvent, KeysReadOnly, KeyStore
from shared.tenants.plan import Limits, Plan
from shared.tenants.rules import (
    IS_A_KEY,
    NOT_AN_ID,
    Served,
    document_mistakes,
    key_mistakes,
    plan_mistakes,
)

ATTEMPTS = 40
MAX_PAUSE_S = 0.2
MAX_OVERLAP_S = 30 * 86_400
FORGOTTEN_AFTER_S = 90 * 86_400
"""Keys that have been revoked or expired for this long are deleted when a new key is created."""
MAX_NAMED = 5
"""Maximum number of tenants named in an error."""
log = logging.getLogger(__name__)

_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
"""A percent-encoded character in URL paths."""


class NotThere(BadInput):
    """The key, tenant, or plan does not exist."""

    code = "not_found"


class InUse(PenstockError):
    """The target is still in use, so it can't be removed."""

    code = "in_use"
    public_by_default = None


class KeyRequest(NamedTuple):
    """A new key's properties."""

    tenant: str
    name: str
    scopes: tuple[Scope, ...] = ("all",)
    models: tuple[str, ...] | None = None
    limits: Limits | None = None
    expires_in_s: int | None = None
    """Seconds after the key's creation."""


class IssuedKey(NamedTuple):
    """A newly created key. `key` can't be retrieved later."""

    stored: StoredKey
    key: ApiKey


class _Change(NamedTuple):
    document: Document
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class Administration:
    """Changes the directory on behalf of an actor.

    Args:
        actor: the actor, formatted as in `AuditEvent`.
        served: names that plans and keys may use. If None, the names are not known, so models and
            webhooks are not checked.
    """

    def __init__(
        self,
        store: KeyStore,
        *,
        actor: str,
        address: str,
        served: Served | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._served = served
        self._actor = actor
        self._address = address
        self._clock = clock

    async def read(self) -> Document:
        """Returns the current directory.

        Raises:
            NoDirectory: the store does not have a directory.
            ConfigurationError: the stored directory is invalid.
        """
        stored = await self._store.read()
        assert stored is not None, "read without a version, so it is always returned; this is a bug"
        return decode_document(stored.data, self._store.source)

    async def start_directory(self, document: Document) -> None:
        """Creates a directory if none exists.

        Raises:
            BadInput: a directory already exists, or this one is invalid.
        """
        _refuse(document_mistakes(document, self._served, self._clock()))
        act = self._act("directory.start", self._store.source, None, {"keys": len(document.keys)})
        if not await self._store.replace("", _encode_checked(document), act):
            raise BadInput("a key directory already exists")

    async def create_key(self, request: KeyRequest) -> IssuedKey:
        """Creates a key.

        Raises:
            BadInput: the request is invalid.
            KeysReadOnly: keys can't be changed here.
        """
        key, salt, now_s = new_key(), secrets.token_bytes(SALT_BYTES), int(self._clock())
        lasts_s = request.expires_in_s
        if lasts_s is not None and lasts_s <= 0:
            raise BadInput("expires_in_s: must be in the future", field="expires_in_s")
        _check_tenant(request.tenant)
        stored = StoredKey(
            id=key.id,
            tenant=request.tenant,
            name=request.name,
            salt=salt.hex(),
            hash=hash_of(salt, key).hex(),
            created_s=now_s,
            scopes=request.scopes,
            models=request.models,
            limits=request.limits,
            expires_s=None if lasts_s is None else now_s + lasts_s,
        )

        _refuse(key_mistakes(stored, self._served))

        def add(document: Document) -> _Change:
            keys = [key for key in document.keys if not _is_forgotten(key, now_s)]
            return _Change(_with(document, keys=(*keys, stored)), None, format_key(stored))

        await self._change("key.create", key.id, add)
        return IssuedKey(stored, key)

    async def rotate_key(self, key_id: str, overlap_s: int) -> IssuedKey:
        """Replaces a key's secret. The old secret remains valid for `overlap_s` more seconds.

        Any earlier secret becomes invalid immediately.

        Raises:
            NotThere: the key does not exist.
            BadInput: the key is revoked or expired, or the overlap is too long.
            KeysReadOnly: keys can't be changed here.
        """
        if not 0 <= overlap_s <= MAX_OVERLAP_S:
            raise BadInput(f"overlap: must be from 0 to {MAX_OVERLAP_S} seconds", field="overlap_s")
        now_s = int(self._clock())
        key: ApiKey | None = None

        def rotate(old: StoredKey) -> StoredKey:
            nonlocal key
            if (state := state_of(old, now_s)) != "valid":
                raise BadInput(f"key {key_id} is {state}", field="id")
            # Only for an existing ID, because anything else might not be part of a key at all.
            key = new_key(old.id)
            return msgspec.structs.replace(
                old,
                hash=hash_of(bytes.fromhex(old.salt), key).hex(),
                previous_hash=old.hash if overlap_s else "",
                previous_until_s=now_s + overlap_s if overlap_s else 0,
            )

        stored = await self._change_key("key.rotate", key_id, rotate)
        assert key is not None, "a successful change has a key; this is a bug"
        return IssuedKey(stored, key)

    async def revoke_key(self, key_id: str) -> StoredKey:
        """Revokes a key permanently. Does nothing if it is already revoked.

        A key can't revoke itself or the last key with admin rights, because that could not be
        undone over the network. With direct access to the directory, any key may be revoked.

        Raises:
            NotThere: the key does not exist.
            InUse: the acting key would revoke itself or the last key with admin rights.
            KeysReadOnly: keys can't be changed here.
        """
        now_s = int(self._clock())

        def revoke(old: StoredKey) -> StoredKey:
            if old.revoked_s is not None:
                return old
            return msgspec.structs.replace(
                old, revoked_s=now_s, previous_hash="", previous_until_s=0
            )

        def check(document: Document) -> None:
            if self._actor == f"key {key_id}":
                raise InUse("this key can't revoke itself; use a different key", field="id")
            if self._actor.startswith("key ") and _is_last_admin(document, key_id, now_s):
                raise InUse(
                    "this is the last key with the admin scope; create another one first",
                    field="id",
                )

        return await self._change_key("key.revoke", key_id, revoke, check)

    async def set_plan(self, name: str, plan: Plan | None) -> None:
        """Creates or replaces a plan, or removes it if None is passed.

        Raises:
            NotThere: the plan to remove does not exist.
            InUse: a tenant is still on the plan, or it is the default plan.
            BadInput: the plan is invalid.
            KeysReadOnly: plans can't be changed here.
        """
        _check_name(name, "plan")
        if plan is not None:
            if re.fullmatch(PLAN_NAME_PATTERN, name) is None:
                raise BadInput(
                    "plan: its name must be 1 to 64 letters, digits, '.', '_' or '-', and start "
                    "with a letter or digit",
                    field="plan",
                )
            _refuse(plan_mistakes(plan, self._served))

        def change(document: Document) -> _Change:
            plans, old = dict(document.plans), document.plans.get(name)
            if plan is not None:
                plans[name] = plan
            elif old is None:
                raise NotThere(f"plan {name!r} does not exist", field="plan")
            else:
                _check_unused(name, document)
                del plans[name]
            return _Change(_with(document, plans=plans), _builtins(old), _builtins(plan))

        await self._change("plan.remove" if plan is None else "plan.set", name, change)

    async def set_tenant(self, tenant: str, plan: str | None) -> StoredTenant:
        """Assigns a plan to a tenant (the default plan if None is given). Returns the tenant.

        Raises:
            BadInput: the plan does not exist, or the tenant's name is invalid.
            KeysReadOnly: tenants can't be changed here.
        """
        _check_name(tenant, "tenant")
        if plan is not None:
            _check_name(plan, "plan")
            _check_tenant(tenant)

        new = StoredTenant()

        def change(document: Document) -> _Change:
            nonlocal new
            old = document.tenants.get(tenant, StoredTenant())
            new = msgspec.structs.replace(old, plan=plan or "")
            return _change_tenant(document, tenant, new)

        await self._change("tenant.set", tenant, change)
        return new

    async def freeze_tenant(self, tenant: str, *, is_frozen: bool) -> StoredTenant:
        """Rejects all of a tenant's keys and suspends its batches until the tenant is unfrozen.

        Open requests are ended as they would be for a revoked key. Running predictions continue.

        Raises:
            NotThere: the tenant is unknown, meaning it has neither keys nor a plan.
            InUse: the acting key belongs to the tenant, so it could not undo the change, or its own
                tenant has just been frozen.
            KeysReadOnly: tenants can't be changed here.
        """
        _check_name(tenant, "tenant")
        now_s = int(self._clock())
        new = StoredTenant()

        def change(document: Document) -> _Change:
            nonlocal new
            old = document.tenants.get(tenant)
            keys = {f"key {key.id}" for key in document.keys if key.tenant == tenant}
            if old is None and not keys:
                raise NotThere(f"tenant {tenant!r} does not exist", field="tenant")
            if self._actor in keys:
                raise InUse(
                    "this key belongs to that tenant; use a key from a different tenant",
                    field="tenant",
                )
            if self._is_actor_frozen(document):
                # Otherwise, two tenants' keys could freeze each other at the same time.
                raise InUse(
                    "this key's tenant has just been frozen; use a key from a different tenant",
                    field="tenant",
                )
            old = old or StoredTenant()
            since_s = (old.frozen_s or now_s) if is_frozen else None
            new = msgspec.structs.replace(old, frozen_s=since_s)
            return _change_tenant(document, tenant, new)

        await self._change("tenant.freeze" if is_frozen else "tenant.thaw", tenant, change)
        return new

    def _is_actor_frozen(self, document: Document) -> bool:
        owners = (key.tenant for key in document.keys if self._actor == f"key {key.id}")
        tenant = document.tenants.get(next(owners, ""))
        return tenant is not None and tenant.frozen_s is not None

    async def _change_key(
        self,
        action: str,
        key_id: str,
        change: Callable[[StoredKey], StoredKey],
        check: Callable[[Document], None] = lambda document: None,
    ) -> StoredKey:
        check_key_id(key_id)
        changed: StoredKey | None = None

        def replace(document: Document) -> _Change:
            nonlocal changed
            indices = [at for at, key in enumerate(document.keys) if key.id == key_id]
            if not indices:
                raise NotThere(f"key {key_id[:80]!r} does not exist", field="id")
            check(document)
            keys, old = list(document.keys), document.keys[indices[0]]
            keys[indices[0]] = changed = change(old)
            return _Change(_with(document, keys=tuple(keys)), format_key(old), format_key(changed))

        await self._change(action, key_id, replace)
        assert changed is not None, "a successful change has a result; this is a bug"
        return changed

    async def _change(
        self, action: str, target: str, change: Callable[[Document], _Change]
    ) -> None:
        if self._store.read_only:
            raise KeysReadOnly(self._store.read_only)
        pauses = backoff(0.01, MAX_PAUSE_S)
        for _ in range(ATTEMPTS):
            stored = await self._store.read()
            assert stored is not None, (
                "read without a version, so it is always returned; this is a bug"
            )
            old = decode_document(stored.data, self._store.source)
            new, before, after = change(old)
            if new == old:
                return
            act = self._act(action, target, before, after)
            if await self._store.replace(stored.version, _encode_checked(new), act):
                log.info("keys changed", extra=msgspec.structs.asdict(act))
                return
            await asyncio.sleep(next(pauses))
        reason = "other requests are changing the key directory; try again"
        raise Unavailable(reason, public=reason)

    def _act(
        self,
        action: str,
        target: str,
        before: dict[str, Any] | None,
        after: dict[str, Any] | None,
    ) -> AuditEvent:
        return AuditEvent(
            at_s=self._clock(),
            actor=self._actor,
            address=self._address,
            action=action,
            target=target,
            before=before,
            after=after,
        )


def _change_tenant(document: Document, tenant: str, new: StoredTenant) -> _Change:
    """Stores a tenant. Tenants without any settings are not listed."""
    tenants, old = dict(document.tenants), document.tenants.get(tenant)
    tenants.pop(tenant, None)
    after = None
    if new != StoredTenant():
        tenants[tenant], after = new, _builtins(new)
    return _Change(_with(document, tenants=tenants), _builtins(old), after)


def format_key(key: StoredKey) -> dict[str, Any]:
    """Returns a key's public view: everything except the salt and hashes."""
    fields: dict[str, Any] = msgspec.to_builtins(key)
    for secret in ("salt", "hash", "previous_hash"):
        fields.pop(secret, None)
    return fields


def redact_key_id(key_id: str) -> str:
    return f"{PREFIX}{key_id}_…"


def state_of(key: StoredKey, now_s: float) -> Literal["valid", "revoked", "expired"]:
    """Returns whether the key is accepted and, if not, why."""
    if key.revoked_s is not None:
        return "revoked"
    if key.expires_s is not None and key.expires_s <= now_s:
        return "expired"
    return "valid"


def _is_forgotten(key: StoredKey, now_s: float) -> bool:
    ends = [at_s for at_s in (key.revoked_s, key.expires_s) if at_s is not None]
    return bool(ends) and min(ends) <= now_s - FORGOTTEN_AFTER_S


def check_key_id(key_id: str) -> None:
    """Rejects a whole key sent in place of its ID, without repeating the key in the error.

    Raises:
        BadInput: the value contains more than an ID.
    """
    if holds_key(key_id):
        raise BadInput(f"id: {NOT_AN_ID}", field="id")


def _check_name(name: str, field: str) -> None:
    if holds_key(name):
        raise BadInput(f"{field}: {IS_A_KEY}", field=field)


def _check_tenant(tenant: str) -> None:
    if _ESCAPE.search(tenant):
        raise BadInput(
            "tenant: must not contain % followed by two hex digits, which proxies may "
            "decode in paths",
            field="tenant",
        )
    if tenant in (".", ".."):
        raise BadInput(
            "tenant: must not be '.' or '..' because clients strip these from paths", field="tenant"
        )


def _refuse(mistakes: Iterator[Mistake]) -> None:
    for mistake in mistakes:
        raise BadInput(f"{mistake.field_path}: {mistake.reason}", field=mistake.field_path)


def _check_unused(plan: str, document: Document) -> None:
    """Rejects the removal of a plan that tenants use, by name or as the default."""
    if plan == DEFAULT_PLAN_NAME:
        raise InUse(
            f"the plan {plan!r} can't be removed because tenants without an assigned plan "
            "would have no limits; replace it instead (PUT, or penstock plans set)",
            field="plan",
        )
    tenants = sorted(name for name, stored in document.tenants.items() if stored.plan == plan)
    if tenants:
        listed, more = ", ".join(tenants[:MAX_NAMED]), len(tenants) - MAX_NAMED
        named = f"{listed} and {more} more" if more > 0 else listed
        have = "1 tenant uses it" if len(tenants) == 1 else f"{len(tenants)} tenants use it"
        whom = "it" if len(tenants) == 1 else "them"
        raise InUse(
            f"the plan {plan!r} is in use: {have} ({named}); assign a different plan to "
            f"{whom} first",
            field="plan",
        )


def _is_last_admin(document: Document, key_id: str, now_s: float) -> bool:
    admins = {
        key.id for key in document.keys if "admin" in key.scopes and state_of(key, now_s) == "valid"
    }
    return admins == {key_id}


def _with(document: Document, **changed: Any) -> Document:
    return msgspec.structs.replace(document, **changed)


def _builtins(value: Plan | StoredTenant | None) -> dict[str, Any] | None:
    fields: dict[str, Any] | None = None if value is None else msgspec.to_builtins(value)
    return fields


def _encode_checked(document: Document) -> bytes:
    """Returns the document, encoded. Rejects documents that readers would reject."""
    data = encode_document(document)
    try:
        decode_document(data, "directory")
    except ConfigurationError as error:
        reason = re.sub(r"^PENSTOCK_KEYS_URL: directory: (line \d+: )?", "", error.message)
        raise BadInput(reason, field=error.field) from error
    return data
