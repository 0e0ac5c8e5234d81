"""A pool of processes that decode and encode images, with a bounded queue and a memory budget.

A request's deadline applies both while its image is queued and while the image is being decoded. At
the deadline, or when the caller hangs up, the process is killed. A new process starts within a
tenth of a second. Idle processes exit, so an API without image traffic has no codec processes.
Tenants take turns in the queue. Each tenant's images are handled in arrival order. One tenant can't
use all processes. If a tenant is not decoding anything else, its small image does not wait for
memory used by other tenants.

See docs/decisions/0015-image-codec-processes.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, Self, TypeVar

from api import metrics
from api.fair_room import FairRoom, OneItem
from api.inputs.codec_protocol import (
    LENGTHS,
    CodecCommand,
    CodecError,
    CodecReply,
    CodecRequest,
    HeaderRead,
    Proceed,
    decode_reply,
    frame_header,
)
from shared.errors import (
    BadInput,
    DeadlineExceeded,
    Overloaded,
    PenstockError,
    Unavailable,
    error_for_code,
)
from shared.settings import environment_with

COMMAND = (sys.executable, "-W", "ignore", "-m", "api.inputs.codec_server")
"""Suppresses warnings, so that callers' images can't flood the log with Pillow's warnings."""
PIECE_BYTES = 256 * 1024
"""Bytes per write: 32 MB in one write would block the event loop for 10 ms."""
MAX_REPLY_BYTES = 512 * 1024 * 1024
EXIT_LIMIT_S = 2.0
"""How long a process that has closed its socket may take to exit before it is killed."""

ReserveMemory = Callable[[int], AbstractAsyncContextManager[None]]
"""Waits until this many bytes of the memory budget are free, and holds them for the duration of the
block.
"""

T = TypeVar("T")

MAX_QUEUED = 64
"""Maximum number of new images waiting for a process."""
MAX_QUEUED_BYTES = 128 * 1024 * 1024
"""Maximum total size of waiting image files. The first file is admitted regardless of its size."""
IDLE_S = 30.0
"""A process exits after being idle for this long."""
FIRST_SERVICE_S, NEWEST_WEIGHT = 0.3, 0.2
"""Initial estimate of the seconds per image, and the newest value's weight in the moving average.
"""
MIN_RETRY_S, MAX_RETRY_S = 0.25, 60.0
SPARE_PROCESSES = 1
"""Number of processes in addition to one tenant's maximum."""
SMALL_SHARE = 0.25
"""An image counts as small if it needs at most this fraction of the memory budget."""


