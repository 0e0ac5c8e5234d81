"""The client for one model process: starts it, sends it batches, and reports how it exited."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self, cast

import msgspec

from shared.errors import MALFORMED, ConfigurationError, ModelFailed
from workers.models.base import Prepared
from workers.models.client import (
    ModelProcessDied,
    OnPreviews,
    OnProgress,
    OnStepMessage,
    RunningBatch,
)
from workers.models.reports import (
    BatchResult,
    ItemEnded,
    Previews,
    Ready,
    ResidencyReport,
    StepDone,
    StepMessage,
    StepsEnded,
)
from workers.runtime.child_process import ChildProcess
from workers.runtime.output import ChildOutput
from workers.runtime.protocol import (
    FRAME_MAX_BYTES,
    HEADER,
    IN_FLIGHT,
    Refused,
    ServerMessage,
    decode_server_message,
    encode_admit,
    encode_cancel,
    encode_drop,
    encode_evict,
    encode_preempt,
    encode_run,
    encode_watch,
)

EXIT_LIMIT_S = 5.0

log = logging.getLogger(__name__)


Start = Callable[[socket.socket], Awaitable[ChildProcess]]
"""Starts a process and passes it its end of the socket."""


@dataclass(slots=True)
class _Pending:
    number: int
    size: int
    done: asyncio.Future[BatchResult | StepsEnded]
    on_step: OnProgress | None
    on_previews: OnPreviews | None
    timer: asyncio.TimerHandle
    timeout_s: float
    model: int
    turns: int
    on_steps: OnStepMessage | None = None


class ModelClient:
    """A ProcessClient for a model process that is ready. If the process exits, its batches fail.

    On a CPU, it runs one batch at a time. Running a second one was tried and rejected: even without
    it, the process is busy 99% of the time (with batches of 1,000 tokens), and a batch formed later
    is fuller. On a device that computes asynchronously, it runs two at a time (decision 143).
    """

    def __init__(
        self, process: ChildProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._output = ChildOutput(process)
        self._turns = asyncio.Semaphore(IN_FLIGHT)
        """One turn per batch of an overlapping model. Any other batch takes all of the turns."""
        self._entrance = asyncio.Lock()
        """Held while waiting for turns, so that they are taken in order of arrival."""
        self._pending: dict[int, _Pending] = {}
        """The batches in the process, keyed by number, oldest first."""
        self._batches = 0
        self._fault = ""
        self._reason = ""
        self.facts = Ready("", 0.0, 0.0, 0)
        self.residency = ResidencyReport([0])
        self.memory_bytes = 0

    @classmethod
    async def start(cls, start: Start, timeout_s: float) -> Self:
        """Starts a process and waits until it is ready.

        Args:
            timeout_s: maximum time for the process to become ready.

        Raises:
            PenstockError: the process refused to start (usually ConfigurationError), died, or was
                not ready in time (ModelFailed, with the last part of its output).
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await start(theirs)
            except BaseException:
                ours.close()
                raise
        child = cls(process, *await _connect(ours, process))
        try:
            async with asyncio.timeout(timeout_s):
                await child._wait_ready()
        except TimeoutError as error:
            await child._abandon()
            tail = child._output.tail()
            message = f"the model process was not ready within {timeout_s:g} s{tail}"
            raise ModelFailed(message) from error
        except BaseException:
            await child._abandon()
            raise
        return child

    async def _abandon(self) -> None:
        """Kills a process that isn't ready and so wouldn't notice that the socket is closed."""
        self.kill("it was not ready")
        await self.close()

    async def _wait_ready(self) -> None:
        match await self._read():
            case Ready() as ready:
                self.facts = ready
                self.residency = ready.residency or self.residency
                self.memory_bytes = ready.memory_bytes
            case Refused() as refused:
                kind = (
                    ConfigurationError if refused.code == ConfigurationError.code else ModelFailed
                )
                raise kind(refused.message, field=refused.field)
            case _:
                status = await self._process.wait()
                await self._output.finish()
                raise ModelFailed(
                    "the model process exited before it was ready (status "
                    f"{status}){self._output.tail()}"
                )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send(
        self,
        batch: Sequence[Prepared],
        timeout_s: float,
        on_step: OnProgress | None,
        model: int = 0,
        on_previews: OnPreviews | None = None,
    ) -> RunningBatch:
        pending = await self._begin(len(batch), timeout_s, model, model in self.facts.overlapping)
        pending.on_step, pending.on_previews = on_step, on_previews
        self._writer.write(encode_run(pending.number, list(batch), model))
        # `_handle` checks each message's type, so this loop ends with a BatchResult.
        done = cast("asyncio.Future[BatchResult]", pending.done)
        number = pending.number
        return RunningBatch(done, partial(self._cancel, number), partial(self._watch, number))

    async def run_steps(
        self,
        batch: Sequence[Prepared],
        timeout_s: float,
        on_message: OnStepMessage,
        model: int = 0,
    ) -> StepsEnded:
        pending = await self._begin(len(batch), timeout_s, model, is_overlapping=False)
        pending.on_steps = on_message
        self._writer.write(encode_run(pending.number, list(batch), model, in_steps=True))
        done = await pending.done
        assert isinstance(done, StepsEnded), (
            "the batch ended with a different type of message; this is a bug"
        )
        return done

    async def _begin(
        self, size: int, timeout_s: float, model: int, is_overlapping: bool
    ) -> _Pending:
        # Turns end with the batch rather than with the caller. When a caller is canceled, the
        # process keeps computing.
        turns = await self._take_turns(model, is_overlapping)
        if self._reason:
            self._release(turns)
            raise ModelProcessDied(self._reason)
        self._batches += 1
        done = asyncio.get_running_loop().create_future()
        timer = self._start_timer(timeout_s)
        pending = _Pending(self._batches, size, done, None, None, timer, timeout_s, model, turns)
        self._pending[pending.number] = pending
        return pending

    async def _take_turns(self, model: int, is_overlapping: bool) -> int:
        """Waits until the process can accept a batch. Returns the number of turns to release.

        Only batches for the same model overlap, so no model is evicted while it computes.
        """
        turns = 0
        async with self._entrance:
            is_alone = all(pending.model == model for pending in self._pending.values())
            wanted = 1 if is_overlapping and is_alone else IN_FLIGHT
            try:
                while turns < wanted:
                    await self._turns.acquire()
                    turns += 1
            except asyncio.CancelledError:
                self._release(turns)
                raise
        return turns

    def _release(self, turns: int) -> None:
        for _ in range(turns):
            self._turns.release()

    def _start_timer(self, timeout_s: float) -> asyncio.TimerHandle:
        reason = f"the batch did not finish within {timeout_s:g} s"
        return asyncio.get_running_loop().call_later(timeout_s, self.kill, reason)

    def admit(self, items: Sequence[Prepared]) -> int | None:
        pending = self._in_steps
        if pending is None:
            return None
        first, pending.size = pending.size, pending.size + len(items)
        self._writer.write(encode_admit(pending.number, first, list(items)))
        return first

    def drop(self, slots: Sequence[int]) -> None:
        """Stops these items in the batch that runs in steps. They fail as canceled."""
        if (pending := self._in_steps) is not None and slots:
            self._writer.write(encode_drop(pending.number, list(slots)))

    def preempt(self, slots: Sequence[int]) -> None:
        """Interrupts these items in the batch that runs in steps. They come back as preempted."""
        if (pending := self._in_steps) is not None and slots:
            self._writer.write(encode_preempt(pending.number, list(slots)))

    def watch(self, slots: Sequence[int]) -> None:
        """Briefly requests previews of these slots in the batch that runs in steps."""
        if (pending := self._in_steps) is not None:
            self._watch(pending.number, slots)

    @property
    def _in_steps(self) -> _Pending | None:
        """Returns the batch that runs in steps. It has the process to itself."""
        pending = next(iter(self._pending.values()), None)
        return None if pending is None or pending.on_steps is None else pending

    def _cancel(self, number: int) -> None:
        if number in self._pending:
            self._writer.write(encode_cancel(number))

    def _watch(self, number: int, slots: Sequence[int]) -> None:
        if number in self._pending:
            self._writer.write(encode_watch(number, list(slots)))

    async def evict(self, models: Sequence[int], on_turn: Callable[[], None]) -> None:
        """Frees these models' memory between batches."""
        turns = await self._take_turns(-1, is_overlapping=False)
        try:
            on_turn()
            if not self._reason:
                self._writer.write(encode_evict(list(models)))
                resident = [model for model in self.residency.resident if model not in models]
                self.residency = ResidencyReport(
                    resident, self.residency.load_s, self.residency.size_bytes
                )
        finally:
            self._release(turns)

    def kill(self, fault: str) -> None:
        """Kills the process. Callers get `fault` as the reason why their items failed."""
        self._fault = self._fault or fault
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def serve(self, on_end: Callable[[], None]) -> str:
        """Handles messages until the process exits.

        It then fails the process's batches, and returns the reason along with the process's last
        output. Only operators may read that output, because it contains paths and may come from any
        tenant.
        """
        try:
            while (message := await self._read()) is not None and not self._fault:
                self._handle(message)
        finally:
            try:
                await self.close()
            finally:
                on_end()
                self._fail_batches()
        return f"{self._reason}{self._output.tail()}"

    def _fail_batches(self) -> None:
        fault = f": {self._fault}" if self._fault else ""
        self._reason = f"the model process exited (status {self._process.returncode}){fault}"
        for pending in list(self._pending.values()):
            if (done := self._end(pending)) is not None:
                done.set_exception(ModelProcessDied(self._reason))

    async def _read(self) -> ServerMessage | None:
        """Returns the next message, or None at the end of the stream."""
        try:
            (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if length > FRAME_MAX_BYTES:
                raise msgspec.DecodeError(f"invalid frame length: {length} bytes")
            return decode_server_message(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except MALFORMED as error:
            self.kill(f"it sent an invalid message: {error}")
            return None

    def _handle(self, message: ServerMessage) -> None:
        pending = (
            None if isinstance(message, Ready | Refused) else self._pending.get(message.number)
        )
        if isinstance(message, Ready | Refused) or pending is None:
            self.kill(f"it sent an unexpected {type(message).__name__}")
        elif isinstance(message, StepMessage) != (pending.on_steps is not None):
            self.kill(f"it sent {type(message).__name__} for a different kind of batch")
        elif isinstance(message, StepMessage):
            self._handle_steps(message, pending)
        elif isinstance(message, StepDone):
            if pending.on_step is not None:
                pending.on_step(message.step, message.steps)
        elif isinstance(message, Previews):
            if pending.on_previews is not None:
                pending.on_previews(message)
        elif len(message.results) != pending.size:
            self.kill(f"it returned {len(message.results)} results for {pending.size} items")
        else:
            self.memory_bytes = message.memory_bytes
            self.residency = message.switched or self.residency
            if (done := self._end(pending)) is not None:
                done.set_result(message)

    def _handle_steps(self, message: StepMessage, pending: _Pending) -> None:
        if isinstance(message, StepsEnded):
            self.residency = message.switched or self.residency
            if (done := self._end(pending)) is not None:
                done.set_result(message)
            return
        pending.timer.cancel()
        pending.timer = self._start_timer(pending.timeout_s)
        if isinstance(message, ItemEnded):
            self.memory_bytes = message.done.memory_bytes
        if pending.on_steps is not None and not pending.done.done():
            pending.on_steps(message)

    def _end(self, pending: _Pending) -> asyncio.Future[BatchResult | StepsEnded] | None:
        """Admits the next batch. Returns this batch's future, unless its caller is gone."""
        del self._pending[pending.number]
        pending.timer.cancel()
        for other in self._pending.values():  # a batch's time limit starts once it is the oldest
            other.timer.cancel()
            other.timer = self._start_timer(other.timeout_s)
        self._release(pending.turns)
        return None if pending.done.done() else pending.done

    async def close(self) -> None:
        """Closes the socket, which makes the process exit.

        Kills the process if that takes too long.
        """
        self._writer.transport.abort()
        try:
            async with asyncio.timeout(EXIT_LIMIT_S):
                await self._process.wait()
        except TimeoutError:
            self.kill("it did not exit")
            await self._process.wait()
        await self._output.finish()


async def _connect(
    ours: socket.socket, process: ChildProcess
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_unix_connection(sock=ours)
    except BaseException:
        # Only a cancellation can lead here, because the connection itself can't fail.
        ours.close()
        process.kill()
        await process.wait()
        raise
