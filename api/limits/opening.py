"""Opens the limiter of a process, with the store that it counts in and its warnings."""

from __future__ import annotations

from contextlib import AsyncExitStack

from api.limits.budget_warnings import BudgetWarnings
from api.limits.limiter import Limiter
from api.limits.store import LimitStore
from shared.transport import Publisher


async def open_limiter(
    opened: AsyncExitStack, redis_url: str, publisher: Publisher, instance: str, *, instances: int
) -> Limiter:
    """Opens a limiter, which `opened` closes.

    Args:
        opened: closes what is opened.
        redis_url: the Redis in which all instances count.
        publisher: sends warnings. It must stay open longer.
        instance: the id of this process.
        instances: how many there may be, to reckon with until Redis has said it. 0: only this one.
    """
    store = LimitStore(redis_url, instance)
    warnings = BudgetWarnings(store, publisher)
    limiter = Limiter(store, warnings, instances=max(1, instances))
    await opened.enter_async_context(limiter)
    await opened.enter_async_context(warnings)
    return limiter
