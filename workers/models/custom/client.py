"""The client for a custom class, driven by the pool with no model process in between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from shared.errors import PenstockError
from shared.models.catalog import Model
from shared.models.tasks.custom import interface_of
from workers.models.base import Prepared
from workers.models.client import (
    MakeRoom,
    ModelProcessDied,
    OnPreviews,
    OnProgress,
    OnStepMessage,
    RunningBatch,
)
from workers.models.custom.batches import ClassBatch
from workers.models.custom.class_process import ClassProcess
from workers.models.custom.runner.frames import Frame
from workers.models.custom.steps import ClassSteps
from workers.models.gpus import gpu_name
from workers.models.reports import BatchResult, Ready, ResidencyReport, StepsEnded
from workers.models.step_shares import StepRoom

log = logging.getLogger(__name__)


class ClassClient:
    """Implements ProcessClient for a class's process, which is set up again after it exits.

    Args:
        device: `cpu`, `cuda`, `cuda:N`, or `auto`.
        make_room: frees the device if the class can't be set up alongside other models.
    """

    def __init__(
        self, entry: Model, folder: Path, device: str, threads: int, make_room: MakeRoom
    ) -> None:
        self._interface = interface_of(entry)
        self._room = StepRoom(entry)
        self._device_name = gpu_name(device)
        self._turn = asyncio.Semaphore(1)
        self._run: ClassSteps | ClassBatch | None = None
        self._set_up_at_s = 0.0
        self._process = ClassProcess(
            entry, folder, device, threads, make_room, self._on_frame, self._on_change
        )
        self.facts = Ready(self._device_name, 0.0, 0.0, 0)
        self.residency = ResidencyReport([])

    @classmethod
    async def start(
        cls,
        entry: Model,
        folder: Path,
        device: str,
        threads: int,
        timeout_s: float,
        make_room: MakeRoom,
    ) -> Self:
        """Starts a class's process and waits until the class is set up.

        Raises:
            ConfigurationError: the folder does not contain a class that can be served, or the class
                does not match the interface. The message names the field.
            ModelFailed: the class's module or `setup` failed. A later attempt may succeed.
        """
        client = cls(entry, folder, device, threads, make_room)
        try:
            await client._process.start(timeout_s)
        except BaseException:
            await client.close()
            raise
        client._note_residency()
        client.facts = Ready(client._device_name, client._process.setup_s, 0.0, client.memory_bytes)
        return client

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def memory_bytes(self) -> int:
        return self._process.memory_bytes

    async def send(
        self,
        batch: Sequence[Prepared],
        timeout_s: float,
        on_step: OnProgress | None,
        model: int = 0,
        on_previews: OnPreviews | None = None,
    ) -> RunningBatch:
        """Same as in ProcessClient. `timeout_s` applies to each call to the class."""
        await self._turn.acquire()
        self._run = run = ClassBatch(self._process, self._interface, batch)
        running = asyncio.ensure_future(self._run_batch(run, timeout_s))
        # The turn ends when the batch does, not when the caller leaves, because the class may still
        # be running the batch.
        running.add_done_callback(lambda done: done.cancelled() or done.exception())
        done = asyncio.shield(running)
        done.add_done_callback(lambda caller: run.cancel() if caller.cancelled() else None)
        return RunningBatch(done, run.cancel, lambda slots: None)

    async def run(self, batch: Sequence[Prepared], timeout_s: float) -> BatchResult:
        """Computes a batch to completion, or cancels it when the caller is canceled. See `send`."""
        return await (await self.send(batch, timeout_s, None)).done

    async def _run_batch(self, run: ClassBatch, timeout_s: float) -> BatchResult:
        try:
            return await run.run(timeout_s)
        except PenstockError:
            raise
        except Exception as error:
            raise await self._die(error) from error
        finally:
            self._run = None
            self._turn.release()

    async def run_steps(
        self,
        batch: Sequence[Prepared],
        timeout_s: float,
        on_message: OnStepMessage,
        model: int = 0,
    ) -> StepsEnded:
        """Same as in ProcessClient, but without a time limit, because the catalog entry has one."""
        async with self._turn:
            self._run = run = ClassSteps(self._process, self._interface, self._room, on_message)
            try:
                await run.run(batch)
            except PenstockError:
                raise
            except Exception as error:
                raise await self._die(error) from error
            finally:
                self._run = None
            if run.fault is not None:
                raise run.fault
        return StepsEnded(0)

    async def _die(self, error: Exception) -> ModelProcessDied:
        """Stops the process after an unexpected error. Its items are retried.

        This is the boundary with the class's code. Nothing that the class's code does wrong may
        crash the worker.
        """
        log.error("a class could not be run", exc_info=error)
        await self._process.end("the worker failed to process its responses")
        return ModelProcessDied(f"communication with the class failed: {type(error).__name__}")

    def admit(self, items: Sequence[Prepared]) -> int | None:
        return self._run.admit(items) if isinstance(self._run, ClassSteps) else None

    def drop(self, slots: Sequence[int]) -> None:
        if isinstance(self._run, ClassSteps):
            self._run.drop(slots)

    def preempt(self, slots: Sequence[int]) -> None:
        """Does nothing, because a prediction can't be interrupted and resumed."""

    def watch(self, slots: Sequence[int]) -> None:
        """Does nothing, because classes don't produce previews."""

    async def evict(self, models: Sequence[int], on_turn: Callable[[], None]) -> None:
        """Stops the process between batches. It is restarted on the next use."""
        async with self._turn:
            on_turn()
            await self._process.end("another model needs its memory")
            self._process.take_end()
            known = self.residency
            self.residency = ResidencyReport([], known.load_s, known.size_bytes, evictions=1)

    async def serve(self, on_end: Callable[[], None]) -> str:
        """Waits until this call is canceled, then stops the process."""
        try:
            await asyncio.Event().wait()
        finally:
            on_end()
            await self.close()
        raise AssertionError("an endless wait has ended; this is a bug")

    async def close(self) -> None:
        await self._process.end("the model is no longer needed")

    def _on_frame(self, frame: Frame) -> None:
        """Passes on a response from the class.

        Raises:
            ValueError: the response is invalid; see predictions.MALFORMED for other errors.
        """
        number = frame.message.get("id")
        if number is not None and "piece" not in frame.message:
            self._process.handle_ended(number)
        if self._run is not None:
            self._run.handle(frame)

    def _on_change(self) -> None:
        if self._process.is_ready:
            self._note_residency()
        if self._run is not None:
            self._run.notice()
        else:
            self._process.take_failure()  # no waiting item can fail because of it

    def _note_residency(self) -> None:
        """Reports the class as resident, if it has been set up since the last report."""
        if self._process.set_up_at_s == self._set_up_at_s:
            return
        self._set_up_at_s = self._process.set_up_at_s
        setup_s = self._process.setup_s
        is_load = not self.residency.resident  # rather than a class that died and was set up again
        self.residency = ResidencyReport(
            [0],
            {0: round(setup_s, 6)},
            {0: self.memory_bytes},
            loads=int(is_load),
            switch_s=setup_s if is_load else 0.0,
        )