class CodecClient:
    """A codec process.

    Accepts no more commands once a command has been canceled or has caused the process to be
    killed.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls) -> Self:
        """Starts a process. The first command may be sent before the process is ready.

        Raises:
            Unavailable: the system could not start a process.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *COMMAND,
                    str(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    # The process gets none of the API's settings, and therefore none of its
                    # secrets.
                    env=environment_with({}),
                    stdin=asyncio.subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise Unavailable(f"failed to start an image process: {error}") from error
            except BaseException:
                ours.close()
                raise
        try:
            return cls(process, *await asyncio.open_unix_connection(sock=ours))
        except BaseException:
            # Only a cancellation can cause this, because the socket is already connected.
            ours.close()
            process.kill()
            await process.wait()
            raise

    @property
    def is_up(self) -> bool:
        return (
            self._process.returncode is None
            and not self._writer.is_closing()
            and not self._reader.at_eof()
        )

    async def run(
        self, command: CodecCommand, data: bytes, reserve: ReserveMemory
    ) -> tuple[CodecReply, bytes]:
        """Runs one command on the image in `data`.

        If the call is canceled, the process must be killed.

        Args:
            reserve: called after the image header has been read and before anything is decoded.

        Raises:
            BadInput: the image was rejected. The caller adds the field name.
        """
        try:
            await self._send(command, data)
            reply, result = await self._read()
            if isinstance(reply, HeaderRead):
                async with reserve(reply.cost_bytes):
                    await self._send(Proceed())
                    reply, result = await self._read()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise await self._death_error() from error
        if isinstance(reply, CodecError):
            raise error_for_code(reply.code, reply.reason, reply.field)
        return reply, result

    async def _send(self, frame: CodecRequest, data: bytes = b"") -> None:
        self._writer.write(frame_header(frame, len(data)))
        whole = memoryview(data)
        for start in range(0, len(whole), PIECE_BYTES):
            self._writer.write(whole[start : start + PIECE_BYTES])
            await self._writer.drain()

    async def _read(self) -> tuple[CodecReply, bytes]:
        frame_bytes, data_bytes = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
        reply = decode_reply(await self._reader.readexactly(frame_bytes))
        if data_bytes > MAX_REPLY_BYTES:
            raise ConnectionError(f"a reply claims to be {data_bytes} bytes long")
        return reply, await self._reader.readexactly(data_bytes)

    async def _death_error(self) -> PenstockError:
        self._writer.transport.abort()
        # The process exits on its own. Killing it would poll it first, which could steal its exit
        # status from the thread that is waiting for it, and asyncio would then report 255.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_LIMIT_S):
                await self._process.wait()
        await self.kill()
        status = self._process.returncode
        if status == -signal.SIGXCPU:
            return BadInput(
                "the image takes too much CPU time to decode; send it in a different format or "
                "with fewer pixels"
            )
        return Unavailable(f"the process handling the image exited (status {status})")

    async def kill(self) -> None:
        """Kills the process and waits until it has exited."""
        self._writer.transport.abort()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


class FairQueue(Generic[T]):
    """A queue in which tenants take turns."""

    def __init__(self) -> None:
        self._of_tenants: OrderedDict[str, deque[T]] = OrderedDict()

    def add(self, tenant: str, entry: T) -> None:
        """Appends an entry. A new tenant goes to the end of the line."""
        self._of_tenants.setdefault(tenant, deque()).append(entry)

    def discard(self, tenant: str, entry: T) -> None:
        """Removes an entry unless it has already been popped."""
        entries = self._of_tenants.get(tenant, deque[T]())
        if entry not in entries:
            return
        entries.remove(entry)
        if not entries:
            del self._of_tenants[tenant]

    def pop(self, may_start: Callable[[str], bool]) -> tuple[str, T] | None:
        """Removes the first entry for the tenant whose turn it is, and returns both.

        Args:
            may_start: returns whether a tenant may take a turn.

        Returns:
            None if no such tenant is waiting.
        """
        tenant = next(filter(may_start, self._of_tenants), None)
        if tenant is None:
            return None
        entries = self._of_tenants[tenant]
        first = entries.popleft()
        if entries:
            self._of_tenants.move_to_end(tenant)
        else:
            del self._of_tenants[tenant]
        return tenant, first


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
        processes: maximum number of processes per tenant. All tenants together may use
            SPARE_PROCESSES more than that.
        budget_bytes: memory for all images being decoded. An image over the budget is decoded by
            itself. In addition, each process may decode a small image for a tenant that is not
            decoding anything else.
        start: starts a process. Replaced by tests.
    """

    def __init__(
        self,
        processes: int,
        budget_bytes: int,
        start: Callable[[], Awaitable[CodecClient]] = CodecClient.start,
    ) -> None:
        self._start = start
        self._free = processes + SPARE_PROCESSES
        self._processes = processes
        self._running: Counter[str] = Counter()
        """Number of processes in use by each tenant."""
        self._budget_bytes = budget_bytes
        # Results go first because they are already computed and paid for.
        self._lines: dict[bool, FairQueue[asyncio.Future[None]]] = {
            False: FairQueue(),
            True: FairQueue(),
        }
        self._results_waiting = 0
        self._room = FairRoom(MAX_QUEUED)
        self._bytes_room = FairRoom(MAX_QUEUED_BYTES)
        self._idle: dict[CodecClient, asyncio.TimerHandle] = {}
        self._killing: set[asyncio.Task[None]] = set()
        self._memory_lock = asyncio.Lock()
        self._memory_freed = asyncio.Event()
        self._decoding_bytes = 0
        self._decoding: Counter[str] = Counter()
        """Number of images with reserved memory, per tenant."""
        self._service_s = FIRST_SERVICE_S

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
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
            deadline_s: Unix time at which to stop the command.
            is_new: True if the command may be rejected. Commands on results that have already been
                computed go first and are never rejected.
            tenant: the tenant whose turn this command uses. All unknown callers share the empty
                tenant.

        Raises:
            Overloaded: the queue is full, or the command would miss its deadline.
            DeadlineExceeded: the command was stopped at its deadline.
        """
        task = _Task(is_new, tenant, len(data))
        remaining_s = deadline_s - time.time()
        if is_new and not self._may_start(tenant):
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
        """Rejects a command that would miss its deadline.

        If the queue is empty, every command is admitted.
        """
        if not self._room.total:
            return
        image, size = OneItem(task.tenant), OneItem(task.tenant, items=max(1, task.size_bytes))
        before = self._room.ahead_of(image, enough=-1.0) + self._results_waiting
        wait_s = (1 + before) * self._service_s / self._processes
        late_s = wait_s + self._service_s - remaining_s
        if self._room.turns_to_wait(image) or self._bytes_room.turns_to_wait(size):
            waiting = self._room.count_held(task.tenant)
            reason = (
                f"{waiting} of your images are waiting to be decoded, and there is no room for more"
            )
            retry_after_s = self._service_s
        elif late_s > 0:
            reason = f"the image would be decoded {late_s:.3g} s after its deadline"
            retry_after_s = min(late_s, wait_s)
        else:
            return
        metrics.IMAGES.labels("shed").inc()
        bounded_s = min(max(retry_after_s, MIN_RETRY_S), MAX_RETRY_S)
        raise Overloaded(f"{reason}; try again in {bounded_s:.2g} s", retry_after_s=bounded_s)

    async def _acquire_process(self, task: _Task) -> None:
        """Waits for a process. Must be followed by `_release_process` unless this method raises."""
        if self._may_start(task.tenant):
            self._occupy_process(task.tenant)
            return
        line, turn = self._lines[task.is_new], asyncio.get_running_loop().create_future()
        line.add(task.tenant, turn)
        with self._count_task(task):
            try:
                await turn
            except asyncio.CancelledError:
                if turn.cancelled():
                    # A process that has become free in the meantime may already have skipped this
                    # entry.
                    line.discard(task.tenant, turn)
                else:
                    self._release_process(task.tenant)
                raise

    @contextmanager
    def _count_task(self, task: _Task) -> Iterator[None]:
        image, size = OneItem(task.tenant), OneItem(task.tenant, items=max(1, task.size_bytes))
        if task.is_new:
            self._room.take(image)
            self._bytes_room.take(size)
        else:
            self._results_waiting += 1
        try:
            with metrics.IMAGES_WAITING.track_inprogress():
                yield
        finally:
            if task.is_new:
                self._room.release(image)
                self._bytes_room.release(size)
            else:
                self._results_waiting -= 1

    def _may_start(self, tenant: str) -> bool:
        return self._free > 0 and self._running[tenant] < self._processes

    def _occupy_process(self, tenant: str) -> None:
        self._free -= 1
        self._running[tenant] += 1

    def _release_process(self, tenant: str) -> None:
        """Frees a tenant's process and starts the next commands."""
        self._free += 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        for line in self._lines.values():
            while (popped := line.pop(self._may_start)) is not None:
                waiting, turn = popped
                if not turn.done():
                    self._occupy_process(waiting)
                    turn.set_result(None)

    async def _run(
        self, task: _Task, command: CodecCommand, data: bytes
    ) -> tuple[CodecReply, bytes]:
        task.is_started, started_s = True, time.monotonic()
        child, is_reusable = None, False
        try:
            child = self._reuse_idle() or await self._start()
            try:
                done = await child.run(command, data, partial(self._reserve_memory, task.tenant))
            finally:
                is_reusable = child.is_up
            self._service_s += NEWEST_WEIGHT * (time.monotonic() - started_s - self._service_s)
            return done
        except BadInput:
            raise
        except BaseException:
            # The command was canceled or failed, so its process is killed.
            is_reusable = False
            raise
        finally:
            if child is None:
                self._release_process(task.tenant)
            elif is_reusable:
                self._idle[child] = asyncio.get_running_loop().call_later(
                    IDLE_S, self._stop_idle, child
                )
                self._release_process(task.tenant)
            else:
                self._kill(child, then=partial(self._release_process, task.tenant))

    def _reuse_idle(self) -> CodecClient | None:
        """Returns the most recently used idle process.

        None if no process is idle.
        """
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

    def _kill(self, child: CodecClient, then: Callable[[], None] | None = None) -> None:
        """Kills a process, and calls `then` once it exits, so that there are never too many."""
        task = asyncio.create_task(child.kill())
        self._killing.add(task)
        task.add_done_callback(self._killing.discard)
        if then is not None:
            task.add_done_callback(lambda task: then())

    @asynccontextmanager
    async def _reserve_memory(self, tenant: str, cost_bytes: int) -> AsyncGenerator[None]:
        """Reserves memory for a tenant's image.

        If a tenant is not decoding anything else, its small image gets memory immediately, in
        addition to the budget. Other images wait for the budget in arrival order, so that large
        ones get their turn.
        """
        is_small = cost_bytes <= self._budget_bytes * SMALL_SHARE
        is_additional = is_small and not self._decoding[tenant]
        if not is_additional:
            await self._take_memory(cost_bytes)
        self._decoding[tenant] += 1
        try:
            yield
        finally:
            self._decoding[tenant] -= 1
            if not self._decoding[tenant]:
                del self._decoding[tenant]
            if not is_additional:
                self._decoding_bytes -= cost_bytes
                self._memory_freed.set()

    async def _take_memory(self, cost_bytes: int) -> None:
        """Takes memory from the budget, or the whole budget if the image is larger than that."""
        async with self._memory_lock:
            while self._decoding_bytes and self._decoding_bytes + cost_bytes > self._budget_bytes:
                self._memory_freed.clear()
                await self._memory_freed.wait()
            self._decoding_bytes += cost_bytes
