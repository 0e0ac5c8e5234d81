"""Batches calls to Redis: calls that come during a round trip share the next one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

from prometheus_client import Counter
from redis.exceptions import RedisError

ROUND_TRIP_ENTRIES = 512
"""A round trip takes waiting calls until it carries this many entries."""
WAITING_ENTRIES = 16384
"""Entries that may wait for the next round trip. Above this limit a call fails."""

# uvloop raises RuntimeError for a write to a connection that was closed.
REDIS_FAILURES = (RedisError, OSError, EOFError, RuntimeError)

Sent = TypeVar("Sent")
Got = TypeVar("Got")


class Batcher(Generic[Sent, Got]):
    """Makes the calls of one operation, one round trip at a time.

    A call that comes during a round trip joins the next one.

    Args:
        operation: the label in `errors`.
        send: does one round trip.
        timeout_s: limit of one round trip.
        judge: counts the outcome of a round trip, and returns whether the breaker is closed.
        errors: counts round trips that failed, by operation.
    """

    def __init__(
        self,
        operation: str,
        send: Callable[[list[Sent]], Coroutine[Any, Any, list[Got]]],
        timeout_s: float,
        judge: Callable[[Exception | None], bool],
        errors: Counter,
    ) -> None:
        self._operation = operation
        self._send = send
        self._timeout_s = timeout_s
        self._judge = judge
        self._errors = errors
        self._waiting: deque[tuple[Sequence[Sent], asyncio.Future[list[Got] | None]]] = deque()
        self._waiting_entries = 0
        self._arrived = asyncio.Event()

    async def call(self, entries: Sequence[Sent]) -> list[Got] | None:
        """Returns one answer per entry, or None after a failure or with a full queue."""
        if self._waiting_entries + len(entries) > WAITING_ENTRIES:
            self._errors.labels(self._operation).inc()
            return None
        answers: asyncio.Future[list[Got] | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((entries, answers))
        self._waiting_entries += len(entries)
        self._arrived.set()
        # The current round trip, the one of this call, and two for calls ahead of it.
        await asyncio.wait([answers], timeout=4 * self._timeout_s)
        return answers.result() if answers.done() else None

    async def run(self) -> None:
        """Does the round trips until canceled. The link runs this."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                await self._round_trip()

    async def _round_trip(self) -> None:
        calls, entries = [], list[Sent]()
        while self._waiting and len(entries) < ROUND_TRIP_ENTRIES:
            calls.append(self._waiting.popleft())
            entries.extend(calls[-1][0])
        self._waiting_entries -= len(entries)
        answers = await self._ask(entries)
        start = 0
        for sent, future in calls:
            if not future.done():
                future.set_result(None if answers is None else answers[start : start + len(sent)])
            start += len(sent)

    async def _ask(self, entries: list[Sent]) -> list[Got] | None:
        error: Exception | None = None
        answers: list[Got] | None = None
        try:
            answers = await within(self._timeout_s, self._send(entries))
        except REDIS_FAILURES as caught:
            error = caught
            self._errors.labels(self._operation).inc()
        if not self._judge(error):
            self._give_up()
        return answers

    def _give_up(self) -> None:
        """Answers all waiting calls with None, because the breaker opened."""
        while self._waiting:
            _, future = self._waiting.popleft()
            if not future.done():
                future.set_result(None)
        self._waiting_entries = 0


async def within(limit_s: float, call: Coroutine[Any, Any, Got]) -> Got:
    """Returns the result of `call`, and cancels it after `limit_s`.

    This is not asyncio.timeout. If this process was held up, answer and timer are due in the same
    turn of the loop, and the timer would win. Waiting for a task finds the answer.

    Raises:
        TimeoutError: there was no result in time.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait([task], timeout=limit_s)
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=limit_s)
    if task.cancelled() or not task.done():
        raise TimeoutError(f"no answer in {limit_s} s")
    return task.result()
