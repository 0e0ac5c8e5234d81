"""Settles the reservations of predictions with limits when those predictions finish.

A prediction's reservations are stored in Redis along with its record (shared/stores/holds.py).
Every instance settles due reservations, whether or not it created them, so nothing depends on the
creating instance. The creating instance only tracks which of its items are in flight, and frees
their slots. If it dies, the slots expire.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from contextlib import suppress
from typing import Self

import msgspec

from api.errors import NotFound
from api.limits.limited_request import HeldLimits, Hold, LimitedRequest, sum_usage
from api.limits.limiter import Limiter
from api.predictions.service import GRACE_S, Predictions
from shared.errors import MALFORMED, Unavailable
from shared.process.concurrency import sleep_until_turn
from shared.stores.holds import DueHold, Holds
from shared.stores.record_state import Record

MAX_FOLLOWED = 16_384
"""Maximum number of predictions whose items count as in flight on this instance.

Other predictions' slots are freed immediately.
"""
MAX_DUE = 16
"""Maximum number of holds to take at a time, each with its prediction's reply."""
MAX_LOOKED_AT = 512
"""Maximum number of this instance's predictions to look up at a time."""
SWEEP_S, IDLE_SWEEP_S = 0.25, 1.0
"""Intervals between sweeps while this instance follows predictions, and while it follows none, so
that only other instances' reservations can be due.
"""
ENDING_S = 10.0
"""How long to wait, after a cancellation, for the worker's final receipt, with the charge.

If a worker is running the prediction, wait until the deadline.
"""
CLOSE_LIMIT_S = 1.0

log = logging.getLogger(__name__)
_decoder = msgspec.json.Decoder(HeldLimits)


class PredictionFollower:
    """Settles due reservations. An async context manager that owns the settling task."""

    def __init__(self, predictions: Predictions, holds: Holds, limiter: Limiter) -> None:
        self._predictions = predictions
        self._holds = holds
        self._limiter = limiter
        self._followed_requests: deque[tuple[LimitedRequest, Hold]] = deque()
        self._has_followed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._sweep_task = asyncio.create_task(self._sweep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._sweep_task.cancel()
        await asyncio.wait([self._sweep_task], timeout=CLOSE_LIMIT_S)
        for limited, _ in self._followed_requests:
            limited.end()
        self._followed_requests.clear()

    def follow(self, limited: LimitedRequest, hold: Hold) -> None:
        """Frees a prediction's slots once it has finished.

        If it is unknown whether the prediction was created, finds out.
        """
        if len(self._followed_requests) >= MAX_FOLLOWED:
            limited.end()
        else:
            self._followed_requests.append((limited, hold))
            self._has_followed.set()

    async def sweep(self) -> None:
        """Settles due reservations, and frees the slots of finished predictions."""
        while True:
            due = await self._holds.due(MAX_DUE)
            for hold in due:
                await self._try_to_settle(hold)
            if len(due) < MAX_DUE:
                break
        await self._free_slots()

    async def _sweep(self) -> None:
        while True:
            try:
                await self.sweep()
            except Unavailable as error:
                log.debug("not settled", extra={"reason": error.message})
            except Exception:
                log.exception("settling failed")
            await self._rest()

    async def _rest(self) -> None:
        """Waits for the next sweep: longer while this instance follows no predictions."""
        if not self._followed_requests:
            self._has_followed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(IDLE_SWEEP_S - SWEEP_S):
                    await self._has_followed.wait()
        await sleep_until_turn(SWEEP_S)

    async def _try_to_settle(self, due: DueHold) -> None:
        """Settles a hold, or leaves it due if that fails, because the others must not wait for it.

        Raises:
            Unavailable: Redis is unreachable.
        """
        try:
            await self._settle(due)
        except Unavailable:
            raise
        except Exception:  # for example, its prediction is damaged
            log.exception("a reservation was not settled", extra={"record": due.record_id})

    async def _settle(self, due: DueHold) -> None:
        try:
            held_limits = _decoder.decode(due.data)
        except MALFORMED:
            log.exception("a hold can't be read, so its prediction counts as reserved")
            await self._limiter.settle_hold(due.record_id, [], None)
            return
        record, used = due.record, None
        if record is not None:
            if not record.is_over:
                await self._end_if_late(due.record_id, held_limits)
                return
            if record.awaits_receipts and held_limits.step_prices:
                # The process that canceled the run may have died.
                await self._end_if_late(due.record_id, held_limits)
            if record.reply is None and _may_be_reported(record, held_limits, time.time()):
                return
            if record.reply is None and record.attempts:
                used = held_limits.count_unreported()
            else:
                outcomes = [] if record.reply is None else record.reply.outcomes
                used = sum_usage(
                    held_limits.price,
                    held_limits.unit,
                    outcomes,
                    step_prices=held_limits.step_prices,
                )
        await self._limiter.settle_hold(due.record_id, held_limits.takings, used)

    async def _end_if_late(self, record_id: str, held: HeldLimits) -> None:
        """Ends an overdue prediction, or settles a canceled run, by reading it.

        Its hold is then due for settlement again.
        """
        with suppress(NotFound):
            await self._predictions.read_linked(record_id, held.prediction_id)

    async def _free_slots(self) -> None:
        """Looks up holds for the predictions that have waited the longest.

        The others are looked up next time.
        """
        looked_at = list(itertools.islice(self._followed_requests, MAX_LOOKED_AT))
        if not looked_at:
            return
        held = await self._holds.are_held([hold.record_id for _, hold in looked_at])
        for (limited, hold), is_held in zip(looked_at, held, strict=True):
            if hold.is_stored is None:
                # An identical request may have created the prediction under a separate hold.
                hold.is_stored = await self._holds.was_created(hold.record_id, hold.data)
                if not hold.is_stored:
                    limited.cancel()
                    continue
                limited.hand_over()
            if not is_held:
                limited.end()
        for (limited, hold), is_held in zip(looked_at, held, strict=True):
            self._followed_requests.popleft()
            if is_held and hold.is_stored:
                self._followed_requests.append((limited, hold))


def _may_be_reported(record: Record, held: HeldLimits, now_s: float) -> bool:
    """Returns whether a worker may still report the charge for a canceled prediction."""
    if record.attempts == 0 and now_s >= record.canceled_at_s + ENDING_S:
        return False
    return now_s < held.deadline_s + GRACE_S
