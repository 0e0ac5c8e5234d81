"""A class's process across restarts: set up, watched, and set up again after it exits."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shared.errors import ConfigurationError, ModelFailed, PenstockError
from shared.messages import PrintedLogs
from shared.models.catalog import Model
from shared.models.entry import MAX_STARTUP_S
from shared.models.interface import ModelInterface
from shared.models.tasks.custom import interface_of
from shared.process.concurrency import add_jitter
from shared.settings import ClassSettings, Settings, read_settings
from workers.models.base import GPU_LOST_STATUS
from workers.models.client import MakeRoom, ModelProcessDied
from workers.models.custom.environments import python_for
from workers.models.custom.predictions import MALFORMED, NO_ANSWER, WrongAnswer
from workers.models.custom.printed import BoundedShow, PrintedOutput, pass_on
from workers.models.custom.process import KILL_AFTER_S, RunnerProcess, end_of
from workers.models.custom.public_text import PathRemover
from workers.models.custom.runner.confinement import SRC
from workers.models.custom.runner.frames import Frame
from workers.models.custom.services import service_ports
from workers.models.custom.sources import Sources, read_sources
from workers.models.custom.variables import EntryVariables, variables_of
from workers.models.gpus import gpu_variables

FIRST_PAUSE_S, MAX_PAUSE_S = 2.0, 60.0
"""Pause before restarting a class whose `setup` fails after having succeeded once. The pause
doubles with each failure.
"""
GPU_LOST = "AcceleratorError: CUDA error: "
"""Prefix of error messages after which a process can no longer compute on the GPU.

No caller's input can cause an error that starts like this.
"""
MAX_LAST_READS = 8
"""Maximum number of one-megabyte reads from a process that has exited.

A process's own data fits in the socket buffer, but a surviving child process may keep sending data
forever.
"""
USED_UP = "leftover memory or disk usage from earlier predictions must not make this one fail"

log = logging.getLogger(__name__)


class NotSetUp(ModelFailed):
    """The class could not be set up again. No item caused this."""


class Ended(NamedTuple):
    """The exit of a class process that had been set up."""

    status: int
    """The exit status, or the negated number of the signal that killed it."""
    killed_for: str
    """The reason we killed the process. Empty if we didn't."""
    is_at_fault: bool
    """True if we killed the process because of the class's behavior."""
    printed: PrintedOutput
    """Printed output that has not been read yet."""
    computing: int
    """Number of predictions the process was running, including dropped ones."""


