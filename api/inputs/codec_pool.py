"""A pool of processes that decode and encode pictures, with a bounded queue and a budget of memory.

The request's deadline applies in the queue and while its picture is decoded. At the deadline, or when the caller hangs
up, the process is killed. A new one starts within a tenth of a second, and idle ones exit, so an API without pictures
has none. See docs/decisions/0015-pictures-in-processes.md.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from api import metrics
from api.inputs.codec_client import PictureChild
from api.inputs.codec_protocol import Answer, Order
from shared.errors import BadInput, DeadlineExceeded, Overloaded, Unavailable

MOST_WAITING = 64
"""New pictures that wait for a process."""
MOST_WAITING_BYTES = 128 * 1024 * 1024
"""What they may take together, as they came; the first is let in whatever its size."""
IDLE_S = 30.0
"""After which a process that has nothing to do leaves."""
FIRST_USUAL_S, WEIGHT = 0.3, 0.2
"""What a picture takes a process: the first guess, and what the newest weighs in the moving average."""
SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.25, 60.0


@dataclass(slots=True)
class _Task:
    """One picture on its way."""

    is_new: bool
    size_bytes: int
    is_begun: bool = False


class PicturePool:
    """An async context manager that owns its processes.

    Args:
        processes: the most there are at a time.
        budget_bytes: what pictures may take together while they are decoded; a larger one is decoded alone.
    """

    def __init__(self, processes: int, budget_bytes: int) -> None:
        self._free = processes
        self._processes = processes
        self._budget_bytes = budget_bytes
        # Results before new pictures: they are computed and paid for.
        self._lines: dict[bool, deque[asyncio.Future[None]]] = {False: deque(), True: deque()}
        self._waiting_bytes = 0
        self._idle: dict[PictureChild, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._room_line = asyncio.Lock()
        self._room_freed = asyncio.Event()
        self._decoding_bytes = 0
        self._usual_s = FIRST_USUAL_S

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in list(self._idle):
            self._dismiss(child)
        while self._ending:
            await asyncio.wait(self._ending)

    async def run(self, order: Order, data: bytes, *, deadline_s: float, is_new: bool) -> tuple[Answer, bytes]:
        """Has an order done on the picture in `data`.

        Args:
            order: what to do.
            data: the picture as it came.
            deadline_s: Unix time after which nobody wants it.
            is_new: it may be refused; a result that was drawn comes before all that is new, and is not.

        Raises:
            Overloaded: too much waits, or it would not be done by its deadline.
            DeadlineExceeded: it was not done in time, and nothing works on it any more.
            BadInput: it is no picture that is taken.
            Unavailable: its process died.
        """
        task = _Task(is_new, len(data))
        remaining_s = deadline_s - time.time()
        if is_new and not self._free:
            self._check(task, remaining_s)
        end = "abandoned"
        try:
            async with asyncio.timeout(remaining_s):
                if remaining_s <= 0:
                    raise TimeoutError
                await self._turn(task)
                done = await self._run(task, order, data)
            end = "done"
            return done
        except TimeoutError as error:
            end = "expired"
            was = "being decoded" if task.is_begun else "waiting to be decoded"
            raise DeadlineExceeded(f"deadline exceeded: the image was still {was}") from error
        except BadInput:
            end = "refused"
            raise
        except Unavailable:
            end = "died"
            raise
        finally:
            metrics.PICTURES.labels(end if task.is_begun else f"{end}_waiting").inc()

    def _check(self, task: _Task, remaining_s: float) -> None:
        """Refuses what could not be done in time; where nothing waits it is tried whatever the estimate."""
        waiting = len(self._lines[True])
        if not waiting:
            return
        wait_s = (1 + waiting + len(self._lines[False])) * self._usual_s / self._processes
        late_s = wait_s + self._usual_s - remaining_s
        if waiting >= MOST_WAITING or self._waiting_bytes + task.size_bytes > MOST_WAITING_BYTES:
            reason, retry_after_s = f"{waiting} images are already waiting to be decoded", self._usual_s
        elif late_s > 0:
            reason, retry_after_s = f"the image would be decoded {late_s:.3g} s after its deadline", min(late_s, wait_s)
        else:
            return
        metrics.PICTURES.labels("shed").inc()
        bounded_s = min(max(retry_after_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
        raise Overloaded(f"{reason}; try again in {bounded_s:.2g} s", retry_after_s=bounded_s)

    async def _turn(self, task: _Task) -> None:
        """Waits until a process may be had; those that wait get one in order."""
        if self._free:
            self._free -= 1
            return
        line, turn = self._lines[task.is_new], asyncio.get_running_loop().create_future()
        line.append(turn)
        metrics.PICTURES_WAITING.inc()
        self._waiting_bytes += task.size_bytes
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                line.remove(turn)
            else:
                self._pass_on()
            raise
        finally:
            self._waiting_bytes -= task.size_bytes
            metrics.PICTURES_WAITING.dec()

    def _pass_on(self) -> None:
        """Gives a process that may be had to who waits first."""
        for line in self._lines.values():
            for turn in line:
                if not turn.done():
                    line.remove(turn)
                    turn.set_result(None)
                    return
        self._free += 1

    async def _run(self, task: _Task, order: Order, data: bytes) -> tuple[Answer, bytes]:
        task.is_begun, begun_s = True, time.monotonic()
        child, is_good = None, False
        try:
            child = self._wake() or await PictureChild.start()
            try:
                done = await child.run(order, data, self._room)
            finally:
                is_good = child.is_up
            self._usual_s += WEIGHT * (time.monotonic() - begun_s - self._usual_s)
            return done
        except BadInput:
            raise
        except BaseException:
            # What nobody wants any more is not computed to its end.
            is_good = False
            raise
        finally:
            if child is None:
                self._pass_on()
            elif is_good:
                self._idle[child] = asyncio.get_running_loop().call_later(IDLE_S, self._dismiss, child)
                self._pass_on()
            else:
                self._end(child, passes_on=True)

    def _wake(self) -> PictureChild | None:
        """A process that has nothing to do, the one that has been so for the shortest time."""
        while self._idle:
            child, timer = self._idle.popitem()
            timer.cancel()
            if child.is_up:
                return child
            self._end(child)
        return None

    def _dismiss(self, child: PictureChild) -> None:
        self._idle.pop(child).cancel()
        self._end(child)

    def _end(self, child: PictureChild, *, passes_on: bool = False) -> None:
        """Kills a process; its place is given on when it is gone, so that there are never more."""
        task = asyncio.create_task(child.end())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        if passes_on:
            task.add_done_callback(lambda task: self._pass_on())

    @asynccontextmanager
    async def _room(self, cost_bytes: int) -> AsyncGenerator[None]:
        """Holds room for a picture in the budget; first come, first served, so that large ones get some too."""
        async with self._room_line:
            while self._decoding_bytes and self._decoding_bytes + cost_bytes > self._budget_bytes:
                self._room_freed.clear()
                await self._room_freed.wait()
            self._decoding_bytes += cost_bytes
        try:
            yield
        finally:
            self._decoding_bytes -= cost_bytes
            self._room_freed.set()
