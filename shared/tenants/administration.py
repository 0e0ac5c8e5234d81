"""Changes to the directory of keys, for the command line and the admin API alike.

Each change reads the directory, replaces it if nobody else has done so, and notes the act. So two
changes at the same time both happen.
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

from shared.concurrency import backoff
from shared.errors import BadInput, ConfigurationError, PenstockError, Unavailable
from shared.tenants.api_key import (
    ID_LENGTH,
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
    Served,
    document_mistakes,
    key_mistakes,
    plan_mistakes,
)

ATTEMPTS = 40
MAX_PAUSE_S = 0.2
MAX_OVERLAP_S = 30 * 86_400
FORGOTTEN_AFTER_S = 90 * 86_400
"""Keys that were revoked or expired this long ago are dropped when a key is created."""
MAX_NAMED = 5
"""Tenants that an error names."""
log = logging.getLogger(__name__)

_ESCAPE = re.compile(r"%[0-9A-Fa-f]{2}")
"""A character as paths of URLs write it."""


class NotThere(BadInput):
    """There is no such key, tenant or plan."""

    code = "not_found"


class InUse(PenstockError):
    """Others need this, so it can't be taken away."""

    code = "in_use"
    public_by_default = None


class KeyRequest(NamedTuple):
    """The properties of a new key."""

    tenant: str
    name: str
    scopes: tuple[Scope, ...] = ("all",)
    models: tuple[str, ...] | None = None
    limits: Limits | None = None
    expires_in_s: int | None = None
    """From its creation."""


class IssuedKey(NamedTuple):
    """A key that was just made. Nobody can read `key` again."""

    stored: StoredKey
    key: ApiKey