class ClassProcess:
    """A class's process.

    All methods must be called on the event loop. Blocking work runs in threads.

    Args:
        device: `cpu`, `cuda`, `cuda:N`, or `auto`.
        make_room: frees the device if the class can't be set up alongside other models.
        on_change: called when the class has been set up, when setup fails, and when the process
            exits.
    """

    def __init__(
        self,
        entry: Model,
        folder: Path,
        device: str,
        threads: int,
        make_room: MakeRoom,
        on_frame: Callable[[Frame], None],
        on_change: Callable[[], None],
    ) -> None:
        self._entry = entry
        self._folder = folder
        self._device = device
        self._threads = threads
        self._make_room = make_room
        self._on_frame = on_frame
        self._on_change = on_change
        self._interface = interface_of(entry)
        self._limit_s = read_settings(ClassSettings).startup_s or entry.startup_s
        """Time limit for each later `setup`."""
        self._runner: RunnerProcess | None = None
        self._answer: asyncio.Future[Frame | None] | None = None
        """A process's first message. A result of None means that the process exited without sending
        one.
        """
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._kills: dict[int, asyncio.TimerHandle] = {}
        self._pause_s = FIRST_PAUSE_S
        self._start_at_s = 0.0
        """Earliest time of the next start, because the last `setup` failed."""
        self._failure: NotSetUp | None = None
        self._reason = ""
        """The reason the last setup failed. Callers may read it once this machine's paths have been
        removed from it.
        """
        self._sources_of_runner: Sources
        self._ended: Ended | None = None
        self._is_gone = False
        """True if a process has exited before it was ready."""
        self.paths = PathRemover(None, ())
        """Removes this machine's paths from text that callers read."""
        self.shows_tracebacks = True
        """True if callers may read the class's tracebacks."""
        self.is_ready = False
        self.computing: set[int] = set()
        """Numbers of the running predictions, including dropped ones."""
        self._numbers = 0
        self.setup_s = 0.0
        """How long the last setup took."""
        self.set_up_at_s = 0.0
        """When the last setup finished, in Unix seconds."""
        self.unconfined: Sequence[str] = ()

    @property
    def runner(self) -> RunnerProcess:
        """The process, while it is ready."""
        assert self._runner is not None, "the process is not ready; this is a bug"
        return self._runner

    @property
    def memory_bytes(self) -> int:
        """Memory used by the process and everything it has started, or 0 if it isn't running."""
        return 0 if self._runner is None else self._runner.memory_bytes

    @property
    def pid(self) -> int:
        """Process ID, or 0 if it isn't running."""
        return 0 if self._runner is None else self._runner.pid

    async def start(self, limit_s: float = MAX_STARTUP_S) -> None:
        """Starts the process for the first time, and waits until the class is set up.

        Raises:
            ConfigurationError: the folder does not contain a class that can be served, or the class
                does not match the interface. The message names the field.
            ModelFailed: the class's module or `setup` failed. A later attempt may succeed.
        """
        try:
            frame = await self._set_up(limit_s)
        except ModelFailed:
            if not await self._make_room():
                raise
            frame = await self._set_up(limit_s)
        try:
            loaded = ModelInterface(
                **frame.message["ready"], sources_sha256=self._sources_of_runner.sha256
            )
        except (TypeError, ValueError) as error:
            await self.end(NO_ANSWER)
            raise ModelFailed(f"{self._folder}: {NO_ANSWER}") from error
        if difference := self._interface.difference(loaded):
            await self.end("its class has changed")
            raise ConfigurationError(
                f"{self._folder}: {difference}; if the code is right, run: penstock models check "
                f"{self._folder}",
                field="source",
            )

    def begin(self) -> None:
        """Restarts the process unless it is running or starting. Finally, calls `on_change`."""
        if self._starting is None and not self.is_ready and not self._tasks:
            self._starting = asyncio.create_task(self._start_again())
            self._starting.add_done_callback(self._on_started)

    def take_failure(self) -> NotSetUp | None:
        """Returns the last setup's error, if it failed. Returns each error only once."""
        failure, self._failure = self._failure, None
        return failure

    def take_end(self) -> Ended | None:
        """Returns how the process ended since the last call, or None if it is still running."""
        ended, self._ended = self._ended, None
        return ended

    async def _start_again(self) -> None:
        self._reason = ""
        try:
            await asyncio.sleep(max(0.0, self._start_at_s - time.monotonic()))
            try:
                await self._set_up(self._limit_s)
            except ModelFailed:
                if not await self._make_room():
                    raise
                await self._set_up(self._limit_s)
        except PenstockError as error:
            self._start_at_s = time.monotonic() + add_jitter(self._pause_s)
            self._pause_s = min(2 * self._pause_s, MAX_PAUSE_S)
            facts = {"model": self._entry.name, "reason": error.message}
            log.error("a class could not be set up again", extra=facts)
            reason = f": {self.paths.remove(self._reason)}" if self._reason else ""
            self._failure = NotSetUp(f"the model could not be set up again{reason}")

    def _on_started(self, task: asyncio.Task[None]) -> None:
        self._starting = None
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("a class could not be started again", exc_info=error)
            self._failure = NotSetUp("the model could not be set up again")
        self._on_change()

    async def _set_up(self, limit_s: float) -> Frame:
        """Starts a process and waits until the class is set up. Returns the process's report."""
        began_s = time.monotonic()
        runner, sources = await self._start_runner()
        self._runner, self._answer = runner, asyncio.get_running_loop().create_future()
        self._is_gone = False
        self._sources_of_runner = sources
        self.shows_tracebacks = sources.shows_tracebacks
        self.paths = paths_of(self._folder, sources, runner)
        self._watch(runner)
        try:
            async with asyncio.timeout(limit_s):
                frame = await self._answer
        except TimeoutError as error:
            raise await self._explain(runner, f"setup took longer than {limit_s:g} s") from error
        finally:
            self._answer = None
        if frame is None:
            raise await self._explain(runner, "")
        if "ready" not in frame.message:
            reason = str(frame.message.get("failed", "it did not start"))
            raise await self._explain(runner, reason, is_final=bool(frame.message.get("is_final")))
        await asyncio.to_thread(runner.printed.end_showing)
        await asyncio.to_thread(runner.look)
        if self._is_gone:
            raise await self._explain(runner, "")
        self._note_ready(runner, began_s)
        return frame

    async def _start_runner(self) -> tuple[RunnerProcess, Sources]:
        """Starts a process on a thread, because starting copies files and may fetch secrets."""
        starting = asyncio.ensure_future(asyncio.to_thread(self._make_runner))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._do(_end_unneeded(starting))  # a separate task, so a second cancel can't stop it
            raise
        except OSError as error:
            raise ModelFailed(f"{self._folder}: could not be started: {error}") from error

    def _make_runner(self) -> tuple[RunnerProcess, Sources]:
        variables = variables_of(
            self._folder, EntryVariables(self._entry.environment, self._entry.secrets)
        )
        sources = read_sources(self._folder)
        runner = RunnerProcess(
            self._folder,
            python=python_for(self._folder),
            threads=self._threads,
            environment=gpu_variables(self._device) | dict(variables.environment),
            hidden=variables.hidden,
            resources=self._entry.resources,
            denied_ports=service_ports(read_settings(Settings)),
            shows=BoundedShow(),
        )
        return runner, sources

    def _note_ready(self, runner: RunnerProcess, began_s: float) -> None:
        self.setup_s, self.set_up_at_s = time.monotonic() - began_s, time.time()
        self._pause_s, self._start_at_s = FIRST_PAUSE_S, 0.0
        if not self.unconfined:
            for reason in runner.unconfined or ():
                facts = {"model": self._entry.name, "reason": reason}
                log.warning("a class is running unconfined", extra=facts)
        self.unconfined = runner.unconfined or ()
        self.is_ready = True

    async def _explain(
        self, runner: RunnerProcess, reason: str, *, is_final: bool = False
    ) -> PenstockError:
        """Closes a process that could not be set up.

        Returns the error, including the printed output.
        """
        printed = runner.printed.take().after(0).strip()
        status = await self._finish(runner, reason or runner.killed_for)
        if not reason:
            how = end_of(status)
            if runner.killed_for:
                how = f"was killed: {runner.killed_for};"
            reason = f"its process {how} before setup finished"
        self._reason = reason
        whole = f"{self._folder}: {reason}" + (f"\n{printed}" if printed else "")
        return ConfigurationError(whole, field="source") if is_final else ModelFailed(whole)

    def _watch(self, runner: RunnerProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(runner.fileno(), self._on_readable, runner)
        if runner.pidfd >= 0:
            loop.add_reader(runner.pidfd, self._on_death, runner)

    def _unwatch(self, runner: RunnerProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(runner.fileno())
        loop.remove_writer(runner.fileno())
        if runner.pidfd >= 0:
            loop.remove_reader(runner.pidfd)

    def _on_readable(self, runner: RunnerProcess) -> None:
        if not self._read(runner):
            self._on_end(runner)

    def _on_death(self, runner: RunnerProcess) -> None:
        """Handles the process's exit. A child process may still hold its end of the socket open."""
        for _ in range(MAX_LAST_READS):
            if self._runner is not runner or not runner.may_read() or not self._read(runner):
                break
        self._on_end(runner)

    def _read(self, runner: RunnerProcess) -> bool:
        """Reads available data and passes on complete frames. Returns whether more may come."""
        if self._runner is not runner:
            return False
        may_come = runner.read()
        try:
            for frame in runner.take_frames():
                if self._answer is None:
                    self._on_frame(frame)
                elif not self._answer.done():
                    self._answer.set_result(frame)
        except MALFORMED as error:
            facts = {"model": self._entry.name, "reason": repr(error)[:200]}
            log.warning(NO_ANSWER, extra=facts)
            reason = str(error) if isinstance(error, WrongAnswer) else NO_ANSWER
            runner.killed_for, runner.is_at_fault = runner.killed_for or reason, True
            return False
        return may_come

    def _on_end(self, runner: RunnerProcess) -> None:
        """Handles a process that has exited or closed its end of the socket."""
        if self._runner is not runner:
            return
        self._unwatch(runner)
        if not self.is_ready:  # the task that is setting it up will close it
            self._is_gone = True
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(None)
            return
        self._runner, self.is_ready = None, False
        self._do(self._close_ended(runner, len(self.computing)))

    async def _close_ended(self, runner: RunnerProcess, computing: int) -> None:
        status = 0
        try:
            status = await self._finish(runner, runner.killed_for)
        finally:
            self._ended = Ended(
                status, runner.killed_for, runner.is_at_fault, runner.printed, computing
            )

    async def _finish(self, runner: RunnerProcess, reason: str) -> int:
        """Closes a process and removes its files. Returns its exit status."""
        if self._runner is runner:
            self._runner, self.is_ready = None, False
            self._unwatch(runner)
        for timer in self._kills.values():
            timer.cancel()
        self._kills.clear()
        self.computing.clear()
        return await asyncio.shield(asyncio.to_thread(_end, runner, reason))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine to completion, then calls `on_change`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)

        def on_done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a class could not be stopped", exc_info=error)
            self._on_change()

        task.add_done_callback(on_done)

    def next_number(self) -> int:
        """Returns a prediction number that has never been used."""
        self._numbers += 1
        return self._numbers

    def send(
        self,
        messages: Sequence[tuple[dict[str, Any], Sequence[bytes]]],
        numbers: Sequence[int],
    ) -> None:
        """Sends all the messages at once, or as much of them as the process reads.

        The rest follows.

        `numbers`: numbers of the predictions that the messages start, or BATCH.
        """
        runner = self.runner
        self.computing.update(numbers)
        runner.send_all(messages)
        self._flush(runner)

    def _flush(self, runner: RunnerProcess) -> None:
        if runner.flush():
            loop = asyncio.get_running_loop()
            loop.add_writer(runner.fileno(), self._on_writable, runner)

    def _on_writable(self, runner: RunnerProcess) -> None:
        if not runner.flush():
            asyncio.get_running_loop().remove_writer(runner.fileno())

    def cancel(self, number: int) -> None:
        """Cancels a prediction, and kills the process if the prediction does not stop.

        The prediction gets as much time as setup took, so no caller can keep a class stuck in
        `setup`.
        """
        runner = self.runner
        limit_s = max(KILL_AFTER_S, self.setup_s)
        reason = "it did not stop after being canceled"
        loop = asyncio.get_running_loop()
        self._kills[number] = loop.call_later(limit_s, self._kill, runner, reason)
        runner.cancel(number)
        self._flush(runner)

    def handle_ended(self, number: int) -> None:
        self.computing.discard(number)
        if (timer := self._kills.pop(number, None)) is not None:
            timer.cancel()

    def _kill(self, runner: RunnerProcess, reason: str) -> None:
        """Kills a process and everything it has started, on a thread."""
        runner.killed_for = runner.killed_for or reason
        self._do(asyncio.to_thread(runner.kill, reason))

    async def end(self, reason: str) -> None:
        """Stops the process if it is running or starting. `begin` restarts it."""
        if (starting := self._starting) is not None:
            starting.cancel()
        try:
            if starting is not None:
                await asyncio.wait([starting])
        finally:
            if self._runner is not None:
                await self._finish(self._runner, reason)
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def add_traceback(self, logs: PrintedLogs, frame: Frame) -> PrintedLogs:
        """Returns the logs with a response's traceback, unless the author hides it from callers."""
        traceback = str(frame.message.get("log", ""))
        if not self.shows_tracebacks:
            pass_on(PrintedLogs(traceback))
            return logs
        return PrintedLogs(logs.text + self.paths.remove(traceback), logs.left_out)

    def has_lost_gpu(self, frame: Frame) -> bool:
        """Returns whether a response reports that the process can no longer use its GPU."""
        error = str(frame.message.get("error", "")) or str(frame.message.get("batch_error", ""))
        return self._device.startswith("cuda") and error.startswith(GPU_LOST)

    async def give_up(self) -> ModelProcessDied:
        """Stops a process that has lost its GPU.

        Returns the error for the process's current predictions.
        """
        reason = f"the class's process lost its GPU (status {GPU_LOST_STATUS})"
        await self.end(reason)
        return ModelProcessDied(reason)

    async def renew_if_used_up(self) -> bool:
        """Stops the process if its predictions left too little memory or disk space.

        This includes a process that is already being killed for this reason, so that the next
        prediction doesn't fail because of it. Call this only while nothing is running. Returns
        whether the process was stopped.
        """
        runner = self.runner
        try:
            is_used_up = runner.may_be_used_up and await asyncio.to_thread(
                lambda: runner.is_used_up
            )
        except OSError:  # the class has removed its own scratch folder
            is_used_up = True
        # Checked last: a process that is being killed may already have released its memory.
        if not is_used_up and not runner.killed_for:
            return False
        if self._runner is runner:
            await self._finish(runner, USED_UP)
        return True


def paths_of(folder: Path, sources: Sources, runner: RunnerProcess) -> PathRemover:
    """Returns a function that removes the paths that a folder's class sees in its runner."""
    named = sources.environment.get("COG_WEIGHTS") or os.environ.get("COG_WEIGHTS")
    weights = [Path(named)] if named and named.startswith("/") else []
    return PathRemover(runner.scratch_path, [folder, Path(SRC), *weights])


async def _end_unneeded(starting: asyncio.Future[tuple[RunnerProcess, Sources]]) -> None:
    with contextlib.suppress(PenstockError, OSError):
        runner, _ = await starting
        await asyncio.to_thread(_end, runner, "the model is no longer needed")


def _end(runner: RunnerProcess, reason: str) -> int:
    """Kills a process if a reason is given, and waits for it to exit. Returns its exit status."""
    if reason:
        runner.kill(reason)
    return runner.close()
