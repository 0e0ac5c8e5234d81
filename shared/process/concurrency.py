"""Concurrency within a process: background tasks, pauses between attempts, and fair permits."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

EARLY_S = 0.005
"""How much earlier than its turn a task may wake up, because event loops round times."""

log = logging.getLogger(__name__)


class BackgroundTask:
    """Runs a coroutine that never returns. Logs a bug if it returns before `stop` is called.

    Args:
        on_bug: called if the coroutine returns before `stop` is called.
    """

    def __init__(
        self,
        work: str,
        run: Callable[[], Coroutine[Any, Any, None]],
        on_bug: Callable[[], None] = lambda: None,
    ) -> None:
        self._work = work
        self._run = run
        self._on_bug = on_bug
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._note_end)

    async def stop(self) -> None:
        """Stops the coroutine and waits for it to finish. Does nothing if it was not started."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            facts = {"work": self._work}
            log.critical("work ended; this is a bug", extra=facts, exc_info=task.exception())
            self._on_bug()


def backoff(first_s: float = 0.1, longest_s: float = 10.0) -> Iterator[float]:
    """Yields the pause before each retry, in seconds.

    Each pause is chosen at random between zero and an upper bound, so that clients that failed
    together don't retry together. After a success, start over with a new iterator.

    Args:
        first_s: upper bound for the first pause. The bound doubles with each pause.
    """
    bound_s = min(first_s, longest_s)
    while True:
        yield random.uniform(0.0, bound_s)
        bound_s = min(2 * bound_s, longest_s)


def find_turn_s(period_s: float, after_s: float) -> float:
    """Returns the next multiple of `period_s` on the monotonic clock.

    Tasks with the same period, or with multiples of it, thus wake the process together.
    """
    return (math.floor((after_s + EARLY_S) / period_s) + 1) * period_s


async def sleep_until_turn(period_s: float) -> None:
    """Sleeps until the next multiple of `period_s` on the monotonic clock."""
    now_s = time.monotonic()
    await asyncio.sleep(find_turn_s(period_s, now_s) - now_s)


def add_jitter(period_s: float) -> float:
    """Returns `period_s` reduced by up to a tenth, so that timers started together drift apart."""
    return period_s * random.uniform(0.9, 1.0)


class FairPermits:
    """A limited number of permits shared by several owners, such as threads of a blocking client.

    An owner may take a permit only if more permits are free than it already holds, so a single
    owner gets at most half, and it takes several owners to use them all. Waiting owners take turns.
    """

    def __init__(self, permits: int) -> None:
        self._permits = permits
        self._running: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    async def take(self, owner: str) -> None:
        """Waits for a permit. The caller must call `give` afterward, unless this call raises."""
        if not self._waiting and self._may_start(owner):
            self._running[owner] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        self._start_next()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the owner's turn came at the same moment
                self.give(owner)
            else:
                self._leave(owner, turn)
                self._start_next()
            raise

    def give(self, owner: str) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        self._start_next()

    def _may_start(self, owner: str) -> bool:
        return self._running[owner] < self._permits - self._running.total()

    def _start_next(self) -> None:
        """Hands out permits, longest-waiting owner first, while any waiting owner may have one."""
        while (owner := next(filter(self._may_start, self._waiting), None)) is not None:
            turn = self._waiting[owner].popleft()
            if self._waiting[owner]:
                self._waiting.move_to_end(owner)
            else:
                del self._waiting[owner]
            if not turn.cancelled():
                self._running[owner] += 1
                turn.set_result(None)

    def _leave(self, owner: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting.get(owner)
        if turns is not None and turn in turns:
            turns.remove(turn)
            if not turns:
                del self._waiting[owner]
