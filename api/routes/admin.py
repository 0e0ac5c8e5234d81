"""/v1/admin: keys, plans, tenants and the audit log, for keys with the `admin` scope.

Keys have the format of OpenAI's admin API keys
(https://platform.openai.com/docs/api-reference/admin-api-keys), with additional fields.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import Query
from starlette.responses import Response

from api.bodies import check_amount
from api.errors import NotFound
from api.http.auth import Access
from api.http.call import Call
from api.http.encode_json import encode_json
from api.http.injection import injectable
from api.http.router import Router
from shared.errors import BadInput, Unavailable
from shared.models.catalog import Catalog
from shared.settings import ApiSettings
from shared.stores.key_stores import list_served_names
from shared.tenants.administration import (
    Administration,
    IssuedKey,
    KeyRequest,
    NotThere,
    check_key_id,
    redact_key_id,
    state_of,
)
from shared.tenants.directory import Name, Scope, StoredKey, StoredTenant
from shared.tenants.plan import Limits, Plan

MAX_EXPIRY_S = 10 * 366 * 86_400
Seconds = Annotated[int, msgspec.Meta(ge=1, le=MAX_EXPIRY_S)]

PAGE = 100
Limit = Annotated[int, Query(ge=1, le=PAGE)]
_SLASHES = len(["", "v1", "admin", "tenants", "NAME"]) - 1
ActId = Annotated[str, Query(pattern=r"^([0-9]{1,18}(-[0-9]{1,18})?)?$")]
Body = TypeVar("Body")
_NOT_HERE = "Keys are in a file that the API only reads, or the item to remove is in use."


class NewKeyBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The key to create."""

    tenant: str
    name: Name
    scopes: tuple[Scope, ...] = ("all",)
    models: tuple[str, ...] | None = None
    """Models the key may use. Null means all models."""
    limits: Limits | None = None
    expires_in_s: Seconds | None = None
    """Seconds until the key expires. Null means never."""


class RotationBody(msgspec.Struct, forbid_unknown_fields=True):
    """Options for rotating a key."""

    overlap_s: Annotated[int, msgspec.Meta(ge=0, le=30 * 86_400)] = 86_400
    """Number of seconds that the old secret remains valid."""


class TenantBody(msgspec.Struct, forbid_unknown_fields=True):
    """A change to a tenant: to its plan, or to whether it is frozen."""

    plan: str | msgspec.UnsetType | None = msgspec.UNSET
    """If null, the default plan applies."""
    frozen: bool | msgspec.UnsetType = msgspec.UNSET
    """If true, rejects the tenant's requests with 403 and pauses its batches. Its data is kept."""


class KeyObject(msgspec.Struct, kw_only=True):
    """A key without its secret. Times are Unix seconds."""

    id: str
    name: str
    redacted_value: str
    created_at: int
    last_used_at: int | None
    expires_at: int | None
    revoked_at: int | None
    old_secret_until: int | None
    """Unix time until which the previous secret remains valid after a rotation."""
    tenant: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] | None
    limits: Limits | None
    state: Literal["valid", "revoked", "expired"]
    object: Literal["api_key"] = "api_key"


class IssuedKeyObject(KeyObject, kw_only=True):
    """A newly created or rotated key. `value` is never shown again."""

    value: str


