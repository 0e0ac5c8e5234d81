"""A pool of processes that decode and encode images, with a bounded queue and a memory budget.

The deadline of a request applies in the queue and while its image is decoded. At the deadline, or
when the caller hangs up, the process is killed. A new one starts within a tenth of a second. Idle
processes exit, so an API without image traffic has none.
See docs/decisions/0015-image-codec-processes.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from api import metrics
from api.fair_room import FairRoom, OneItem
from api.inputs.codec_client import CodecClient
from api.inputs.codec_protocol import CodecCommand, CodecReply
from api.inputs.fair_line import FairLine
from shared.errors import BadInput, DeadlineExceeded, Overloaded, Unavailable

MAX_QUEUED = 64
"""The room for new images that wait for a process."""
MAX_QUEUED_BYTES = 128 * 1024 * 1024
"""The room for the bytes of their files. The first is admitted whatever its size."""
IDLE_S = 30.0
"""After this idle time a process exits."""
FIRST_SERVICE_S, NEWEST_WEIGHT = 0.3, 0.2
"""Seconds per image: the first guess, and the weight of the newest value in the moving average."""
SHORTEST_RETRY_S, LONGEST_RETRY_S = 0.25, 60.0


@dataclass(slots=True)
class _Task:
    """One command in the pool."""

    is_new: bool
    tenant: str
    size_bytes: int
    is_started: bool = False


class CodecPool:
    """An async context manager that owns its processes.

    Args:
        processes: the most processes at a time.
        budget_bytes: the memory for all images that are being decoded. A larger one is decoded
            alone.
        start: starts a process. Tests replace it.
    """

    def __init__(
        self,
        processes: int,
        budget_bytes: int,
        start: Callable[[], Awaitable[CodecClient]] = CodecClient.start,
    ) -> None:
        self._start = start
        self._free = processes
        self._processes = processes
        self._budget_bytes = budget_bytes
        # Results before new images, since they are already computed and paid for.
        self._lines: dict[bool, FairLine[asyncio.Future[None]]] = {
            False: FairLine(),
            True: FairLine(),
        }
        self._results_waiting = 0
        self._room = FairRoom(MAX_QUEUED)
        self._bytes_room = FairRoom(MAX_QUEUED_BYTES)
        self._idle: dict[CodecClient, asyncio.TimerHandle] = {}
        self._killing: set[asyncio.Task[None]] = set()
        self._memory_lock = asyncio.Lock()
        self._memory_freed = asyncio.Event()
        self._decoding_bytes = 0
        self._service_s = FIRST_SERVICE_S

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in list(self._idle):
            self._stop_idle(child)
        while self._killing:
            await asyncio.wait(self._killing)

    async def run(
        self,
        command: CodecCommand,
        data: bytes,
        *,
        deadline_s: float,
        is_new: bool,
        tenant: str = "",
    ) -> tuple[CodecReply, bytes]:
        """Runs a command on the image in `data`.

        Args:
            command: what to do.
            data: the image file.
            deadline_s: Unix time at which the command is stopped.
            is_new: whether it may be refused. Computed results go first and are never refused.
            tenant: whose turn it takes. Empty: of all callers who are not known.

        Raises:
            Overloaded: the queue is full, or the command would miss its deadline.
            DeadlineExceeded: the command was stopped at its deadline.
            BadInput: the image was refused.
            Unavailable: the process died.
        """
        task = _Task(is_new, tenant, len(data))
        remaining_s = deadline_s - time.time()
        if is_new and not self._free:
            self._check(task, remaining_s)
        end = "abandoned"
        try:
            async with asyncio.timeout(remaining_s):
                if remaining_s <= 0:
                    raise TimeoutError
                await self._acquire_process(task)
                done = await self._run(task, command, data)
            end = "done"
            return done
        except TimeoutError as error:
            end = "expired"
            was = "being decoded" if task.is_started else "waiting to be decoded"
            raise DeadlineExceeded(f"deadline exceeded: the image was still {was}") from error
        except BadInput:
            end = "refused"
            raise
        except Unavailable:
            end = "died"
            raise
        finally:
            metrics.IMAGES.labels(end if task.is_started else f"{end}_waiting").inc()

    def _check(self, task: _Task, remaining_s: float) -> None:
        """Refuses a command that would miss its deadline.

        With an empty queue it is always admitted.
        """
        if not self._room.total:
            return
        picture, size = OneItem(task.tenant), OneItem(task.tenant, items=max(1, task.size_bytes))
        before = self._room.ahead_of(picture, enough=-1.0) + self._results_waiting
        wait_s = (1 + before) * self._service_s / self._processes
        late_s = wait_s + self._service_s - remaining_s
        if self._room.turns_to_wait(picture) or self._bytes_room.turns_to_wait(size):
            waiting = self._room.held_by(task.tenant)
            reason = f"{waiting} of your images wait to be decoded, and there is no room for more"
            retry_after_s = self._service_s
        elif late_s > 0:
            reason = f"the image would be decoded {late_s:.3g} s after its deadline"
            retry_after_s = min(late_s, wait_s)
        else:
            return
        metrics.IMAGES.labels("shed").inc()
        bounded_s = min(max(retry_after_s, SHORTEST_RETRY_S), LONGEST_RETRY_S)
        raise Overloaded(f"{reason}; try again in {bounded_s:.2g} s", retry_after_s=bounded_s)

    async def _acquire_process(self, task: _Task) -> None:
        """Waits for a process."""
        if self._free:
            self._free -= 1
            return
        line, turn = self._lines[task.is_new], asyncio.get_running_loop().create_future()
        line.add(task.tenant, turn)
        with self._counted(task):
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    # A process that became free meanwhile may have passed it over already.
                    line.discard(task.tenant, turn)
                else:
                    self._release_process()
                raise

    @contextmanager
    def _counted(self, task: _Task) -> Iterator[None]:
        """Counts a command that waits."""
        picture, size = OneItem(task.tenant), OneItem(task.tenant, items=max(1, task.size_bytes))
        if task.is_new:
            self._room.take(picture)
            self._bytes_room.take(size)
        else:
            self._results_waiting += 1
        try:
            with metrics.IMAGES_WAITING.track_inprogress():
                yield
        finally:
            if task.is_new:
                self._room.release(picture)
                self._bytes_room.release(size)
            else:
                self._results_waiting -= 1

    def _release_process(self) -> None:
        """Gives a free process to the command whose turn it is."""
        for line in self._lines.values():
            while (turn := line.pop()) is not None:
                if not turn.done():
                    turn.set_result(None)
                    return
        self._free += 1

    async def _run(
        self, task: _Task, command: CodecCommand, data: bytes
    ) -> tuple[CodecReply, bytes]:
        task.is_started, started_s = True, time.monotonic()
        child, is_reusable = None, False
        try:
            child = self._reuse_idle() or await self._start()
            try:
                done = await child.run(command, data, self._reserve_memory)
            finally:
                is_reusable = child.is_up
            self._service_s += NEWEST_WEIGHT * (time.monotonic() - started_s - self._service_s)
            return done
        except BadInput:
            raise
        except BaseException:
            # The command was canceled or failed: its process is killed.
            is_reusable = False
            raise
        finally:
            if child is None:
                self._release_process()
            elif is_reusable:
                self._idle[child] = asyncio.get_running_loop().call_later(
                    IDLE_S, self._stop_idle, child
                )
                self._release_process()
            else:
                self._kill(child, releases=True)

    def _reuse_idle(self) -> CodecClient | None:
        """The process that has been idle for the shortest time. None without one."""
        while self._idle:
            child, timer = self._idle.popitem()
            timer.cancel()
            if child.is_up:
                return child
            self._kill(child)
        return None

    def _stop_idle(self, child: CodecClient) -> None:
        self._idle.pop(child).cancel()
        self._kill(child)

    def _kill(self, child: CodecClient, *, releases: bool = False) -> None:
        """Kills a process. Its place is released once it is gone, so there are never too many."""
        task = asyncio.create_task(child.kill())
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)
        if releases:
            task.add_done_callback(lambda task: self._release_process())

    @asynccontextmanager
    async def _reserve_memory(self, cost_bytes: int) -> AsyncGenerator[None]:
        """Holds memory of the budget. In order of arrival, so that large images get some too."""
        async with self._memory_lock:
            while self._decoding_bytes and self._decoding_bytes + cost_bytes > self._budget_bytes:
                self._memory_freed.clear()
                await self._memory_freed.wait()
            self._decoding_bytes += cost_bytes
        try:
            yield
        finally:
            self._decoding_bytes -= cost_bytes
            self._memory_freed.set()
