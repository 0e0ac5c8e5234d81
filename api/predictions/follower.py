"""Follows predictions of callers with limits to their ends, when no request waits for them.

What was reserved is settled then as it is charged, and its items are no longer in flight. The
instance that created it follows it. If that dies, what was reserved counts, and
its items in flight are free when their slots expire.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from api.limits.limited_request import LimitedRequest
from api.predictions.creation import Creation, PredictionSnapshot, Refresh

MOST_FOLLOWED = 256
"""Predictions of one instance. Each reads its record twice a second. Others count as reserved."""
GRACE_S = 10.0
"""After its deadline a prediction is ended by whoever reads it."""
ENDING_S = 10.0
"""For so long after a prediction was canceled, its worker is waited for, which tells the charge."""
CLOSE_LIMIT_S = 1.0


class PredictionFollower:
    """An async context manager that owns a task for each prediction it follows.

    Args:
        refresh: reads a prediction again.
    """

    def __init__(self, refresh: Refresh) -> None:
        self._refresh = refresh
        self._following: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._following:
            task.cancel()
        if self._following:
            await asyncio.wait(self._following, timeout=CLOSE_LIMIT_S)

    def follow(self, limited: LimitedRequest, snapshot: PredictionSnapshot) -> bool:
        """Ends `limited` when the prediction ends. False: too many are followed already."""
        if len(self._following) >= MOST_FOLLOWED:
            return False
        task = asyncio.create_task(self._follow(limited, snapshot))
        self._following.add(task)
        task.add_done_callback(self._following.discard)
        return True

    async def _follow(self, limited: LimitedRequest, snapshot: PredictionSnapshot) -> None:
        creation = Creation(snapshot, self._refresh, None, is_new=True)
        try:
            await creation.wait(snapshot.prediction.deadline_s + GRACE_S - time.time())
            await creation.wait_for_reply(ENDING_S)
        finally:
            record, price = creation.snapshot.record, snapshot.prediction.price
            was_deleted = not record.document
            if price is None or not record.is_over or (was_deleted and record.reply is None):
                limited.leave()
            else:
                limited.end(price, [] if record.reply is None else record.reply.outcomes)
