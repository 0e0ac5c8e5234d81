"""Plans: what a tenant may use. Each caller has the plan of its tenant, narrowed by its key.

A limit of None means that there is none.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
LIGHTEST, HEAVIEST = 0.01, 1000.0


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a tenant, or one of its keys, may use.

    Work is counted in the unit of each task: tokens or pixel-steps (shared/tasks).
    """

    weight: Annotated[float, msgspec.Meta(ge=LIGHTEST, le=HEAVIEST)] = 1.0
    """Its share of a busy model, relative to the other tenants."""
    requests_per_min: Count | None = None
    work_per_min: Count | None = None
    max_in_flight: Count | None = None
    """Items that may wait for workers at the same time, in all instances together."""
    budget_usd_per_month: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """What it may spend in a calendar month (UTC). Requests beyond that are refused."""
    warn_at_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    """The share of the budget at which a webhook warns the tenant."""
    max_priority: Literal["interactive", "batch"] = "interactive"
    """The highest priority that it may ask for."""
    batch_price_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    """The share of the list price that lines of batches cost."""


DEFAULT_PLAN = Plan()
DEFAULT_TENANT = "default"


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a request, as its API key says."""

    tenant: str = DEFAULT_TENANT
    key_id: str = ""
    """The public part of the key. Empty where no key is required."""
    plan: Plan = DEFAULT_PLAN
    models: frozenset[str] | None = None
    """The models that the key may use. None: all."""
    scopes: frozenset[str] | None = None
    """What the key may do. None: everything but administration."""
