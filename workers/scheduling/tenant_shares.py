"""Keeps one tenant from taking all of a worker's slots, if the model's items can't be interrupted.

A custom class without `predict_batch` computes an item from start to finish, which may take
minutes. If one tenant held every slot in every process, other tenants would have to wait for one of
its items to finish. Therefore, while other tenants are using the model, a tenant whose items take a
long time doesn't get the last free slot.

- A tenant whose items in the last hour have all been short (SHORT_S) may take all slots, because
  the others never have to wait longer than that. So may a tenant that is the only one using the
  model (OTHERS_S), so that no capacity goes unused. A tenant that has not completed any items yet
  is treated as having long items.
- Work that has started is never interrupted. A tenant's first item after a quiet period, or one
    that arrives while another tenant's items are getting longer, may therefore have to wait for one
    running item.

Uses no clock and does no I/O. Times are in seconds and come from any single clock.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

SHORT_S = 2.0
REMEMBERED_S = 3600.0
"""How long a tenant's longest item is remembered."""
OTHERS_S = 600.0
"""How long a tenant is considered to be using the model after its last use."""
MAX_TENANTS = 4096


class _Longest(NamedTuple):
    """A tenant's longest item, and when it finished."""

    seconds: float
    at_s: float


class TenantShares:
    """Decides which tenant may take a worker's last free slot."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()
        """When each tenant last used the model, most recent last."""
        self._longest: OrderedDict[str, _Longest] = OrderedDict()

    def record_arrival(self, tenant: str, now_s: float) -> None:
        """Records that one of a tenant's items was queued."""
        self._seen[tenant] = now_s
        self._seen.move_to_end(tenant)
        if len(self._seen) > MAX_TENANTS:
            self._seen.popitem(last=False)

    def record_end(
        self, tenant: str, took_s: float, now_s: float, *, is_computed: bool = True
    ) -> None:
        """Records how long one of a tenant's items held its slot.

        Args:
            tenant: the tenant whose item has finished.
            took_s: how long the item held its slot.
            is_computed: True if the item ran to completion. A canceled item doesn't predict how
                long the next one will take, unless it already took a long time.
        """
        self.record_arrival(tenant, now_s)
        if not is_computed and took_s <= SHORT_S:
            return
        known = self._longest.get(tenant)
        if known is None or took_s >= known.seconds or now_s - known.at_s > REMEMBERED_S:
            self._longest[tenant] = _Longest(took_s, now_s)
            self._longest.move_to_end(tenant)
        if len(self._longest) > MAX_TENANTS:
            self._longest.popitem(last=False)

    def may_take(self, tenant: str, held: int, slots: int, now_s: float) -> bool:
        """Returns whether a tenant may take one more slot.

        Args:
            tenant: the tenant whose item is next.
            held: number of slots the tenant holds.
            slots: number of slots the worker has.
        """
        if slots < 2 or held < slots - 1 or self._is_quick(tenant, now_s):
            return True
        return not self._is_shared(tenant, now_s)

    def _is_quick(self, tenant: str, now_s: float) -> bool:
        longest = self._longest.get(tenant)
        is_known = longest is not None and now_s - longest.at_s <= REMEMBERED_S
        return is_known and longest is not None and longest.seconds <= SHORT_S

    def _is_shared(self, tenant: str, now_s: float) -> bool:
        """Returns whether another tenant is using the model."""
        others = (at_s for name, at_s in reversed(self._seen.items()) if name != tenant)
        latest_s = next(others, None)
        return latest_s is not None and now_s - latest_s <= OTHERS_S
