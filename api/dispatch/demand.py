"""What a request wants from the workers."""

from __future__ import annotations

from dataclasses import dataclass

from shared.tenants.plan import DEFAULT_TENANT


@dataclass(frozen=True, slots=True)
class Demand:
    """Items of one tenant that need a worker."""

    model: str
    items: int
    tenant: str = DEFAULT_TENANT
    weight: float = 1.0
    """The tenant's share of a busy model, relative to other tenants."""
    lane: str = ""
    """`batch`, or empty for interactive requests."""
    is_promised: bool = False
    """Whether the objective on deadlines holds for the items (shared/slo.py)."""
