"""Bodies and replies of the administration of keys.

Keys have the form of OpenAI's admin API keys
(https://platform.openai.com/docs/api-reference/admin-api-keys), with more fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from shared.tenants.directory import Name, Scope
from shared.tenants.plan import Limits, Plan

LONGEST_EXPIRY_S = 10 * 366 * 86_400
Seconds = Annotated[int, msgspec.Meta(ge=1, le=LONGEST_EXPIRY_S)]


class NewKeyBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The key to create."""

    tenant: str
    name: Name
    scopes: tuple[Scope, ...] = ("all",)
    models: tuple[str, ...] | None = None
    """The models that it may use. Null: all."""
    limits: Limits | None = None
    expires_in_s: Seconds | None = None
    """Seconds until it expires. Null: never."""


class RotationBody(msgspec.Struct, forbid_unknown_fields=True):
    """How to rotate a key."""

    overlap_s: Annotated[int, msgspec.Meta(ge=0, le=30 * 86_400)] = 86_400
    """Seconds for which the old secret still works."""


class TenantBody(msgspec.Struct, forbid_unknown_fields=True):
    """What is set of a tenant."""

    plan: str | None
    """Null: the default plan."""


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
    """Until when the secret before the last rotation works."""
    tenant: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] | None
    limits: Limits | None
    state: Literal["valid", "revoked", "expired"]
    object: Literal["api_key"] = "api_key"


class IssuedKeyObject(KeyObject, kw_only=True):
    """A key that was just created or rotated. `value` is never shown again."""

    value: str


class KeysPage(msgspec.Struct):
    """A page of keys."""

    data: list[KeyObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class KeyDeleted(msgspec.Struct):
    """A key that was revoked."""

    id: str
    object: Literal["api_key.deleted"] = "api_key.deleted"
    deleted: bool = True


class PlanObject(msgspec.Struct):
    """A plan by its name."""

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
    """A tenant. Without a plan of its own it has the default plan."""

    name: str
    plan: str | None
    object: Literal["tenant"] = "tenant"


class TenantsReply(msgspec.Struct):
    """Tenants that have keys or a plan of their own."""

    data: list[TenantObject]
    object: Literal["list"] = "list"


class ActObject(msgspec.Struct, kw_only=True):
    """One act of administration."""

    id: str
    effective_at: float
    """Unix seconds."""
    actor: str
    address: str
    type: str
    """What was done, such as `key.create`."""
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
