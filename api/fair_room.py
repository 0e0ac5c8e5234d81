"""A weighted capacity limiter: tenants share a limited number of items by weight.

It uses no clock and does no I/O. The first of these three rules that applies decides whether a
tenant is admitted:

- While the remaining capacity exceeds the reserve, any tenant is admitted, so idle capacity gets
  used.
- Up to the limit, a tenant below its fair share is admitted. The share is its weight divided by the
  total weight of all tenants with items here. A tenant with no competitors gets all of the
  capacity.
- Beyond the limit, a tenant is admitted up to its guaranteed minimum: its share of the reserve, or
  one item if that is larger. A small tenant is therefore admitted while others fill their shares,
  even if one of their requests was larger than the remaining capacity.

A request is admitted with all of its items as soon as there is room for one. Otherwise, large
requests would never be admitted alongside small ones. Item counts are exact only for the guaranteed
minimum. The state has one entry per tenant with items here, and the number of items never exceeds
MAX_OVER times the limit, plus one request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from shared.tenants.plan import DEFAULT_TENANT, Priority

RESERVE = 0.125
"""The part of the capacity that only tenants below their fair share may use.

Items leave at the workers' rate, so the reserve is the number of items that other tenants can send
at once, before any of them leaves. An eighth of 512 items is 64 requests with one text each. A
larger reserve would take capacity away from a tenant when the other tenants send little.
"""
MAX_OVER = 2
"""Beyond MAX_OVER times the limit, no tenant is admitted.

Reaching that point takes as many tenants as the limit has items.
"""


@dataclass(frozen=True, slots=True)
class Demand:
    """One tenant's items that need a worker."""

    model: str
    items: int
    tenant: str = DEFAULT_TENANT
    weight: float = 1.0
    """The tenant's share of a busy model, relative to other tenants."""
    priority: Priority = "interactive"
    counts_toward_slo: bool = False
    """True if the SLO applies to the items (shared/money/slo.py)."""


class RoomRequest(Protocol):
    """A request for capacity for a tenant's items."""

    @property
    def tenant(self) -> str:
        """The tenant's name."""

    @property
    def weight(self) -> float:
        """The tenant's weight relative to others."""

    @property
    def items(self) -> int:
        """Number of items."""


class OneItem(NamedTuple):
    """Room for one item."""

    tenant: str
    weight: float = 1.0
    items: int = 1


@dataclass(slots=True)
class Holding:
    """One tenant's items."""

    weight: float
    items: int = 0


class FairRoom:
    """All tenants' items under one limit.

    Args:
        bound: target number of items.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.total = 0
        self.weights = 0.0
        """Total weight of all tenants with items here."""
        self._holdings: dict[str, Holding] = {}

    def __len__(self) -> int:
        """Returns the number of tenants with items here."""
        return len(self._holdings)

    def count_held(self, tenant: str) -> int:
        """Returns the number of items that this tenant has here."""
        holding = self._holdings.get(tenant)
        return 0 if holding is None else holding.items

    def part_of(self, request: RoomRequest) -> float:
        """Returns the tenant's share of the total weight of tenants with items, itself included."""
        holding = self._holdings.get(request.tenant)
        others = self.weights if holding is None else max(0.0, self.weights - holding.weight)
        return request.weight / (others + request.weight)

    def turns_to_wait(self, request: RoomRequest) -> float:
        """Returns how many items must leave before the request is admitted.

        Items leave in fair order, so the tenant's items make up its share of them.
        """
        idle = self.bound * (1 - RESERVE)
        if self.total < idle:
            return 0.0
        own, part = self.count_held(request.tenant), self.part_of(request)
        is_below_share = own < self.bound * part
        if is_below_share and self.total < self.bound:
            return 0.0
        guaranteed = max(1.0, self.bound * RESERVE * part)
        if own + request.items <= guaranteed and self.total < self.bound * MAX_OVER:
            return 0.0
        until_share = 0.0 if is_below_share else (own - self.bound * part + 1) / part
        until_bound = self.total - self.bound + 1
        return max(1.0, min(self.total - idle + 1, max(until_share, until_bound)))

    def ahead_of(self, request: RoomRequest, enough: float) -> float:
        """Returns how many items leave in fair order before the request's last item.

        While n of one tenant's items leave, up to n items from another tenant with the same weight
        also leave (generalized processor sharing: Parekh and Gallager, IEEE/ACM ToN 1(3), 1993).

        Args:
            request: a request that has not been admitted yet.
            enough: results up to this number may be too high, which saves time.
        """
        holding = self._holdings.get(request.tenant)
        own = request.items + (0 if holding is None else holding.items)
        others = self.total + request.items - own
        if not others:
            return own - 1
        rounds = own / request.weight
        weights = self.weights - (0.0 if holding is None else holding.weight)
        items_ahead = own - 1 + min(others, rounds * weights)
        if items_ahead <= enough:
            return items_ahead
        return (
            own
            - 1
            + sum(
                min(other.items, rounds * other.weight)
                for other in self._holdings.values()
                if other is not holding
            )
        )

    def take(self, request: RoomRequest) -> None:
        """Admits the items."""
        holding = self._holdings.get(request.tenant)
        if holding is None:
            holding = self._holdings[request.tenant] = Holding(request.weight)
            self.weights += request.weight
        holding.items += request.items
        self.total += request.items

    def release(self, request: RoomRequest) -> None:
        """Releases admitted items."""
        holding = self._holdings[request.tenant]
        holding.items -= request.items
        self.total -= request.items
        if not holding.items:
            del self._holdings[request.tenant]
            # Rounding errors disappear when the last tenant leaves.
            self.weights = self.weights - holding.weight if self._holdings else 0.0