class _Change(NamedTuple):
    document: Document
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class Administration:
    """Changes the directory in the name of somebody.

    Args:
        store: where the directory is. Open.
        actor: who acts, as `AuditEvent` says.
        served: what plans and keys may name. None: not known, so models and webhooks are not
            checked.
        clock: Unix seconds.
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
        """The directory as it is now.

        Raises:
            NoDirectory: the store has none.
            Unavailable: the store is unreachable.
            ConfigurationError: what it has is not valid.
        """
        stored = await self._store.read()
        assert stored is not None, "without a version it is always read; this is a bug"
        return decode_document(stored.data, self._store.source)

    async def start_directory(self, document: Document) -> None:
        """Creates a directory if there is none.

        Raises:
            BadInput: there is one, or this one is not valid.
            Unavailable: the store is unreachable.
        """
        _refuse(document_mistakes(document, self._served, self._clock()))
        act = self._act("directory.start", self._store.source, None, {"keys": len(document.keys)})
        if not await self._store.replace("", _checked(document), act):
            raise BadInput("there is a directory of keys already")

    async def create_key(self, request: KeyRequest) -> IssuedKey:
        """Makes a key.

        Raises:
            BadInput: the request is not valid.
            KeysReadOnly: keys can't be changed here.
            Unavailable: the store is unreachable.
        """
        key, salt, now_s = new_key(), secrets.token_bytes(SALT_BYTES), int(self._clock())
        lasts_s = request.expires_in_s
        if lasts_s is not None and lasts_s <= 0:
            raise BadInput("expires_in_s: is not in the future", field="expires_in_s")
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
            kept = [one for one in document.keys if not _is_forgotten(one, now_s)]
            return _Change(_with(document, keys=(*kept, stored)), None, shown(stored))

        await self._change("key.create", key.id, add)
        return IssuedKey(stored, key)

    async def rotate_key(self, key_id: str, overlap_s: int) -> IssuedKey:
        """Gives a key a new secret. The old one works for `overlap_s` more seconds.

        The secret before the old one ends at once.

        Raises:
            NotThere: there is no such key.
            BadInput: it is revoked or expired, or the overlap is too long.
            KeysReadOnly: keys can't be changed here.
            Unavailable: the store is unreachable.
        """
        if not 0 <= overlap_s <= MAX_OVERLAP_S:
            raise BadInput(f"overlap: 0 to {MAX_OVERLAP_S} seconds", field="overlap_s")
        now_s = int(self._clock())
        key: ApiKey | None = None

        def rotated(old: StoredKey) -> StoredKey:
            nonlocal key
            if (state := state_of(old, now_s)) != "valid":
                raise BadInput(f"key {key_id} is {state}", field="id")
            # Only for an existing id: others may not be part of a key at all.
            key = new_key(old.id)
            return msgspec.structs.replace(
                old,
                hash=hash_of(bytes.fromhex(old.salt), key).hex(),
                previous_hash=old.hash if overlap_s else "",
                previous_until_s=now_s + overlap_s if overlap_s else 0,
            )

        stored = await self._change_key("key.rotate", key_id, rotated)
        assert key is not None, "a change that happened has a key; this is a bug"
        return IssuedKey(stored, key)

    async def revoke_key(self, key_id: str) -> StoredKey:
        """Ends a key for good. Does nothing if it was revoked before.

        A key ends neither itself nor the last other one that may administer: nobody could undo it
        over the network. Anyone who has the directory itself may end any key.

        Raises:
            NotThere: there is no such key.
            InUse: a key acts, and would end itself or the last key that administers.
            KeysReadOnly: keys can't be changed here.
            Unavailable: the store is unreachable.
        """
        now_s = int(self._clock())

        def revoked(old: StoredKey) -> StoredKey:
            if old.revoked_s is not None:
                return old
            return msgspec.structs.replace(
                old, revoked_s=now_s, previous_hash="", previous_until_s=0
            )

        def check(document: Document) -> None:
            if self._actor == f"key {key_id}":
                raise InUse("this is the key that asks; revoke it with another one", field="id")
            if self._actor.startswith("key ") and _is_last_admin(document, key_id, now_s):
                raise InUse(
                    "this is the last key with the scope admin; create another one first",
                    field="id",
                )

        return await self._change_key("key.revoke", key_id, revoked, check)

    async def set_plan(self, name: str, plan: Plan | None) -> None:
        """Creates or replaces a plan. None removes it.

        Raises:
            NotThere: there is no such plan to remove.
            InUse: a tenant still has it, or it is the default plan.
            BadInput: the plan is not valid.
            KeysReadOnly: plans can't be changed here.
            Unavailable: the store is unreachable.
        """
        _check_name(name, "plan")
        if plan is not None:
            if re.fullmatch(PLAN_NAME_PATTERN, name) is None:
                raise BadInput(
                    "plan: its name has 1 to 64 letters, digits, '.', '_' or '-', and begins with "
                    "a letter or digit",
                    field="plan",
                )
            _refuse(plan_mistakes(plan, self._served))

        def change(document: Document) -> _Change:
            plans, old = dict(document.plans), document.plans.get(name)
            if plan is not None:
                plans[name] = plan
            elif old is None:
                raise NotThere(f"there is no plan {name!r}", field="plan")
            else:
                _check_unused(name, document)
                del plans[name]
            return _Change(_with(document, plans=plans), _builtins(old), _builtins(plan))

        await self._change("plan.remove" if plan is None else "plan.set", name, change)

    async def set_tenant(self, tenant: str, plan: str | None) -> StoredTenant:
        """Gives a tenant a plan. None: the default plan. Returns the tenant.

        Raises:
            BadInput: there is no such plan, or the tenant's name is not valid.
            KeysReadOnly: tenants can't be changed here.
            Unavailable: the store is unreachable.
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
            return _changed_tenant(document, tenant, new)

        await self._change("tenant.set", tenant, change)
        return new

    async def freeze_tenant(self, tenant: str, *, is_frozen: bool) -> None:
        """Refuses all keys of a tenant, and holds its batches, until it is thawed.

        Requests that are open end as with a revoked key. Predictions that run end by themselves.

        Raises:
            NotThere: no key and no plan names this tenant.
            InUse: a key of the tenant acts. It could not undo it.
            KeysReadOnly: tenants can't be changed here.
            Unavailable: the store is unreachable.
        """
        _check_name(tenant, "tenant")
        now_s = int(self._clock())

        def change(document: Document) -> _Change:
            old = document.tenants.get(tenant)
            keys = {f"key {key.id}" for key in document.keys if key.tenant == tenant}
            if old is None and not keys:
                raise NotThere(f"there is no tenant {tenant!r}", field="tenant")
            if self._actor in keys:
                raise InUse("this key is the tenant's; use one of another tenant", field="tenant")
            old = old or StoredTenant()
            since_s = (old.frozen_s or now_s) if is_frozen else None
            return _changed_tenant(document, tenant, msgspec.structs.replace(old, frozen_s=since_s))

        await self._change("tenant.freeze" if is_frozen else "tenant.thaw", tenant, change)

    async def _change_key(
        self,
        action: str,
        key_id: str,
        change: Callable[[StoredKey], StoredKey],
        check: Callable[[Document], None] = lambda document: None,
    ) -> StoredKey:
        check_key_id(key_id)
        changed: StoredKey | None = None

        def replaced(document: Document) -> _Change:
            nonlocal changed
            indices = [at for at, key in enumerate(document.keys) if key.id == key_id]
            if not indices:
                raise NotThere(f"there is no key {key_id[:80]!r}", field="id")
            check(document)
            keys, old = list(document.keys), document.keys[indices[0]]
            keys[indices[0]] = changed = change(old)
            return _Change(_with(document, keys=tuple(keys)), shown(old), shown(changed))

        await self._change(action, key_id, replaced)
        assert changed is not None, "a change that happened has a result; this is a bug"
        return changed

    async def _change(
        self, action: str, target: str, change: Callable[[Document], _Change]
    ) -> None:
        if self._store.read_only:
            raise KeysReadOnly(self._store.read_only)
        pauses = backoff(0.01, MAX_PAUSE_S)
        for _ in range(ATTEMPTS):
            stored = await self._store.read()
            assert stored is not None, "without a version it is always read; this is a bug"
            old = decode_document(stored.data, self._store.source)
            new, before, after = change(old)
            if new == old:
                return
            act = self._act(action, target, before, after)
            if await self._store.replace(stored.version, _checked(new), act):
                log.info("keys changed", extra=msgspec.structs.asdict(act))
                return
            await asyncio.sleep(next(pauses))
        reason = "the directory of keys is being changed by others; try again"
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


