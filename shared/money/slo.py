"""Counts items covered by the deadline objective, by outcome.

The objective covers interactive items whose callers allowed the model at least its usual time.
Otherwise, a tenant with tiny deadlines would use up everyone's error budget, and no worker could
prevent that.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

from prometheus_client import Counter

from shared.models.entry import Deadline
from shared.tenants.plan import Priority

End: TypeAlias = Literal["in_time", "late", "refused"]
ENDS: tuple[End, ...] = get_args(End)
ROUNDING_S = 0.01
"""Messages carry times as decimals, so a default deadline may seem slightly shorter."""

_ITEMS = Counter(
    "penstock_slo_items_total",
    "Items covered by the deadline objective: in_time, late, or refused because too few workers "
    "could compute them in time. Items rejected by a plan's limit are not counted.",
    ["model", "end"],
)
_ENDS_OF_STATUS: dict[str, End] = {"succeeded": "in_time", "expired": "late"}


def counts_toward_slo(
    deadline: Deadline, priority: Priority, limits_s: Iterable[float | None]
) -> bool:
    """Returns whether an item counts toward the SLO.

    Args:
        limits_s: time limits, in seconds, that the caller set for the item. None if not set.
    """
    if priority != "interactive":
        return False
    least_s = deadline.default_s - ROUNDING_S
    return all([limit_s is None or limit_s >= least_s for limit_s in limits_s])


def show(models: Iterable[str]) -> None:
    """Exports these models' counters with the value 0.

    Otherwise, Prometheus would miss a new counter's first increment.
    """
    for model in models:
        for end in ENDS:
            _of(model, end)


def count_ended(model: str, status: str, items: int = 1) -> None:
    """Counts SLO items by status. Statuses unrelated to deadlines are not counted."""
    if (end := _ENDS_OF_STATUS.get(status)) is not None:
        _of(model, end).inc(items)


def count_refused(model: str, items: int) -> None:
    """Counts SLO items that no worker could process in time."""
    _of(model, "refused").inc(items)


@lru_cache(maxsize=1024)
def _of(model: str, end: End) -> Counter:
    return _ITEMS.labels(model, end)
