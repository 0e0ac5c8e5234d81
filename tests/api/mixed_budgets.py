"""Keys for one mix of requests, with budgets that change while requests are running."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from shared.tenants.plan import Limits, Plan
from tests.api.ledger import budgets_of
from tests.api.mixtures import NAMES, NewBudget
from tests.keys import keys_url, stored

RICH_USD, POOR_USD, OWN_USD = 1000.0, 0.05, 0.04
TENANTS = {"one": "rich", "two": "rich", "poor": "poor", "open": "open"}
PLANS = {
    "rich": Plan(budget_usd_per_month=RICH_USD),
    "poor": Plan(budget_usd_per_month=POOR_USD),
    "open": Plan(budget_usd_per_month=POOR_USD, on_limit_store_outage="allow"),
}


@dataclass
class MixedBudgets:
    """Tenants, keys, and their budgets, in a file that processes read.

    Every name contains its example's number, so no two examples share tenants.
    """

    folder: Path
    number: int
    plans: dict[str, Plan] = field(default_factory=lambda: dict(PLANS))
    plan_of: dict[str, str] = field(default_factory=lambda: {name: name for name in PLANS})
    own_usd: dict[str, float | None] = field(
        default_factory=lambda: {name: OWN_USD if name == "two" else RICH_USD for name in NAMES}
    )
    highest_usd: dict[str, float] = field(default_factory=dict)
    """The highest budget so far, keyed by counter name. Infinite if there was no limit at any
    point.
    """

    @property
    def tenant_of(self) -> dict[str, str]:
        return {self.key(name): f"{tenant}-{self.number}" for name, tenant in TENANTS.items()}

    def key(self, name: str) -> str:
        """Returns a key's name in this example."""
        return f"{name}-{self.number}"

    def write(self) -> str:
        """Writes the file, and returns its URL."""
        for name, usd in self.budgets().items():
            highest_usd = math.inf if usd is None else usd
            self.highest_usd[name] = max(highest_usd, self.highest_usd.get(name, 0.0))
        return keys_url(
            self.folder,
            plans=self.plans,
            tenants={f"{tenant}-{self.number}": plan for tenant, plan in self.plan_of.items()},
            keys=[
                stored(
                    self.key(name),
                    self.tenant_of[self.key(name)],
                    limits=Limits(budget_usd_per_month=usd),
                )
                for name, usd in self.own_usd.items()
            ],
        )

    def change(self, new: NewBudget) -> None:
        """Changes a key's or tenant's budget. To change it, a tenant may be moved to another
        plan.
        """
        if new.holder == "two":
            self.own_usd[new.holder] = new.usd
        else:
            plan = self.plans[self.plan_of[new.holder]]
            if new.moves:
                is_moved = self.plan_of[new.holder] != new.holder
                self.plan_of[new.holder] = new.holder if is_moved else f"other-{new.holder}"
            self.plans[self.plan_of[new.holder]] = msgspec.structs.replace(
                plan, budget_usd_per_month=new.usd
            )
        self.write()

    def budgets(self) -> Mapping[str, float | None]:
        """Returns the budgets, keyed by counter name. None if nothing is counted."""
        found: dict[str, float | None] = {}
        for name, tenant in TENANTS.items():
            key, of = self.key(name), f"{tenant}-{self.number}"
            of_tenant, of_key = budgets_of(of, stored(key, of).id)
            found[of_tenant] = self.plans[self.plan_of[tenant]].budget_usd_per_month
            found[of_key] = self.own_usd[name]
        return found

    def counted(self) -> set[str]:
        """Returns the names of the counters that currently have a budget."""
        return {name for name, usd in self.budgets().items() if usd is not None}
