"""Plans: how much a tenant may use. The tenant's keys may have additional limits.

A limit of None means unlimited. A key's usage also counts toward its tenant's limits.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, get_args

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Usd = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Priority: TypeAlias = Literal["interactive", "batch"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
OnOutage = Annotated[str, msgspec.Meta(pattern="^(deny|allow)$")]
LIGHTEST, HEAVIEST = 0.01, 1000.0
MAX_WARNINGS = 8
MAX_WEBHOOK_CHARS = 2048

DEFAULT_TENANT = "default"


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Per-minute limits.

    Work has a separate limit for each unit, because different units can't be added together.
    """

    requests_per_min: Count | None = None
    tokens_per_min: Count | None = None
    """Limit for models billed by the token."""
    pixel_steps_per_min: Count | None = None
    """Limit for models billed by the pixel-step (width x height x steps)."""
    work_per_min: Count | None = None
    """Limit for custom models, by the weight of their items."""


class Limits(Rates, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's or a key's limits across all models."""

    max_in_flight: Count | None = None
    """Maximum number of items waiting for workers at the same time, across all instances."""
    budget_usd_per_month: Usd | None = None
    """Budget per calendar month (UTC). Requests beyond it are rejected."""
    max_priority: Priority = "interactive"
    """Highest allowed priority. With `batch`, all of the tenant's or key's requests have that
    priority.
    """

    @property
    def are_none(self) -> bool:
        """True if nothing is counted."""
        return (
            self.requests_per_min is None
            and self.tokens_per_min is None
            and self.pixel_steps_per_min is None
            and self.work_per_min is None
            and self.max_in_flight is None
            and self.budget_usd_per_month is None
        )


class Plan(Limits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tenant's limits and terms."""

    weight: Annotated[float, msgspec.Meta(ge=LIGHTEST, le=HEAVIEST)] = 1.0
    """The tenant's share of a busy model, relative to other tenants."""
    per_model: dict[str, Rates] = {}
    """Rates for individual models, keyed by catalog name, in addition to the rates for all models.
    """
    warn_at_shares: Annotated[
        tuple[Annotated[float, msgspec.Meta(gt=0, le=1)], ...],
        msgspec.Meta(max_length=MAX_WARNINGS),
    ] = (0.8, 1.0)
    """Shares of the budget that each trigger the webhook once a month."""
    budget_webhook: Annotated[str, msgspec.Meta(max_length=MAX_WEBHOOK_CHARS)] = ""
    """URL to notify. Empty if there is none."""
    on_limit_store_outage: OnOutage = "deny"
    """Policy for requests with a budget while Redis is unreachable, on an instance that does not
    know the amount spent: `deny` rejects them, and `allow` assumes that the budget is unspent.
    """
    batch_price_share: Share = 0.5
    """The fraction of the list price charged for batch lines."""

    storage_max_bytes: Count | None = None
    """Maximum total size, in bytes, of the tenant's files, including prediction files and batch
    outputs. None means PENSTOCK_FILES_MAX_BYTES.
    """
    prediction_keep_s: Annotated[int, msgspec.Meta(ge=60, le=30 * 24 * 3600)] | None = None
    """How many seconds to keep predictions after they finish. None means
    PENSTOCK_PREDICTION_KEEP_S.
    """

    @property
    def are_none(self) -> bool:
        """True if there are no limits, so nothing is counted."""
        return not self.per_model and super().are_none


DEFAULT_PLAN = Plan()


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request, as identified by its API key."""

    tenant: str = DEFAULT_TENANT
    key_id: str = ""
    """Public part of the key. Empty if keys are not required."""
    plan: Plan = DEFAULT_PLAN
    plan_name: str = ""
    """The plan's name in the directory, for usage rows. Empty if there is no plan."""
    key_limits: Limits | None = None
    """The key's limits, which apply in addition to the plan's. None if only the plan's limits
    apply.
    """
    models: frozenset[str] | None = None
    """Models the key may use. None means all models."""
    scopes: frozenset[str] | None = None
    """The key's scopes. None means everything except administration."""

    @property
    def is_limited(self) -> bool:
        """True if anything is counted for this caller."""
        return not (self.plan.are_none and (self.key_limits is None or self.key_limits.are_none))

    @property
    def max_priority(self) -> Priority:
        """The highest priority that both the plan and the key allow."""
        keys_own = "interactive" if self.key_limits is None else self.key_limits.max_priority
        return "batch" if "batch" in (self.plan.max_priority, keys_own) else "interactive"
