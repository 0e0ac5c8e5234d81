"""Warns tenants when they have spent certain shares of their budgets, once per share and month."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import NamedTuple, Self

from api.limits.accounts import LimitStore
from api.limits.counters import MonthCounter
from shared.broker.transport import Publisher
from shared.errors import PenstockError, Unavailable
from shared.tenants.plan import Plan
from shared.webhooks.event import BudgetEvent
from shared.webhooks.publisher import WebhookPublisher

log = logging.getLogger(__name__)

MAX_SENT = 10_000
MAX_SENDING = 64
CLOSE_LIMIT_S = 1.0


class _Warning(NamedTuple):
    key: str
    period: float
    share: float


class BudgetWarnings:
    """Publishes warnings in the background. An async context manager that owns their tasks.

    Args:
        store: records which warnings were sent.
        publisher: sends warnings to the function that delivers webhooks.
    """

    def __init__(self, store: LimitStore, publisher: Publisher) -> None:
        self._store = store
        self._webhooks = WebhookPublisher(publisher)
        self._sent: set[_Warning] = set()
        self._send_tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._send_tasks:
            _, late = await asyncio.wait(self._send_tasks, timeout=CLOSE_LIMIT_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    def check(
        self, counter: MonthCounter, plan: Plan, tenant: str, *, is_refused: bool = False
    ) -> None:
        """Warns if a share is reached for the first time.

        If a request is rejected because it does not fit in the rest of the budget, every share
        counts as reached.
        """
        if not plan.budget_webhook or not counter.period:
            return
        for share in plan.warn_at_shares:
            warning = _Warning(counter.key, counter.period, share)
            is_reached = is_refused or counter.used >= share * counter.limit
            if is_reached and warning not in self._sent and len(self._send_tasks) < MAX_SENDING:
                if len(self._sent) >= MAX_SENT:
                    self._sent.clear()  # Redis remembers them too
                self._sent.add(warning)
                event = BudgetEvent(
                    tenant=tenant,
                    key_id=counter.key_id,
                    url=plan.budget_webhook,
                    month=f"{counter.period // 12:04.0f}-{counter.period % 12 + 1:02.0f}",
                    share=share,
                    budget_usd=counter.limit,
                    spent_usd=counter.used,
                    created_at_s=time.time(),
                )
                task = asyncio.create_task(self._send(warning, event))
                self._send_tasks.add(task)
                task.add_done_callback(self._send_tasks.discard)

    async def _send(self, warning: _Warning, event: BudgetEvent) -> None:
        """Claims the warning, so that only one instance sends it.

        If the claim fails, another instance may send the warning.
        """
        is_claimed = False
        try:
            is_claimed = await self._store.claim_warning(*warning)
            if is_claimed:
                await self._webhooks.publish_budget(event)
        except PenstockError as error:
            log.warning(
                "budget warning not published",
                extra={"tenant": event.tenant, "reason": error.message},
            )
            self._sent.discard(warning)
            if is_claimed:
                with contextlib.suppress(Unavailable):
                    await self._store.unclaim_warning(*warning)
