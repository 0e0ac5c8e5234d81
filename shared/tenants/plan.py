"""Plans: what a tenant may use. A key of the tenant may also have limits of its own.

A limit of None means unlimited. Whatever a key uses counts for its tenant too.
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
    """Limits of any minute. Work has a limit for each unit, since units can't be added up."""

    requests_per_min: Count | None = None
    tokens_per_min: Count | None = None
    """The limit for models that are billed by tokens."""
    pixel_steps_per_min: Count | None = None
    """The limit for models that are billed by pixel-steps (width x height x steps)."""
    work_per_min: Count | None = None
    """The limit for custom models: what their items weigh."""


class Limits(Rates, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of a tenant or a key, for all models together."""

    max_in_flight: Count | None = None
    """Items that may wait for workers at the same time, in all instances together."""
    budget_usd_per_month: Usd | None = None
    """The budget for a calendar month (UTC). Requests beyond that are refused."""
    max_priority: Priority = "interactive"
    """The highest priority. `batch`: all its requests have it."""

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
    """The limits of a tenant, and its terms."""

    weight: Annotated[float, msgspec.Meta(ge=LIGHTEST, le=HEAVIEST)] = 1.0
    """Its share of a busy model, relative to the other tenants."""
    per_model: dict[str, Rates] = {}
    """Rates of single models, by their names in the catalog, in addition to those of all models."""
    warn_at_shares: Annotated[
        tuple[Annotated[float, msgspec.Meta(gt=0, le=1)], ...],
        msgspec.Meta(max_length=MAX_WARNINGS),
    ] = (0.8, 1.0)
    """Shares of the budget at which the webhook is called, each once a month."""
    budget_webhook: Annotated[str, msgspec.Meta(max_length=MAX_WEBHOOK_CHARS)] = ""
    """The URL that is notified. Empty: none."""
    on_limit_store_outage: OnOutage = "deny"
    """The handling of requests with a budget while Redis is away, on an instance that does not know
    what was spent: `deny` refuses them, `allow` takes the budget for unspent.
    """
    batch_price_share: Share = 0.5
    """The share of the list price that lines of batches cost."""

    storage_max_bytes: Count | None = None
    """The bytes that its files may take together, those of predictions and the outputs of batches
    included. None: PENSTOCK_FILES_MAX_BYTES.
    """
    prediction_keep_s: Annotated[int, msgspec.Meta(ge=60, le=30 * 24 * 3600)] | None = None
    """The seconds that predictions are kept after their end. None: PENSTOCK_PREDICTION_KEEP_S."""

    @property
    def are_none(self) -> bool:
        """True if nothing is counted."""
        return not self.per_model and super().are_none


DEFAULT_PLAN = Plan()


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The sender of a request, as identified by its API key."""

    tenant: str = DEFAULT_TENANT
    key_id: str = ""
    """The public part of the key. Empty if no key is required."""
    plan: Plan = DEFAULT_PLAN
    plan_name: str = ""
    """Its name in the directory, for rows. Empty: the tenant has none."""
    key_limits: Limits | None = None
    """Limits of the key alone, in addition to those of the plan. None: the plan's limits only."""
    models: frozenset[str] | None = None
    """The models that the key may use. None: all."""
    scopes: frozenset[str] | None = None
    """The scopes of the key. None: everything but administration."""

    @property
    def is_limited(self) -> bool:
        """True if anything is counted for this caller."""
        return not (self.plan.are_none and (self.key_limits is None or self.key_limits.are_none))

    @property
    def max_priority(self) -> Priority:
        """The highest priority that plan and key allow."""
        keys_own = "interactive" if self.key_limits is None else self.key_limits.max_priority
        return "batch" if "batch" in (self.plan.max_priority, keys_own) else "interactive"
