"""Rate-limit headers and error messages, as in OpenAI's API.

https://platform.openai.com/docs/guides/rate-limits#rate-limits-in-headers
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from api.errors import BudgetExceeded, BudgetReserved, LargerThanBudget, RateLimited
from api.limits.counters import Counter, MonthCounter
from shared.money.amounts import plain

MIN_RETRY_S, MAX_RETRY_S = 0.25, 60.0
"""Bounds for `Retry-After`, the same as for a full instance (api/dispatch/admission.py)."""
RESERVED_RETRY_S = 1.0
"""Retry-After if the rest of a budget is reserved. Most requests finish sooner."""
BUDGET_UNIT = "usd"
LIMITS_PREFIX = "x-ratelimit-"
SHOWN_UNITS = ("requests", "tokens", "pixel_steps", "work")


class Need(NamedTuple):
    """The amount a request needs from one limit."""

    counter: Counter
    amount: float


def headers_of(counters: Iterable[Counter], now_s: float) -> dict[str, str]:
    """Returns the `x-ratelimit-{limit,remaining,reset}-<unit>` headers.

    If several of the tenant's, key's, and model's limits share a unit, the headers show the one
    with the least remaining.
    """
    tightest: dict[str, Counter] = {}
    for counter in counters:
        if counter.unit in SHOWN_UNITS:
            other = tightest.get(counter.unit)
            if other is None or counter.remaining < other.remaining:
                tightest[counter.unit] = counter
    headers = {}
    for unit, counter in tightest.items():
        name = unit.replace("_", "-")
        headers[f"{LIMITS_PREFIX}limit-{name}"] = f"{counter.limit:.0f}"
        headers[f"{LIMITS_PREFIX}remaining-{name}"] = f"{math.floor(counter.remaining)}"
        headers[f"{LIMITS_PREFIX}reset-{name}"] = duration(counter.reset_s(now_s))
    return headers


def duration(seconds: float) -> str:
    """Returns a duration, rounded up, in OpenAI's format: `6m0s`, `1s`, `17ms`."""
    if seconds < 1:
        milliseconds = math.ceil(seconds * 1000)
        return "1s" if milliseconds == 1000 else f"{milliseconds}ms" if milliseconds else "0s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def refusal(refused: Sequence[Need], now_s: float) -> RateLimited:
    """Returns the error for the limit that rejected a request.

    If several limits rejected the request, the error is for the limit with the longest wait.
    """
    larger = [need for need in refused if _is_larger_than_budget(*need)]
    counter, amount = max(larger or refused, key=lambda need: need.counter.retry_after_s(now_s))
    if counter.unit == BUDGET_UNIT:
        return _over_budget(counter, amount, now_s)
    name = counter.unit.replace("_", "-")
    if amount > counter.limit:
        return RateLimited(
            f"Request too large for the limit of {counter.subject}: "
            f"limit {counter.limit:.0f}, requested {amount:.0f} {name}",
            unit=counter.unit,
            retry_after_s=MAX_RETRY_S,
            is_final=True,
        )
    retry_s = min(max(counter.retry_after_s(now_s), MIN_RETRY_S), MAX_RETRY_S)
    return RateLimited(
        f"Rate limit reached for {counter.subject}: limit {counter.limit:.0f}, "
        f"used {counter.used:.0f}, requested {amount:.0f}. "
        f"Please try again in {duration(retry_s)}.",
        unit=counter.unit,
        retry_after_s=retry_s,
    )


def _is_larger_than_budget(counter: Counter, amount: float) -> bool:
    """Returns whether a request can never fit within its budget.

    A budget of 0 means that nothing may run for now.
    """
    return counter.unit == BUDGET_UNIT and amount > counter.limit > 0


def _over_budget(counter: Counter, amount: float, now_s: float) -> BudgetExceeded:
    if isinstance(counter, MonthCounter) and not counter.is_spent(amount):
        return BudgetReserved(
            f"Requests in flight have reserved the rest of the budget in {counter.subject}: limit "
            f"{plain(counter.limit)}, spent {plain(counter.spent)}, reserved "
            f"{plain(counter.used - counter.spent)}, requested {plain(amount)}. Please try again "
            f"in {duration(RESERVED_RETRY_S)}.",
            unit=counter.unit,
            retry_after_s=RESERVED_RETRY_S,
        )
    if _is_larger_than_budget(counter, amount):
        return LargerThanBudget(
            f"Request too large for the budget in {counter.subject}: limit "
            f"{plain(counter.limit)}, requested {plain(amount)}. Send less per request or "
            "ask for a larger budget.",
            unit=counter.unit,
            retry_after_s=MAX_RETRY_S,
            is_final=True,
        )
    return BudgetExceeded(
        "You exceeded your current quota, please check your plan and billing details. "
        f"Budget in {counter.subject}: limit {plain(counter.limit)}, used {plain(counter.used)}, "
        f"requested {plain(amount)}. It resets at the start of the next month (UTC).",
        unit=counter.unit,
        # 0: the request exceeds the whole budget, so Redis was not asked when the next month
        # starts.
        retry_after_s=counter.retry_after_s(now_s) or MAX_RETRY_S,
        is_final=True,
    )