class KeysPage(msgspec.Struct):
    """A page of keys."""

    data: list[KeyObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    is_read_only: bool
    """True if keys are stored in a file, in which case the API can't change them and does not
    record when they were last used.
    """
    object: Literal["list"] = "list"


class KeyDeleted(msgspec.Struct):
    """A key that was revoked."""

    id: str
    object: Literal["api_key.deleted"] = "api_key.deleted"
    deleted: bool = True


class PlanObject(msgspec.Struct):
    """A plan and its name."""

    name: str
    plan: Plan
    object: Literal["plan"] = "plan"


class PlansReply(msgspec.Struct):
    """All plans."""

    data: list[PlanObject]
    object: Literal["list"] = "list"


class PlanDeleted(msgspec.Struct):
    """A plan that was removed."""

    name: str
    object: Literal["plan.deleted"] = "plan.deleted"
    deleted: bool = True


class TenantObject(msgspec.Struct):
    """A tenant. A tenant without an assigned plan has the default plan."""

    name: str
    plan: str | None
    frozen_at: int | None = None
    """Unix time when the tenant's keys began to be rejected."""
    object: Literal["tenant"] = "tenant"


class TenantsReply(msgspec.Struct):
    """Tenants with keys or an assigned plan."""

    data: list[TenantObject]
    object: Literal["list"] = "list"


class ActObject(msgspec.Struct, kw_only=True):
    """One administrative action."""

    id: str
    effective_at: float
    """Unix seconds."""
    actor: str
    address: str
    type: str
    """The action, such as `key.create`."""
    target: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    object: Literal["audit_log"] = "audit_log"


class ActsPage(msgspec.Struct):
    """A page of the audit log, newest first."""

    data: list[ActObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


router = Router(scope="admin", prefix="/v1/admin", tags=["admin"])


@injectable
class KeyAdmin:
    """A caller's access to the key directory.

    Raises:
        Unavailable: this API does not have a key directory.
    """

    def __init__(self, call: Call, access: Access, catalog: Catalog, settings: ApiSettings) -> None:
        if access.store is None:
            raise Unavailable(public="this API has no key directory")
        self.call = call
        self.store = access.store
        self._access = access
        client = call.http.client
        self.acts = Administration(
            access.store,
            actor=f"key {call.caller.key_id}",
            address=client.host if client else "",
            served=list_served_names(catalog, allow_private=settings.webhooks_private),
        )
        """Reads and changes the directory, and appends changes to the audit log."""

    async def read_body(self, kind: type[Body]) -> Body:
        """Returns a change's body. Plans and limits are structs that validate themselves."""
        data = await self.call.json_body()
        check_amount(data)
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.ValidationError as error:
            reason, _, path = str(error).partition(" - at `$")
            field = path.rstrip("`").lstrip(".")
            raise BadInput(
                f"{field}: {reason}" if field else reason, field=field or None
            ) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"the body is not valid JSON: {error}") from error

    async def answer_issued(self, issued: IssuedKey) -> Response:
        fields = msgspec.structs.asdict(_key(issued.stored, None))
        return await self.answer_changed(IssuedKeyObject(**fields, value=issued.key.text))

    async def answer_changed(self, reply: msgspec.Struct) -> Response:
        """Returns the response to a change, after this instance has read the new directory."""
        await self._access.refresh()
        return _encode_uncached(reply)

    def check_slashes(self) -> None:
        """Checks that a slash in the name at the end of a path is sent as %2F.

        Raises:
            NotFound: the path has additional slashes.
        """
        http = self.call.http
        raw = http.scope.get("raw_path") or http.scope["path"].encode()
        if raw.partition(b"?")[0].count(b"/") != _SLASHES:
            raise NotFound(f"{http.url.path} does not exist; encode '/' in a name as %2F")


@router.get("/keys", summary="List keys", reply=KeysPage, errors=(400, 404))
async def list_keys(
    admin: KeyAdmin,
    after: str = "",
    limit: Limit = 20,
    tenant: str = "",
) -> Response:
    """Lists one tenant's keys, or every tenant's, in the order they were created."""
    keys = [key for key in (await admin.acts.read()).keys if tenant in ("", key.tenant)]
    ids = [key.id for key in keys]
    if after and after not in ids:
        raise NotThere("after: this key ID does not exist", field="after")
    start = ids.index(after) + 1 if after else 0
    uses = await admin.store.uses()
    data = [_key(key, uses.get(key.id)) for key in keys[start : start + limit]]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    has_more, is_read_only = len(keys) > start + limit, bool(admin.store.read_only)
    return _encode_uncached(KeysPage(data, has_more, first_id, last_id, is_read_only))


@router.post(
    "/keys",
    summary="Create a key",
    body=NewKeyBody,
    reply=IssuedKeyObject,
    conflict=_NOT_HERE,
)
async def create_key(admin: KeyAdmin) -> Response:
    """Creates a key. The response includes the secret as `value`, which is not shown again."""
    body = await admin.read_body(NewKeyBody)
    wanted = KeyRequest(
        body.tenant, body.name, body.scopes, body.models, body.limits, body.expires_in_s
    )
    return await admin.answer_issued(await admin.acts.create_key(wanted))


@router.get("/keys/{key_id}", summary="Get a key", reply=KeyObject, errors=(400,))
async def get_key(admin: KeyAdmin, key_id: str) -> Response:
    """Returns the key, without its secret."""
    check_key_id(key_id)
    for key in (await admin.acts.read()).keys:
        if key.id == key_id:
            return _encode_uncached(_key(key, (await admin.store.uses()).get(key_id)))
    raise NotThere(f"key {key_id[:80]!r} does not exist", field="id")


@router.delete(
    "/keys/{key_id}",
    summary="Revoke a key",
    reply=KeyDeleted,
    errors=(400, 408, 413),
    conflict=_NOT_HERE,
)
async def revoke_key(admin: KeyAdmin, key_id: str) -> Response:
    """Revokes the key. All instances start rejecting it within 5 s.

    It stays in the list for 90 days.

    A key can't revoke itself, so use a different key.
    """
    await admin.acts.revoke_key(key_id)
    return await admin.answer_changed(KeyDeleted(key_id))


@router.post(
    "/keys/{key_id}/rotate",
    summary="Rotate a key",
    body=RotationBody,
    reply=IssuedKeyObject,
    conflict=_NOT_HERE,
)
async def rotate_key(admin: KeyAdmin, key_id: str) -> Response:
    """Replaces the key's secret. The old secret remains valid for `overlap_s` more seconds."""
    body = await admin.read_body(RotationBody)
    return await admin.answer_issued(await admin.acts.rotate_key(key_id, body.overlap_s))


@router.get("/plans", summary="List plans", reply=PlansReply)
async def list_plans(admin: KeyAdmin) -> Response:
    """Lists all plans. Tenants without an assigned plan use `default`."""
    plans = (await admin.acts.read()).plans
    return _encode_uncached(PlansReply([PlanObject(name, plan) for name, plan in plans.items()]))


@router.put(
    "/plans/{name:path}",
    summary="Create or replace a plan",
    body=Plan,
    reply=PlanObject,
    conflict=_NOT_HERE,
)
async def set_plan(admin: KeyAdmin, name: str) -> Response:
    """Sets a plan. The change takes effect within seconds for all of the plan's tenants."""
    admin.check_slashes()
    plan = await admin.read_body(Plan)
    await admin.acts.set_plan(name, plan)
    return await admin.answer_changed(PlanObject(name, plan))


@router.delete(
    "/plans/{name:path}",
    summary="Remove a plan",
    reply=PlanDeleted,
    errors=(400, 408, 413),
    conflict=_NOT_HERE,
)
async def remove_plan(admin: KeyAdmin, name: str) -> Response:
    """Removes an unused plan. `default` can be replaced, but not removed."""
    admin.check_slashes()
    await admin.acts.set_plan(name, None)
    return await admin.answer_changed(PlanDeleted(name))


@router.get("/tenants", summary="List tenants", reply=TenantsReply)
async def list_tenants(admin: KeyAdmin) -> Response:
    """Lists tenants that have keys or an assigned plan."""
    document = await admin.acts.read()
    names = sorted(document.tenants.keys() | {key.tenant for key in document.keys})
    stored = [(name, document.tenants.get(name, StoredTenant())) for name in names]
    data = [TenantObject(name, tenant.plan or None, tenant.frozen_s) for name, tenant in stored]
    return _encode_uncached(TenantsReply(data))


@router.put(
    "/tenants/{name:path}",
    summary="Set the plan of a tenant, or freeze it",
    body=TenantBody,
    reply=TenantObject,
    conflict=_NOT_HERE,
)
async def set_tenant(admin: KeyAdmin, name: str) -> Response:
    """Sets the tenant's plan (null means the default plan), or freezes or unfreezes the tenant.

    All instances apply the change within 5 s. A key can't freeze its own tenant. Encode a slash in
    the name as %2F.
    """
    admin.check_slashes()
    body = await admin.read_body(TenantBody)
    if body.plan is not msgspec.UNSET and body.frozen is msgspec.UNSET:
        tenant = await admin.acts.set_tenant(name, body.plan)
    elif body.frozen is not msgspec.UNSET and body.plan is msgspec.UNSET:
        tenant = await admin.acts.freeze_tenant(name, is_frozen=body.frozen)
    else:
        raise BadInput("send either plan or frozen")
    return await admin.answer_changed(TenantObject(name, tenant.plan or None, tenant.frozen_s))


@router.get("/audit", summary="List acts of administration", reply=ActsPage, errors=(400,))
async def list_acts(admin: KeyAdmin, after: ActId = "", limit: Limit = 20) -> Response:
    """Returns the audit log, newest action first. The last 10,000 actions are kept."""
    events = await admin.store.audit_events(limit + 1, after)
    data = [
        ActObject(
            id=noted.id,
            effective_at=noted.act.at_s,
            actor=noted.act.actor,
            address=noted.act.address,
            type=noted.act.action,
            target=noted.act.target,
            before=noted.act.before,
            after=noted.act.after,
        )
        for noted in events[:limit]
    ]
    first_id, last_id = (data[0].id, data[-1].id) if data else (None, None)
    return _encode_uncached(ActsPage(data, len(events) > limit, first_id, last_id))


def _key(key: StoredKey, last_used_s: int | None) -> KeyObject:
    return KeyObject(
        id=key.id,
        name=key.name,
        redacted_value=redact_key_id(key.id),
        created_at=key.created_s,
        last_used_at=last_used_s,
        expires_at=key.expires_s,
        revoked_at=key.revoked_s,
        old_secret_until=key.previous_until_s or None,
        tenant=key.tenant,
        scopes=key.scopes,
        models=key.models,
        limits=key.limits,
        state=state_of(key, time.time()),
    )


def _encode_uncached(reply: msgspec.Struct) -> Response:
    # A key must not be cached between the client and this API.
    headers = {"cache-control": "no-store"}
    return encode_json(reply, headers=headers)