def _changed_tenant(document: Document, tenant: str, new: StoredTenant) -> _Change:
    """Stores a tenant. One with nothing of its own is not listed."""
    tenants, old = dict(document.tenants), document.tenants.get(tenant)
    tenants.pop(tenant, None)
    after = None
    if new != StoredTenant():
        tenants[tenant], after = new, _builtins(new)
    return _Change(_with(document, tenants=tenants), _builtins(old), after)


def shown(key: StoredKey) -> dict[str, Any]:
    """Returns the view of a key: all but salt and hashes."""
    fields: dict[str, Any] = msgspec.to_builtins(key)
    for secret in ("salt", "hash", "previous_hash"):
        fields.pop(secret, None)
    return fields


def redacted(key_id: str) -> str:
    """A key as lists show it."""
    return f"{PREFIX}{key_id}_…"


def state_of(key: StoredKey, now_s: float) -> Literal["valid", "revoked", "expired"]:
    """Returns whether the key is accepted, and if not, why."""
    if key.revoked_s is not None:
        return "revoked"
    if key.expires_s is not None and key.expires_s <= now_s:
        return "expired"
    return "valid"


def _is_forgotten(key: StoredKey, now_s: float) -> bool:
    ends = [at_s for at_s in (key.revoked_s, key.expires_s) if at_s is not None]
    return bool(ends) and min(ends) <= now_s - FORGOTTEN_AFTER_S


def check_key_id(key_id: str) -> None:
    """Refuses a whole key where its id belongs, without repeating it.

    Raises:
        BadInput: it is more than an id.
    """
    if holds_key(key_id):
        raise BadInput(
            f"id: this is a whole key; send only its id, the {ID_LENGTH} characters behind "
            f"{PREFIX!r}",
            field="id",
        )


def _check_name(name: str, field: str) -> None:
    if holds_key(name):
        raise BadInput(f"{field}: {IS_A_KEY}", field=field)


def _check_tenant(tenant: str) -> None:
    if _ESCAPE.search(tenant):
        raise BadInput(
            "tenant: must not contain % before two hex digits, which proxies may decode in paths",
            field="tenant",
        )
    if tenant in (".", ".."):
        raise BadInput(
            "tenant: must not be '.' or '..', which clients cut out of paths", field="tenant"
        )


def _refuse(mistakes: Iterator[Mistake]) -> None:
    for mistake in mistakes:
        raise BadInput(f"{mistake.field_path}: {mistake.reason}", field=mistake.field_path)


def _check_unused(plan: str, document: Document) -> None:
    """Refuses to remove a plan that tenants have, in name or as the default."""
    if plan == DEFAULT_PLAN_NAME:
        raise InUse(
            f"the plan {plan!r} can't be removed: tenants without a plan of their own would have "
            "no limits; replace it instead (PUT, or penstock plans set)",
            field="plan",
        )
    tenants = sorted(name for name, stored in document.tenants.items() if stored.plan == plan)
    if tenants:
        shown, more = ", ".join(tenants[:MAX_NAMED]), len(tenants) - MAX_NAMED
        named = f"{shown} and {more} more" if more > 0 else shown
        have = "1 tenant has it" if len(tenants) == 1 else f"{len(tenants)} tenants have it"
        whom = "it" if len(tenants) == 1 else "them"
        raise InUse(
            f"the plan {plan!r} is in use: {have} ({named}); give {whom} another plan first",
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


def _checked(document: Document) -> bytes:
    """The document as stored. What readers would refuse is refused here."""
    data = encode_document(document)
    try:
        decode_document(data, "directory")
    except ConfigurationError as error:
        reason = re.sub(r"^PENSTOCK_KEYS_URL: directory: (line \d+: )?", "", error.message)
        raise BadInput(reason, field=error.field) from error
    return data
